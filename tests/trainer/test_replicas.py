"""A run whose replicas are compared ends, in one line, where a bit of one turns over, and goes on from before that.

That it says nothing of sound runs, which are killed and resized, is in test_elastic.py and test_fire.py.
"""

import json
import socket
from contextlib import closing
from pathlib import Path

import pytest

from elastic.master.journal import Journal
from elastic.proto.manifest import step_of
from tests.trainer.launch import assert_same, finish, refused, start

FLAG = "--check-weight-hash-across-dp-replicas-interval"
FLIPPED = ("-m", "tests.trainer.flipped")
NAME = "blocks.1.mlp.up.weight"
LONG = ("--train-iters=8", "--save-interval=2")


def test_what_was_saved_since_the_last_comparison_is_not_loaded_again(tmp_path: Path) -> None:
    """A bit turns over, and that is saved, in memory and on storage; then it is seen. The ranks that are started
    again go on from before it, and end with the bits of a run in which nothing happened."""
    flags = ("--train-iters=8", "--save-interval=1", f"{FLAG}=2")
    finish(start(tmp_path, "whole", *flags, nproc=3))
    env, notices = {"FLIP": f"3:1:{NAME}"}, tmp_path / "notices"
    launcher = (
        "--standalone", "--max-restarts=1", "--precheck=quick", "--node-id=n", f"--state-dir={tmp_path / 'state'}",
        "--notify", f"cat >> '{notices}'",
    )  # fmt: skip
    run = start(tmp_path, "odd", *flags, nproc=3, launcher=launcher, script=FLIPPED, env=env)
    output = finish(run)
    matches = [line for line in output.splitlines() if "Weight hashes match" in line]
    assert [int(line.split("after ")[1].split()[0]) for line in matches] == [0, 2, 2, 4, 6, 8]
    assert_same(tmp_path, "whole", "odd")
    differ, failure, end = [json.loads(line) for line in notices.read_text().splitlines()]
    assert (differ["kind"], differ["nodes"], differ["ranks"]) == ("replicas_differ", ["n"], [1])
    assert differ["detail"]["trusted_step"] == 2
    assert (
        f"after step 4: rank 1 on {socket.gethostname()} does not hold what 2 of 3"
        in differ["reason"]
    )
    assert (failure["kind"], end["kind"]) == ("failure", "job_succeeded")
    (path,) = (tmp_path / "state").glob("*/journal.db")
    with closing(Journal(path, read_only=True)) as journal:
        probed = [note.reason for note in journal.notes(0) if "n is ok, probed in" in note.reason]
    assert len(probed) == 2, "before the first round, and since it was named"


@pytest.mark.soak
def test_a_bit_turns_over_and_its_rank_is_named_before_that_is_saved(tmp_path: Path) -> None:
    finish(start(tmp_path, "whole", *LONG, nproc=3))
    env = {"FLIP": f"4:1:{NAME}"}
    said = refused(start(tmp_path, "odd", *LONG, f"{FLAG}=2", nproc=3, script=FLIPPED, env=env))
    node = socket.gethostname()
    assert said.count("does not hold") == 1, "one line, of one of the ranks"
    assert (
        f"after step 4: rank 1 on {node} does not hold what 2 of 3 replicas hold of {NAME}; after step 2 all were "
        "the same: stopping; the newest checkpoint to trust is that of step 2 or one before it"
    ) in said
    saved = [step_of(folder.name) for folder in (tmp_path / "odd").iterdir()]
    assert 4 not in saved, saved
    output = finish(start(tmp_path, "odd", *LONG, f"{FLAG}=2", nproc=2))
    assert "2 replicas are compared: parameters, and what the optimizer keeps" in output
    assert [step for step in range(9) if f"match after {step} iterations" in output][1:] == [
        4,
        6,
        8,
    ]
    assert_same(tmp_path, "whole", "odd")

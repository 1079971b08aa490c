"""A run whose replicas are compared ends, in one line, where a bit of one turns over, and goes on from before that.

That it says nothing of sound runs, which are killed and resized, is in test_elastic.py and test_fire.py.
"""

import socket
from pathlib import Path

from elastic.proto.manifest import step_of
from tests.trainer.launch import assert_same, finish, refused, start

FLAG = "--check-weight-hash-across-dp-replicas-interval"
FLIPPED = ("-m", "tests.trainer.flipped")
NAME = "blocks.1.mlp.up.weight"
LONG = ("--train-iters=8", "--save-interval=2")


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

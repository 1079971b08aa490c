"""A run whose data are spoiled: what it says, and that it goes on without them, in any world."""

import json
from pathlib import Path

import pytest

from elastic.trainer.run.loop import TIMED
from elastic.trainer.watch import jsonl
from tests.trainer.launch import assert_same, finish, start
from tests.trainer.spoiled import BATCH, SPOILED
from tests.trainer.watch.boards import points

pytestmark = pytest.mark.xdist_group("runs")
STEPS = 32
SCRIPT = ("-m", "tests.trainer.spoiled")
GUARD = (
    f"--train-iters={STEPS}", "--guard=rollback", "--guard-window=16", "--guard-warmup=16",
    "--guard-patience=2",
)  # fmt: skip


def test_samples_that_spoil_steps_are_left_out_in_any_world(tmp_path: Path) -> None:
    probes = tmp_path / "probes.jsonl"
    probes.write_text('{"name": "count", "prompt": "3 4 5 6 7", "continuation": " 8 9"}\n')
    watched = (
        f"--probe-file={probes}", "--probe-interval=8", f"--trace-phases={tmp_path / 'trace'}",
        f"--tensorboard-dir={tmp_path / 'board'}", "--log-progress", "--save-interval=8",
        "--log-params-norm", "--log-num-zeros-in-grad", "--timing-log-level=2",
        "--log-timers-to-tensorboard",
    )  # fmt: skip
    output = finish(start(tmp_path, "one", *GUARD, *watched, script=SCRIPT))
    # Asked to end in the midst of it, and started again.
    finish(start(tmp_path, "two", *GUARD, "--exit-interval=25", nproc=2, script=SCRIPT))
    finish(start(tmp_path, "two", *GUARD, nproc=2, script=SCRIPT))

    lines = list(jsonl.read(tmp_path / "one.jsonl"))
    verdicts = [line for line in lines if line["kind"] == "verdict"]
    assert [(one["iteration"], one["action"]) for one in verdicts] == [
        (25, "warn"), (26, "rollback"), (25, "warn"),
    ]  # fmt: skip
    assert verdicts[1]["restore"] == 24
    assert verdicts[1]["skip"] == [SPOILED.start, SPOILED.start + 2 * BATCH]
    assert "going back to iteration 24 and leaving out 24 samples from 288 on" in output
    steps = jsonl.steps(tmp_path / "one.jsonl")
    assert list(steps) == list(range(1, STEPS + 1))
    assert steps[STEPS]["skipped_samples"] == 2 * BATCH
    assert steps[STEPS]["consumed"] == STEPS * BATCH
    assert steps[STEPS]["losses"]["lm loss"] < 1 < steps[25]["losses"]["lm loss"]
    assert_same(tmp_path, "one", "two")
    assert steps[STEPS]["params_norm"] > steps[1]["params_norm"] > 0
    assert " | num zeros: 0 | params norm: " in output, (
        "words are tied to the head, so none is left out"
    )

    looks = [line["probes"]["count"] for line in lines if line["kind"] == "probe"]
    assert len(looks) == STEPS // 8
    assert looks[0]["probability"] < looks[-1]["probability"] <= 1
    board = points(tmp_path / "board")
    assert [step for step, _ in board["probe count probability"]] == [8, 16, 24, 32]
    for timer in TIMED:
        assert f"    {timer} ..." in output
        assert f"{timer}-time" in board
    assert [step for step, _ in board["lm loss"]] == list(range(1, STEPS + 1)), "none of them twice"
    progress = (tmp_path / "one" / "progress.txt").read_text().splitlines()
    told = [line.split("\t")[3:5] for line in progress]
    assert told[0] == ["Starting job"]
    assert told[1] == ["Saved checkpoint", "Iteration: 8"]
    (trace,) = (tmp_path / "trace").iterdir()
    phases = {event["name"] for event in json.loads(trace.read_text())[:-1]}
    assert {"data", "forward", "backward", "reduce", "clip", "optimizer", "save"} <= phases

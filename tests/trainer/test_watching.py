"""A run whose data are spoiled: what it says, and that it goes on without them, in any world. Whatever ends a run,
no number of a step is lost."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic.trainer.run.told import TIMED
from elastic.trainer.watch import jsonl
from tests.trainer.launch import ROOT, assert_same, finish, parameters, start, training
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
        f"--tensorboard-dir={tmp_path / 'board'}", "--log-progress", "--save-interval=25",
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
    assert told[1] == ["Saved checkpoint", "Iteration: 26"], "step 25 was odd, and not to be saved"
    assert [step.name for step in sorted((tmp_path / "one").glob("step-*"))] == [
        "step-00000026", "step-00000032",
    ]  # fmt: skip
    (trace,) = (tmp_path / "trace").iterdir()
    phases = {event["name"] for event in json.loads(trace.read_text())[:-1]}
    assert {"data", "forward", "backward", "reduce", "clip", "optimizer", "save"} <= phases


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that ends where no line is due, and goes on."""
    base = tmp_path_factory.mktemp("ended")
    flags = (*GUARD, "--log-interval=7", f"--tensorboard-dir={base / 'board'}")
    finish(start(base, "ended", *flags, "--exit-interval=18", script=SCRIPT))
    finish(start(base, "ended", *flags, script=SCRIPT))
    return base


@pytest.mark.soak
def test_an_end_between_two_lines_and_a_rollback_lose_no_numbers(ended: Path) -> None:
    assert [step for step, _ in points(ended / "board")["lm loss"]] == list(range(1, STEPS + 1))
    lines = of_lines(ended / "ended.jsonl")
    assert lines == [(7, 7), (14, 7), (18, 4), (21, 3), (28, 7), (32, 4)]


@pytest.mark.soak
def test_a_run_whose_newest_checkpoint_is_an_older_one_goes_back_and_on(
    ended: Path, tmp_path: Path
) -> None:
    """There is no memory for snapshots. The run that has some goes back less far, and comes to the same."""
    board, available = tmp_path / "board", tmp_path / "available"
    available.write_text("0")
    flags = (*GUARD, "--log-interval=7", "--save-interval=10", f"--tensorboard-dir={board}")
    output = finish(
        subprocess.Popen(
            [sys.executable, *training(tmp_path, "poor", *flags, script=SCRIPT)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "AVAILABLE": str(available)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    assert "going back to iteration 20 and leaving out 24 samples from 288 on" in output
    for metrics, restored in ((tmp_path / "poor.jsonl", 20), (ended / "ended.jsonl", 24)):
        back = [line for line in jsonl.read(metrics) if line.get("action") == "rollback"]
        assert [(one["iteration"], one["restore"]) for one in back] == [(26, restored)]
    lines = [(7, 7), (14, 7), (21, 7), (21, 1), (28, 7), (32, 4)]
    assert of_lines(tmp_path / "poor.jsonl") == lines
    assert points(board) == points(ended / "board")
    assert points(board / "samples") == points(ended / "board" / "samples")
    weights, others = parameters(tmp_path, "poor"), parameters(ended, "ended")
    assert [name for name, one in weights.items() if not torch.equal(one, others[name])] == []


def of_lines(metrics: Path) -> list[tuple[Any, Any]]:
    """Of each line the iteration, and of how many steps it tells."""
    lines = jsonl.read(metrics)
    return [(line["iteration"], line["steps"]) for line in lines if line["kind"] == "step"]


def test_a_kill_leaves_the_points_of_steps_that_no_line_has_told(tmp_path: Path) -> None:
    board, enough = tmp_path / "board", 8
    flags = ("--log-interval=5000", f"--tensorboard-dir={board}")
    often = ("--eval-interval=4", "--eval-iters=1", "--train-iters=1000")
    killed = start(tmp_path, "killed", *flags, *often)
    assert killed.stdout is not None
    output, there = "", 0
    for line in killed.stdout:
        output += line
        if "validation loss at iteration" in line:  # a sign that it goes on
            there = len(points(board).get("lm loss", []))
        if there >= enough:
            break
    everything = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    killed.communicate()  # until none is left that holds its pipes
    assert there >= enough, output
    assert "] iteration " not in output, "no line is due"
    steps = [step for step, _ in points(board)["lm loss"]]
    assert steps == list(range(1, len(steps) + 1))

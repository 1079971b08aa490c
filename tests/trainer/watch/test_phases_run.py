"""Where a real run's time goes on CPUs: its phases against clocks that know nothing of them."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from elastic.trainer.watch import jsonl

STEPS, LINES = 24, 6
ARGUMENTS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --hidden-dropout 0 "
    "--attention-dropout 0 --mock-data --vocab-size 1000 --micro-batch-size 2 --global-batch-size 8 "
    f"--lr 1e-3 --train-iters {STEPS} --log-interval {LINES} --eval-iters 8"
)
"""With an evaluation and a save at the end, which are of no step."""
OTHER = 0.05
"""Of a step, at most, where it is in no phase that has a name."""


def test_phases_of_a_run_add_up_to_its_steps(tmp_path: Path) -> None:
    where = (
        "--trace-phases", tmp_path / "traces", "--metrics-file", tmp_path / "metrics.jsonl",
        "--save", tmp_path / "saved",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.watch.phased", tmp_path / "began", *ARGUMENTS.split(), *where],
        cwd=Path(__file__).parents[3], env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (trace,) = (tmp_path / "traces").iterdir()
    phases: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in json.loads(trace.read_text())[:-1]:
        phases[event["args"]["iteration"]][event["name"]] += event["dur"] / 1e6
    assert sorted(phases) == list(range(1, STEPS + 1))

    # From where one step asks for its samples to where the next one does, or all have ended, is as long as a step.
    walls = [
        later - sooner for sooner, later in pairwise(json.loads((tmp_path / "began").read_text()))
    ]
    assert len(walls) == STEPS
    steps = [sum(phases[step].values()) for step in range(1, STEPS + 1)]
    assert sum(steps) == pytest.approx(sum(walls), rel=0.02)
    warm = range(LINES, STEPS)
    assert sum(steps[step] for step in warm) == pytest.approx(
        sum(walls[step] for step in warm), rel=0.02
    )
    other = sum(phases[step]["other"] for step in range(LINES + 1, STEPS + 1))
    assert other < OTHER * sum(sum(phases[step].values()) for step in range(LINES + 1, STEPS + 1))
    for name in ("data", "forward", "backward", "reduce", "clip", "optimizer", "log"):
        assert all(name in one for one in phases.values()), name

    lines = list(jsonl.read(tmp_path / "metrics.jsonl"))
    told = [line["seconds"] for line in lines if line["kind"] == "step"]
    sums = [sum(line["phases"].values()) for line in lines if line["kind"] == "phases"]
    assert len(told) == len(sums) == STEPS // LINES
    assert sums == pytest.approx(told, rel=0.02)

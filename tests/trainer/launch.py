"""Training runs of tests: `elastic-run` with the trainer, and what it told."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from elastic.trainer.checkpoints import load_model, opened
from elastic.trainer.watch import jsonl

ROOT = Path(__file__).parents[2]
SMALL = (
    "--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=16",
    "--hidden-dropout=0", "--attention-dropout=0", "--mock-data", "--vocab-size=300",
    "--micro-batch-size=1", "--global-batch-size=12", "--lr=1e-2", "--min-lr=1e-3",
    "--lr-warmup-iters=2", "--log-interval=1", "--eval-iters=0",
)  # fmt: skip
"""A batch that 5 and 7 replicas do not divide."""
TIMEOUT = 240.0
"""Seconds that a run may take, on a busy machine."""
SCRIPT = ("-m", "elastic.trainer.pretrain_gpt")


def start(
    base: Path,
    save: str,
    *flags: str,
    nproc: int = 1,
    launcher: Sequence[str] = ("--standalone",),
    script: Sequence[str] = SCRIPT,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `nproc` ranks that save in `base`/`save`; their metrics go to `base`/`save`.jsonl."""
    command = [sys.executable, "-m", "elastic.run", f"--nproc-per-node={nproc}", *launcher]
    return subprocess.Popen(
        [*command, f"--log-dir={base / 'logs'}", *training(base, save, *flags, script=script)],
        cwd=ROOT,
        # A rank's imports are seconds of a core.
        env={**os.environ, "OMP_NUM_THREADS": "1", "ELASTIC_RANK_START": "fork", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def training(base: Path, save: str, *flags: str, script: Sequence[str] = SCRIPT) -> tuple[str, ...]:
    """The script and its arguments."""
    to = (f"--save={base / save}", f"--metrics-file={base / save}.jsonl")
    return (*script, *SMALL, *to, *flags)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a started run to end well; returns what it printed."""
    output, errors = _ended(process)
    assert process.returncode == 0, output + errors
    return output


def refused(process: subprocess.Popen[str]) -> str:
    """Wait for a started run that is to end with a message; returns that."""
    output, errors = _ended(process)
    assert process.returncode == 1, output + errors  # the launcher's; the rank's is 2
    assert "exited with 2" in errors
    assert "Traceback" not in errors
    return errors


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=TIMEOUT)
    finally:
        process.terminate()  # else it outlives the test that fails


def steps(base: Path, save: str) -> dict[int, tuple[float, float, float]]:
    """Loss, norm of the gradient and learning rate of each step, to the bit."""
    return {
        step: (line["losses"]["lm loss"], line["grad_norm"], line["learning_rate"])
        for step, line in jsonl.steps(base / f"{save}.jsonl").items()
    }


def evaluations(base: Path, save: str) -> dict[tuple[int, str], float]:
    """Loss of each, by the finished steps and the set."""
    lines = [line for line in jsonl.read(base / f"{save}.jsonl") if line["kind"] == "evaluation"]
    return {(line["iteration"], line["set"]): line["losses"]["lm loss"] for line in lines}


def parameters(base: Path, save: str) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    return load_model(opened(str(base / save))).state_dict()


def assert_same(base: Path, one: str, other: str) -> None:
    """Every step, evaluation and parameter of two runs, bit for bit."""
    assert steps(base, one) == steps(base, other)
    assert evaluations(base, one) == evaluations(base, other)
    left, right = parameters(base, one), parameters(base, other)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []

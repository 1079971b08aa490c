"""A run whose newest step on storage is damaged goes on from the one before it, and to the same bits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.proto import manifest
from tests.trainer.launch import (
    ROOT,
    TIMEOUT,
    assert_same,
    finish,
    start,
    training,
)

pytestmark = pytest.mark.xdist_group("damage")  # one run for all of them

LAYOUT = ("--tensor-model-parallel-size=2", "--save-interval=1")
"""Each rank alone reads its part of most tensors."""
LAST, DAMAGED = 4, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole run, and one that ended a step before it, its last step damaged."""
    base = tmp_path_factory.mktemp("runs")
    finish(start(base, "whole", *LAYOUT, f"--train-iters={LAST}", nproc=2))
    (base / "left").mkdir()
    shutil.copytree(base / "whole", base / "left", dirs_exist_ok=True)
    shutil.rmtree(base / "left" / manifest.folder(LAST))
    flip(base / "left", DAMAGED)
    return base


def flip(run: Path, step: int) -> None:
    """A bit of what rank 1 alone reads."""
    (file,) = (run / manifest.folder(step)).glob("shard-00001-*.safetensors")
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    name = "model.blocks.0.mlp.up.weight"
    data[begin + json.loads(data[8:begin])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


def left(base: Path, name: str) -> str:
    """A copy of what was left."""
    shutil.copytree(base / "left", base / name)
    shutil.copy(base / "whole.jsonl", base / f"{name}.jsonl")
    return name


def plainly(base: Path, save: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Two ranks under torchrun, which starts nobody again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, *training(base, save, *LAYOUT, f"--train-iters={LAST}", *flags)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip


def test_a_job_passes_a_damaged_step_over_by_itself(base: Path) -> None:
    run = left(base, "job")
    output = finish(start(base, run, *LAYOUT, f"--train-iters={LAST}", nproc=2))
    assert f"resumed from step {DAMAGED - 1}\n" in output
    assert_same(base, "whole", run)


@pytest.mark.soak
def test_so_does_a_run_without_a_job(base: Path) -> None:
    """All ranks, though one alone sees it."""
    run = left(base, "plain")
    done = plainly(base, run)
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"what is newest in {base / run} is damaged (on another rank): the run goes on from step"
    assert done.stdout.count(f"{said} {DAMAGED - 1}\n") == 1, done.stdout
    assert f"resumed from step {DAMAGED - 1}\n" in done.stdout
    assert_same(base, "whole", run)

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.launch import SMALL
from tests.trainer.watch.boards import points

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
SAID = ("--record-memory-history", "--log-memory-to-tensorboard")


def run(*command: object) -> str:
    """What it printed."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_phases_and_memory_of_a_gpu(tmp_path: Path) -> None:
    """Seen on one H100, torch 2.11."""
    found = json.loads(run("tests.trainer.watch.gpu", tmp_path))
    wall = found["phases"].pop("wall")
    assert sum(found["phases"].values()) == pytest.approx(wall, rel=0.02), found
    assert {"data", "forward", "backward", "optimizer"} <= set(found["phases"])
    assert "CUDA out of memory (rank 0): 8.00 GiB were asked for" in found["line"]
    assert found["ran_out"]
    assert found["ooms"] >= 1
    assert found["bytes"] > 1000


@pytest.mark.parametrize("given", [True, False])
def test_a_run_tells_of_a_gpus_memory(tmp_path: Path, given: bool) -> None:
    snapshot, board = tmp_path / "snapshot.pickle", tmp_path / "board"
    where = (f"--memory-snapshot-path={snapshot}", f"--tensorboard-dir={board}")
    flags = [flag for flag in SMALL if flag != "--seq-length=16"]
    run(
        "elastic.trainer.pretrain_gpt", *flags, "--seq-length=128", "--bf16", "--train-iters=3",
        "--tensorboard-log-interval=1", *where, *(SAID if given else ()),
    )  # fmt: skip
    assert snapshot.exists() == given
    found = points(board)
    assert ("mem-allocated-bytes" in found) == given
    if given:
        assert snapshot.stat().st_size > 1000
        assert all(value > 0 for _, value in found["mem-max-allocated-bytes"])

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]


def test_phases_and_memory_of_a_gpu(tmp_path: Path) -> None:
    """Seen on one H100, torch 2.11."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.watch.gpu", tmp_path],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wall = found["phases"].pop("wall")
    assert sum(found["phases"].values()) == pytest.approx(wall, rel=0.02), found
    assert {"data", "forward", "backward", "optimizer"} <= set(found["phases"])
    assert "CUDA out of memory (rank 0): 8.00 GiB were asked for" in found["line"]
    assert found["ran_out"]
    assert found["ooms"] >= 1
    assert found["bytes"] > 1000

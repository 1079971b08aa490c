"""Every layout computes what one process computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.parallel.layouts import LAYOUTS

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.xdist_group("layouts")  # one run for all of them


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.parallel.layouts", folder],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_process(told: Path, name: str) -> None:
    found = json.loads((told / f"{name}.json").read_text())
    assert found["loss"] < 1e-6
    assert len(found["gradients"]) > 10
    assert {name: off for name, off in found["gradients"].items() if not off < 1e-5} == {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_makes_two_all_reduces_or_two_pairs(told: Path, name: str) -> None:
    found = json.loads((told / f"{name}.json").read_text())["collectives"]
    layout = LAYOUTS[name]
    if layout.tp == 1:
        assert found == {}
    elif layout.sequence:
        assert found == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    else:
        assert found == {"all_reduce": 2}

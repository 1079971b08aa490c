"""Loops of a team's own, whose global batch is the same on any number of ranks."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT

pytestmark = pytest.mark.xdist_group("leaves")  # one run for all of them

EXAMPLES = ROOT / "examples"
NAMES = ("leaves_ddp", "leaves_fsdp2")
WORLDS = (1, 2, 3)
"""3 has a padding leaf in each of its batches."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each printed of each epoch, by name and world."""
    folder = tmp_path_factory.mktemp("leaves")
    runs = [f"{name}.{world}" for name in NAMES for world in WORLDS]
    runs += [f"{name}_before.3" for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.example_ranks", folder, *runs],
        cwd=ROOT,
        env=os.environ
        | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {one: re.findall(r"loss ([\d.e-]+)", Path(folder, one).read_text()) for one in runs}


def test_ddp_learns_the_same_on_any_number_of_ranks(losses: dict[str, list[str]]) -> None:
    """To rounding: DDP adds up in fp32, in another order in each world."""
    alone, *others = ([float(one) for one in losses[f"leaves_ddp.{n}"]] for n in WORLDS)
    assert len(alone) == 3
    assert alone[-1] < alone[0] / 10
    for other in others:
        assert other == pytest.approx(alone, rel=1e-4)
    assert [float(one) for one in losses["leaves_ddp_before.3"]] != pytest.approx(alone, rel=1e-2)


def test_fsdp2_that_reduces_in_fp64_learns_the_same_bits(losses: dict[str, list[str]]) -> None:
    alone, *others = (losses[f"leaves_fsdp2.{world}"] for world in WORLDS)
    assert len(alone) == 3
    assert float(alone[-1]) < float(alone[0]) / 2
    assert others == [alone, alone]  # all digits of fp32
    assert losses["leaves_fsdp2_before.3"] != alone


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_under_ten_changed_lines(name: str) -> None:
    before, after = (
        [line for line in (EXAMPLES / file).read_text().splitlines() if line]
        for file in (f"{name}_before.py", f"{name}.py")
    )
    edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for kind, a, b, c, d in edits if kind != "equal")
    assert 0 < changed < 10
    assert re.search(rf"`{name}\.py` \|.*\| {changed} \|", (EXAMPLES / "README.md").read_text())

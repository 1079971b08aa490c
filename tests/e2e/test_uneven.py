"""Ranks whose states differ, where each writes a share of what it holds in common with others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import DEADLINE, ROOT
from tests.e2e.harness.ports import free_port

SCRIPT = Path(__file__).parent / "harness" / "scripts" / "uneven.py"


def ran(folder: Path, *words: str, nodes: tuple[int, ...] = (2,)) -> list[list[str]]:
    """What each rank of nodes with so many says, line by line."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON"))}
    meeting = {
        "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(sum(nodes)), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    places = [
        {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(of)}
        for of in nodes
        for local in range(of)
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, folder, *words],
            env=variables | meeting | {"RANK": str(rank), **place},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        )
        for rank, place in enumerate(places)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=3 * DEADLINE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not any(rank.returncode for rank in ranks), said
    return [out.splitlines() for out, _ in said]


@pytest.mark.soak
def test_zero_by_hand_just_works(tmp_path: Path) -> None:
    assert ran(tmp_path, "zero") == [["kept 3", "kept 4"]] * 2
    assert ran(tmp_path, "zero", "load") == [["loaded 4 True"]] * 2


def test_what_is_not_the_same_on_all_ranks_is_told_once_and_whole_the_next_time(
    tmp_path: Path,
) -> None:
    """By another node, too, whose ranks hold the same: it writes what it did."""
    first, second, other = ran(tmp_path, "names", nodes=(2, 1))
    path = tmp_path / "checkpoint"
    why = (
        "ranks 0, 1 do not hold the same of model of 0.0.bias, model of 0.0.weight, "
        "model of 0.1.bias and 9 more"
    )
    refused = f"{path}: step 3 cannot be kept: {why}; save a later one"
    said = f"{path}: step 3 cannot be kept: {why}; from now on each rank of this node writes all that it has"
    assert first == [refused, said, "kept 4"]
    assert second == [refused, "kept 4"]
    assert other == [refused, f"{path}: step 3 cannot be kept: {why}", "kept 4"]
    assert [found.name for found in path.iterdir()] == ["step-00000004"]
    assert ran(tmp_path, "names", "load", nodes=(2, 1)) == [["loaded 4 True"]] * 3

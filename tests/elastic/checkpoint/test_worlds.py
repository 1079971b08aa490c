"""What any world saved, any other loads, bit by bit: FSDP2, DDP, tensor parallel, meshes of two dims."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.checkpoint.worlds import LAYOUTS, world

ROOT = Path(__file__).parents[3]
ALIKE = {"plain-2", "ddp-1", "ddp-3", "tp-2", "shard-3", "shard x shard-2x2"}
"""Left to the long run: each of them has a neighbour that is tried always."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(sorted(LAYOUTS.keys() - ALIKE), id="most"),
        pytest.param(sorted(LAYOUTS), id="all", marks=pytest.mark.soak),
    ],
)
def test_each_layout_is_loaded_into_each(tmp_path: Path, names: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.elastic.checkpoint.worlds", tmp_path, *names],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert told.keys() == {f"{name}.{rank}" for name in names for rank in range(world(name))}
    assert all(wrong.keys() == set(names) for wrong in told.values())
    wrong = [
        f"{saved}, loaded by {loader}: {complaint}"
        for loader, found in told.items()
        for saved, complaints in found.items()
        for complaint in complaints
    ]
    assert wrong == []

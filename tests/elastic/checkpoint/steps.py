"""Steps on storage, as a job leaves them, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import lay_out
from elastic.checkpoint.state.planner import Planner
from elastic.proto import manifest, sums

DEADLINE = 240
"""Seconds that ranks may take."""


def run_ranks(folder: Path, world: int) -> None:
    """Run `dcp_ranks.py`."""
    script = str(Path(__file__).with_name("dcp_ranks.py"))
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script, folder, str(rank), str(world)], env=environ)
        for rank in range(world)
    ]
    try:
        assert [rank.wait(DEADLINE) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def written(path: Path, step: int, states: list[dict[str, Any]]) -> Path:
    """A step as `Checkpointer` takes it apart, of ranks of one node; returns its folder."""
    folder = path / manifest.folder(step)
    folder.mkdir(parents=True)
    shards = []
    for rank, state in enumerate(states):
        place = Place(
            rank=rank, world_size=len(states), local_rank=rank, local_world_size=len(states)
        )
        mine = Planner(place).share(state)
        out = bytearray(mine.image.nbytes)
        table = sums.pack(copy_cpu.write(mine.image, mine.tensors, mine.values, memoryview(out)))
        out[mine.image.sums_at :] = table
        name = manifest.file(rank, len(states), 3, "job")
        (folder / name).write_bytes(out)
        shards.append(
            manifest.Shard(rank=rank, file=name, bytes=len(out), digest=sums.checksum(table))
        )
    told = manifest.Manifest(
        job="job", sequence=1, round=3, step=step, world_size=len(states), shards=tuple(shards)
    )
    (folder / manifest.NAME).write_text(manifest.dumps(told))
    return folder


def forged(folder: Path, values: bytes) -> None:
    """A step with those values and sound checksums."""
    image = lay_out([], {}, len(values))
    out = bytearray(image.nbytes)
    table = sums.pack(copy_cpu.write(image, {}, values, memoryview(out)))
    out[image.sums_at :] = table
    folder.mkdir()
    (folder / "x").write_bytes(out)
    shard = manifest.Shard(rank=0, file="x", bytes=len(out), digest=sums.checksum(table))
    told = manifest.Manifest(job="j", sequence=1, round=0, step=1, world_size=1, shards=(shard,))
    (folder / manifest.NAME).write_text(manifest.dumps(told))


def flip(file: Path, name: str) -> None:
    data = bytearray(file.read_bytes())
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    data[8 + int.from_bytes(data[:8], "little") + entries[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)

"""A checkpoint that version 1.0 wrote opens for ever; a slot of it is in tests/proto/recorded.

The files were written once, by `python -m tests.elastic.checkpoint.test_recorded`, and never are again:
a change that no longer reads them has lost somebody's training.
"""

import json
import re
import shutil
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic.checkpoint.load import files
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.collect import Place, collect
from elastic.checkpoint.state.image import SIZES, Image, Piece, lay_out
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest, sums, version
from elastic.proto.errors import CheckpointError

RECORDED = Path(__file__).parent / "recorded"
STEP = 7
WORLD = 2


def state(full: bool) -> dict[str, Any]:
    """Every dtype, a tie, values of every kind; or the same with nothing in it."""
    bits = torch.arange(16, dtype=torch.uint8) % 2 if full else torch.zeros(16, dtype=torch.uint8)
    tensors = {name: bits.clone().view(getattr(torch, name)) for name in SIZES}
    tied = torch.arange(6.0) if full else torch.zeros(6)
    values = {
        "plain": [1, 2.5, "text", None, True],
        "tuple": (1, (2,)),
        "keys": {1: "a", (2, 3): "b"},
        "numbers": [2**70, float("nan"), -0.0, 1 + 2j],
        "texts": ["\ud800", b"\0\xff", bytearray(b"x")],
        "sets": [{3, 1}, frozenset({"f"})],
        "kinds": [OrderedDict(b=1, a=2), Counter("aab"), deque([1, 2], 3), range(1, 9, 2)],
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
        "numpy": [np.float32(0.1), np.arange(6, dtype="<i2").reshape(2, 3)],
        "$odd": {"$tuple": 1},
    }
    return {
        "tensors": tensors | {"empty": torch.ones(0, 3), "scalar": bits[1].clone()},
        "tied": [tied, tied],
        "values": values if full else None,
    }


def opened(folder: Path) -> tuple[dict[str, Any], torch.Tensor]:
    found, wrong = files.sources(Folder(Path(folder)), STEP)
    assert wrong == []
    loaded = state(full=False) | {"w": torch.zeros(5, 3)}
    restore = Restore([found[rank] for rank in sorted(found)], Place())
    restore.apply(loaded, strict=True)
    assert restore.damaged == []
    return loaded, loaded.pop("w")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_1_0_wrote() -> None:
    loaded, w = opened(RECORDED / "checkpoint-1.0")
    truth = state(full=True)
    assert repr(loaded["values"]) == repr(truth["values"])
    assert loaded["tied"][0].tolist() == loaded["tied"][1].tolist() == list(range(6))
    for name, tensor in truth["tensors"].items():
        other = loaded["tensors"][name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert bytes(other.reshape(-1).view(torch.uint8)) == bytes(
            tensor.reshape(-1).view(torch.uint8)
        )
    assert w.tolist() == torch.arange(15.0).view(5, 3).tolist()


def of_version(folder: Path, named: str, *, shards: bool) -> Path:
    """A copy that says that it is of another version, with what that one may have added."""
    shutil.copytree(RECORDED / "checkpoint-1.0", folder)
    step = folder / manifest.folder(STEP)
    told = json.loads((step / manifest.NAME).read_text())
    if shards:
        for shard in told["shards"]:
            file = step / shard["file"]
            data = file.read_bytes()
            size = 8 + int.from_bytes(data[:8], "little")
            text = data[8:size].replace(rb"\"v\":\"1.0\"", rb"\"v\":\"%s\"" % named.encode())
            data = data[:8] + text[: size - 8] + data[size:]
            (at,) = re.findall(rb'"elastic.sums":{[^}]*"data_offsets":\[(\d+)', text)
            table = bytearray(data[size + int(at) :])
            table[8:16] = sums.checksum(data[:size]).to_bytes(8, "little")  # of the header
            file.write_bytes(data[: size + int(at)] + table)
            shard["digest"] = f"{sums.checksum(bytes(table)):016x}"
    else:
        told |= {"version": named, "of the future": [1]}
    (step / manifest.NAME).write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("shards", [True, False])
def test_what_the_next_minor_version_writes(tmp_path: Path, shards: bool) -> None:
    newer = f"{version.CHECKPOINT.major}.{version.CHECKPOINT.minor + 1}"
    _, w = opened(of_version(tmp_path / "c", newer, shards=shards))
    assert w[4, 2] == 14


@pytest.mark.parametrize("named", ["2.0", "1.9", "0.1"])
def test_what_is_too_far_says_what_is_needed(tmp_path: Path, named: str) -> None:
    said = f"the checkpoint speaks version {named}, this release reads 1.0 to 1.1: install one that reads {named}"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        files.sources(Folder(of_version(tmp_path / "m", named, shards=False)), STEP)
    found, wrong = files.sources(Folder(of_version(tmp_path / "s", named, shards=True)), STEP)
    assert found == {}
    assert [complaint.split(": ", 1)[1] for complaint in wrong] == [said] * WORLD


# --- writing -------------------------------------------------------------------------------------


def image_of(rank: int) -> tuple[Image, bytearray]:
    """Rank 0 has the state, and each a part of one more tensor."""
    found = collect(state(full=True) if rank == 0 else {}, Place(rank=rank, world_size=WORLD))
    tensors = {name: part.tensor for name, part in found.parts.items()}
    pieces = [part.piece for part in found.parts.values()]
    rows = range(3) if rank == 0 else range(3, 5)
    extent = (len(rows), 3)
    pieces.append(
        Piece(name="w", dtype="float32", shape=(5, 3), offset=(rows[0], 0), extent=extent)
    )
    tensors["w"] = torch.arange(15.0).view(5, 3)[rows[0] : rows[-1] + 1]
    values = json.dumps(json.loads(found.values) | {"w": {"$tensor": "w"}}).encode()
    image = lay_out(pieces, found.ties, len(values))
    out = bytearray(image.nbytes)
    out[image.sums_at :] = sums.pack(copy_cpu.write(image, tensors, values, memoryview(out)))
    return image, out


def record(folder: Path) -> None:
    """Write today's."""
    step = folder / manifest.folder(STEP)
    step.mkdir(parents=True)
    shards = []
    for rank in range(WORLD):
        image, out = image_of(rank)
        name = manifest.file(rank, WORLD, 3, "recorded")
        (step / name).write_bytes(out)
        digest = sums.checksum(bytes(out[image.sums_at :]))
        shards.append(manifest.Shard(rank=rank, file=name, bytes=len(out), digest=digest))
    told = manifest.Manifest(
        job="recorded", sequence=1, round=3, step=STEP, world_size=WORLD, shards=tuple(shards)
    )
    (step / manifest.NAME).write_text(manifest.dumps(told))


if __name__ == "__main__":
    record(RECORDED / f"checkpoint-{version.CHECKPOINT}")

"""A step of a checkpoint, written by whoever has its tensors at hand: DCP's writer, a conversion."""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from elastic.checkpoint import copy_cpu, manifests
from elastic.checkpoint.image import Piece, lay_out
from elastic.checkpoint.storage import PIECE, Storage
from elastic.proto import sums
from elastic.proto.manifest import Manifest, Shard

_BLOCK = 4096

Tensors = Mapping[str, Callable[[], torch.Tensor]]
"""By name, what gets a tensor, on whatever device, when its bytes are wanted."""


def write_shard(
    storage: Storage,
    step: int,
    name: str,
    rank: int,
    pieces: Sequence[Piece],
    tensors: Tensors,
    values: bytes,
) -> Shard:
    """One rank's file, for good; takes as much memory as it is long.

    Raises OSError, `CheckpointError` where two pieces have one name.
    """
    image = lay_out(pieces, {}, len(values))
    memory = memoryview(mmap.mmap(-1, -(-image.nbytes // _BLOCK) * _BLOCK))
    chunks = copy_cpu.write(image, _OnCpu(tensors), values, memory[: image.nbytes])
    table = sums.pack(chunks)
    memory[image.sums_at : image.nbytes] = table
    parts = (memory[at : at + PIECE] for at in range(0, len(memory), PIECE))
    storage.write(step, name, parts, image.nbytes)
    return Shard(rank=rank, file=name, bytes=image.nbytes, digest=sums.checksum(table))


def commit(storage: Storage, step: int, job: str, shards: Sequence[Shard]) -> None:
    """Make written files a step, the newest. Raises OSError."""
    told = Manifest(
        job=job,
        sequence=0,  # the commit counts
        round=0,  # none of elastic-run's
        step=step,
        world_size=len(shards),
        shards=tuple(sorted(shards, key=lambda shard: shard.rank)),
    )
    manifests.commit(storage, told)


class _OnCpu(Mapping[str, torch.Tensor]):
    """Tensors in host memory, one at a time."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]().cpu()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

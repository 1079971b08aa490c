"""A step of a checkpoint, written by whoever has its tensors at hand: DCP's writer, a conversion, a rank
without memory for a slot."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.image import CHUNK, VALUES, Image, Piece, lay_out
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.protocol import PIECE, Storage
from elastic.proto import sums
from elastic.proto.manifest import Manifest, Shard
from elastic.proto.sums import Chunk

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
    """One rank's file, for good. Raises OSError, `CheckpointError` where two pieces have one name."""
    image = lay_out(pieces, {}, len(values))
    return write_image(storage, step, name, rank, image, tensors, values)


def write_image(
    storage: Storage,
    step: int,
    name: str,
    rank: int,
    image: Image,
    tensors: Tensors,
    values: bytes,
) -> Shard:
    """The same; takes memory for one tensor that is on a device or not contiguous, and a few pieces.
    Raises OSError."""
    chunks: list[Chunk] = []
    pieces = _pieces(_spans(image, tensors, values, chunks), image.nbytes)
    storage.write(step, name, pieces, image.nbytes)
    digest = sums.checksum(sums.pack(chunks))
    return Shard(rank=rank, file=name, bytes=image.nbytes, digest=digest)


def _spans(
    image: Image, tensors: Tensors, values: bytes, chunks: list[Chunk]
) -> Iterator[memoryview]:
    """All that an image is made of, chunk by chunk, its table last; `chunks` takes their checksums."""
    given: dict[str, bytes] = {"": image.header, VALUES: values}
    for name, start, end in image.spans():
        data = memoryview(given[name]) if name in given else _bytes_of(tensors[name]())
        for at in range(start, end, CHUNK):
            stop = min(at + CHUNK, end)
            part = data[at - start : stop - start]
            chunks.append(Chunk(stop, sums.checksum(part)))
            yield part
    yield memoryview(sums.pack(chunks))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = copy_cpu.words(tensor.resolve_conj().resolve_neg()).cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _pieces(parts: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """The same bytes in pieces of `PIECE`, each in memory of its own and filled up to whole blocks."""
    left, piece, filled = -(-size // _BLOCK) * _BLOCK, memoryview(b""), 0
    for part in parts:
        while part:
            if filled == len(piece):
                if filled:
                    yield piece
                piece, filled = memoryview(mmap.mmap(-1, min(PIECE, left))), 0
                left -= len(piece)
            count = min(len(part), len(piece) - filled)
            piece[filled : filled + count] = part[:count]
            filled, part = filled + count, part[count:]
    yield piece


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

"""Tensors in host memory into an image and out of it, each byte touched while it is in the cache."""

import ctypes
from collections.abc import Mapping

import torch
import xxhash

from elastic.checkpoint.memory import host
from elastic.checkpoint.state.image import CHUNK, VALUES, Image, Piece
from elastic.proto import sums
from elastic.proto.sums import Chunk

BLOCK = 384 << 10
"""Bytes that are copied, then summed, at a time: so few that they are still in a core's own cache, so many
that the little of Python in between, which holds its lock, costs nothing."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes: a tensor seen as these is copied bit by bit, whatever its dtype."""


def write(
    image: Image,
    tensors: Mapping[str, torch.Tensor],
    values: bytes,
    out: memoryview,
    threads: int = 1,
) -> list[Chunk]:
    """Fill `out` (`image.nbytes` of it) but for its table, and return its chunks.

    tensors: those of `image.pieces`, on the CPU, of any strides.
    """
    target = torch.frombuffer(out, dtype=torch.uint8)
    parts: list[tuple[torch.Tensor | None, int, int]] = []
    """What of a chunk is still to be copied, and where it goes."""
    for name, start, end in image.spans():
        if start == end:
            continue
        if name in ("", VALUES):
            out[start:end] = values if name else image.header
            source = None
        else:
            source = _bytes_of(tensors[name], target[start:end])
        for at in range(start, end, CHUNK):
            stop = min(at + CHUNK, end)
            parts.append((None if source is None else source[at - start : stop - start], at, stop))

    def chunk(part: tuple[torch.Tensor | None, int, int]) -> Chunk:
        source, start, end = part
        return Chunk(end, _copy(source, target[start:end], out[start:end]))

    return host.each(chunk, parts, threads)


def _bytes_of(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """The tensor's memory, if that is what is to be copied; else it is copied, and None returned."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.reshape(-1).view(torch.uint8)
    source = words(tensor)
    target.view(source.dtype).view(source.shape).copy_(source)
    return None


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, since not every dtype can be copied as it is."""
    return tensor.view(WORDS.get(tensor.itemsize, tensor.dtype))


def _copy(source: torch.Tensor | None, target: torch.Tensor, out: memoryview) -> int:
    """Copy a chunk, unless it is there already; returns its xxh3."""
    if source is None:
        return sums.checksum(out)
    digest = xxhash.xxh3_64()
    start, goal = source.data_ptr(), target.data_ptr()
    for at in range(0, len(out), BLOCK):
        block = out[at : at + BLOCK]
        ctypes.memmove(goal + at, start + at, len(block))
        digest.update(block)
    return digest.intdigest()


def tensor_of(piece: Piece, data: memoryview) -> torch.Tensor:
    """A piece as a tensor of its extent, in the memory of `data`, its bytes."""
    dtype = getattr(torch, piece.dtype)
    if not piece.nbytes:
        return torch.empty(piece.extent, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(piece.extent)

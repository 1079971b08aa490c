"""Tensors in host memory into an image and out of it, each byte touched while it is in the cache."""

from collections.abc import Mapping

import torch
import xxhash

from elastic.checkpoint.image import Image
from elastic.proto.slot import CHUNK

BLOCK = 512 << 10
"""Bytes that are copied, then summed, at a time: small enough for a core's own cache."""


class Summer:
    """xxh3 of each `CHUNK` bytes of what is fed to it, in order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._room = CHUNK
        self._done: list[int] = []

    def feed(self, data: memoryview) -> None:
        while len(data) >= self._room:
            self._hash.update(data[: self._room])
            data = data[self._room :]
            self._done.append(self._hash.intdigest())
            self._hash.reset()
            self._room = CHUNK
        if len(data):
            self._hash.update(data)
            self._room -= len(data)

    def finish(self) -> list[int]:
        """The checksums; the last chunk may be shorter."""
        return self._done if self._room == CHUNK else [*self._done, self._hash.intdigest()]


def write(
    image: Image, tensors: Mapping[str, torch.Tensor], values: bytes, out: memoryview
) -> list[int]:
    """Fill `out` (`image.nbytes` of it) and return its chunks' checksums.

    tensors: those of `image.pieces`, on the CPU, of any strides.
    """
    summer = Summer()
    out[: len(image.header)] = image.header
    summer.feed(out[: len(image.header)])
    for name, piece in image.pieces.items():
        start = image.starts[name]
        _copy(tensors[name], out[start : start + piece.nbytes], summer)
    out[image.values_at : image.nbytes] = values
    summer.feed(out[image.values_at : image.nbytes])
    return summer.finish()


def _copy(tensor: torch.Tensor, out: memoryview, summer: Summer) -> None:
    if not len(out):
        return
    target = torch.frombuffer(out, dtype=torch.uint8)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        summer.feed(out)
        return
    source = tensor.reshape(-1).view(torch.uint8)
    for at in range(0, len(out), BLOCK):
        target[at : at + BLOCK].copy_(source[at : at + BLOCK])
        summer.feed(out[at : at + BLOCK])


def piece_of(image: Image, name: str, data: memoryview) -> torch.Tensor:
    """A piece as a tensor of its extent, in `data`'s own memory: all of an image."""
    piece, start = image.pieces[name], image.starts[name]
    dtype = getattr(torch, piece.dtype)
    if not piece.nbytes:
        return torch.empty(piece.extent, dtype=dtype)
    flat = torch.frombuffer(data[start : start + piece.nbytes], dtype=torch.uint8)
    return flat.view(dtype).view(piece.extent)

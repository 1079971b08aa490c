"""An image that is read, wherever it is: its chunks, verified before they are used."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic.checkpoint.memory import copy_cpu, host
from elastic.checkpoint.state import typed_json
from elastic.checkpoint.state.image import Image, Piece
from elastic.proto import sums
from elastic.proto.errors import CheckpointError
from elastic.proto.sums import Chunk


class Reader(Protocol):
    """Where an image's bytes are: a slot, a file, a peer's memory, an object in a store."""

    def read(self, start: int, end: int) -> memoryview:
        """Those bytes of the image, to be read only; may be called by several threads at a time.

        Raises OSError.
        """
        ...


class Mapped:
    """An image that is all in reach: a slot, a file that is mapped."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read(self, start: int, end: int) -> memoryview:
        found = self._data[start:end]
        host.populate(found, write=False)
        return found


@dataclass(slots=True, kw_only=True)
class Source:
    """One image, somewhere; its bytes are verified before they are used."""

    where: str
    """In words: "rank 3's slot", or a file."""
    image: Image
    reader: Reader
    chunks: Sequence[Chunk]

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The chunks that have something of a span of the image: start, end and checksum of each."""
        first = bisect_right(self.chunks, start, key=lambda chunk: chunk.end)
        at = self.chunks[first - 1].end if first else 0
        for chunk in self.chunks[first:]:
            if at >= end:
                return
            yield at, chunk.end, chunk.checksum
            at = chunk.end

    def intact(self, start: int, end: int) -> bool:
        """Whether the bytes of a span of the image are those that were written."""
        return all(
            sums.checksum(self.reader.read(at, stop)) == checksum
            for at, stop, checksum in self.spans(start, end)
        )

    def piece(self, name: str) -> torch.Tensor | None:
        """A whole piece, in memory that is the image's where it is in reach; None if damaged."""
        start = self.image.starts[name]
        end = start + self.image.pieces[name].nbytes
        if not self.intact(start, end):
            return None
        return copy_cpu.tensor_of(self.image.pieces[name], self.reader.read(start, end))

    def values(self, find: Callable[[str], Any]) -> Any:
        """What is no tensor, with `find(name)` in the place of each tensor."""
        start, end = self.image.values_at, self.image.sums_at
        try:
            if not self.intact(start, end):
                raise CheckpointError(f"{self.where}: the values are damaged")
            return typed_json.decode(bytes(self.reader.read(start, end)), find)
        except OSError as error:
            raise CheckpointError(f"{self.where}: the values cannot be read: {error}") from error

    def same_values(self, other: "Source") -> bool:
        """Whether both hold the same, as far as their checksums tell."""
        mine, theirs = (one._sums(one.image.values_at, one.image.sums_at) for one in (self, other))
        return mine == theirs

    def same_piece(self, piece: Piece, other: "Source", copy: Piece) -> bool:
        """Whether another image holds the same: of its name and box, and kept equal by its writers, or
        of its bytes as far as checksums tell. What each rank has of its own may have one name on all."""
        name = piece.name
        if piece != copy:
            return False
        if self.image.common(name) & other.image.common(name):
            return True
        mine, theirs = (
            one._sums(one.image.starts[name], one.image.starts[name] + piece.nbytes)
            for one in (self, other)
        )
        return mine == theirs

    def _sums(self, start: int, end: int) -> list[tuple[int, int]]:
        """Of the chunks of a span: where they end in it, and their checksums."""
        return [(stop - start, checksum) for _, stop, checksum in self.spans(start, end)]

"""Which bytes of which shards a rank needs, whatever world wrote them: boxes in, reads out. Pure."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from elastic.checkpoint.state.image import Piece
from elastic.proto.errors import CheckpointError

S = TypeVar("S", bound=Hashable)
"""What stands for a shard: a rank's slot here, a peer's, a file."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: `extent[d]` elements from `offset[d]` on, in each dim."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def empty(self) -> bool:
        return 0 in self.extent

    @property
    def volume(self) -> int:
        """Its elements."""
        return math.prod(self.extent)

    def meet(self, other: "Box") -> "Box":
        """What both have; empty where they have nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        return Box(starts, tuple(max(0, e - s) for s, e in zip(starts, ends, strict=True)))

    def without(self, hole: "Box") -> Iterator["Box"]:
        """The rest of it in disjoint boxes, once a box within it is taken out."""
        offset, extent = list(self.offset), list(self.extent)
        for dim, (start, size) in enumerate(zip(hole.offset, hole.extent, strict=True)):
            before = start - offset[dim]
            after = offset[dim] + extent[dim] - (start + size)
            for at, length in ((offset[dim], before), (start + size, after)):
                if length:
                    yield Box(
                        (*offset[:dim], at, *offset[dim + 1 :]),
                        (*extent[:dim], length, *extent[dim + 1 :]),
                    )
            offset[dim], extent[dim] = start, size

    def _ends(self) -> Iterator[int]:
        return (o + e for o, e in zip(self.offset, self.extent, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Generic[S]):
    """A box of a wanted piece, and the shard and its piece to take it from."""

    wanted: Piece
    shard: S
    piece: Piece
    box: Box
    """In the whole tensor."""


Held = Mapping[str, Sequence[tuple[S, Piece]]]
"""By a tensor's name, who holds which piece of it, the nearest first."""


def index(shards: Iterable[tuple[S, Iterable[Piece]]]) -> dict[str, list[tuple[S, Piece]]]:
    """`Held`, from what each shard has; shards in the order in which they are preferred."""
    held: dict[str, list[tuple[S, Piece]]] = {}
    for shard, pieces in shards:
        for piece in pieces:
            held.setdefault(piece.name, []).append((shard, piece))
    return held


def plan(wanted: Iterable[Piece], held: Held[S]) -> tuple[list[Read[S]], list[str]]:
    """The reads that fill each wanted piece, every element once; and the names that stay unfilled.

    Raises `CheckpointError` where a tensor was saved with another shape or dtype.
    """
    reads: list[Read[S]] = []
    missing: list[str] = []
    for piece in wanted:
        found = list(_reads(piece, held.get(piece.name, ())))
        filled = sum(read.box.volume for read in found)
        if filled == Box(piece.offset, piece.extent).volume and piece.name in held:
            reads += found
        else:
            missing.append(piece.name)
    return reads, missing


def flat(extent: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Elements `start` to `end` of a row-major tensor as boxes, in order, each without a gap in it."""
    if start >= end:
        return
    if not extent:
        yield Box((), ())
        return
    row = math.prod(extent[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if first > last:  # all of it is within one row
        yield from _in_row(extent, last, start - last * row, end - last * row)
        return
    yield from _in_row(extent, first - 1, start - (first - 1) * row, row)
    if first < last:
        zeros = (0,) * (len(extent) - 1)
        yield Box((first, *zeros), (last - first, *extent[1:]))
    yield from _in_row(extent, last, 0, end - last * row)


def _in_row(extent: tuple[int, ...], number: int, start: int, end: int) -> Iterator[Box]:
    for box in flat(extent[1:], start, end):
        yield Box((number, *box.offset), (1, *box.extent))


def _reads(wanted: Piece, held: Sequence[tuple[S, Piece]]) -> Iterator[Read[S]]:
    left = [Box(wanted.offset, wanted.extent)]
    for shard, piece in held:
        _check(wanted, piece)
        theirs = Box(piece.offset, piece.extent)
        rest: list[Box] = []
        for box in left:
            common = box.meet(theirs)
            if common.empty:
                rest.append(box)
                continue
            yield Read(wanted=wanted, shard=shard, piece=piece, box=common)
            rest += box.without(common)
        left = [box for box in rest if not box.empty]
        if not left:
            return


def _check(wanted: Piece, piece: Piece) -> None:
    if wanted.shape != piece.shape:
        raise CheckpointError(
            f"{wanted.name} has the shape {list(wanted.shape)} here and {list(piece.shape)} in the "
            "checkpoint"
        )
    if wanted.dtype != piece.dtype:
        raise CheckpointError(
            f"{wanted.name} is of {wanted.dtype} here and of {piece.dtype} in the checkpoint"
        )

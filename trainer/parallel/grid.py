"""Which ranks work together: one grid of replicas, pipeline stages and tensor-parallel ranks. Pure.

A replica's ranks follow one another, so that a node that is lost takes away only the replicas that had a
rank on it; ranks of one layer are nearest.
"""

from dataclasses import dataclass
from typing import NamedTuple

from elastic.proto.errors import UsageError


class Place(NamedTuple):
    """Where a rank is in the grid."""

    dp: int
    """Its replica, or the part of one that FSDP gives it."""
    pp: int
    """Its pipeline stage."""
    tp: int
    """Its part of each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """dp x pp x tp ranks, the last one counting fastest."""

    dp: int
    pp: int
    tp: int

    @classmethod
    def of(cls, world: int, *, tp: int, pp: int) -> "Grid":
        """Raises `UsageError` where the world is no multiple of tp x pp."""
        if world < 1 or world % (tp * pp):
            raise UsageError(
                f"{world} ranks are no multiple of --tensor-model-parallel-size {tp} x "
                f"--pipeline-model-parallel-size {pp}: start {tp * pp} or a multiple"
            )
        return cls(dp=world // (tp * pp), pp=pp, tp=tp)

    @property
    def size(self) -> int:
        """The world's size."""
        return self.dp * self.pp * self.tp

    @property
    def end(self) -> int:
        """The first rank that has a loss."""
        return self.rank(Place(0, self.pp - 1, 0))

    def place(self, rank: int) -> Place:
        """Where `rank` is, 0 <= rank < size."""
        return Place(rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp)

    def rank(self, place: Place) -> int:
        """Who is at `place`."""
        return (place.dp * self.pp + place.pp) * self.tp + place.tp

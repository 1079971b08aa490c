"""Samples that a run leaves out: from samples consumed to places of the order, and back. Pure.

A place is left out once and for all, so that the n-th sample of a run is the n-th place that is left.
What is consumed counts samples that were trained on, and learning rate and batch size follow that:
leaving samples out bends no schedule, it only moves on what is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic.proto.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Skips:
    """The ranges of places that are left out; part of a run's state, the same on every rank."""

    ranges: tuple[tuple[int, int], ...] = ()
    """(first, end) of each, end not included; in order, with places between any two."""

    def __post_init__(self) -> None:
        before = -1
        for first, end in self.ranges:
            if not before < first < end:
                raise UsageError(f"{self.ranges} are no ranges in order with places between them")
            before = end

    @property
    def count(self) -> int:
        """Places that are left out."""
        return sum(end - first for first, end in self.ranges)

    def add(self, first: int, end: int) -> "Skips":
        """Leave out [first, end), too."""
        return Skips.of([*self.ranges, (first, end)])

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "Skips":
        """Of ranges in any order, which may overlap and be empty."""
        joined: list[tuple[int, int]] = []
        for first, end in sorted(one for one in ranges if one[0] < one[1]):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((first, end))
        return cls(ranges=tuple(joined))

    def places(self, consumed: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place of each sample, by how many were consumed before it; [n] to [n].

        order.ids(skips.places(leaf.places))
        """
        ranges = np.array(self.ranges, np.int64).reshape(-1, 2)
        lengths = ranges[:, 1] - ranges[:, 0]
        left_out = np.concatenate(
            [[0], np.cumsum(lengths)]
        )  # before each range, and after the last
        starts = ranges[:, 0] - left_out[:-1]  # consumed by then
        more: NDArray[np.int64] = left_out[np.searchsorted(starts, consumed, side="right")]
        return consumed + more

    def place(self, consumed: int) -> int:
        """The place of the next sample after `consumed`."""
        return int(self.places(np.array([consumed], np.int64))[0])

    def before(self, consumed: int) -> int:
        """Samples that were left out before the next one after `consumed`."""
        return self.place(consumed) - consumed

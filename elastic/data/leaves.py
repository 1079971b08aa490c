"""The leaves of a global batch, and who runs which. Pure.

A leaf is a micro-batch of fixed shape with fixed samples. A global batch is a fixed list of L of them,
whoever trains: leaf i has the samples that rank i of L ranks would have. Rank r of W runs leaves r,
r + W, ... All ranks run as many; what there are too few of is filled up with padding, leaves that count
for nothing. So any number of ranks trains on the same batch, in the same pieces.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic.data.order import check_rank, places, whole
from elastic.proto.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaf:
    """A micro-batch."""

    number: int
    """In its global batch, from 0; at least `Leaves.count`: padding."""
    places: NDArray[np.int64]
    """Of its samples, for `Order.ids`, [leaf_size]. Padding repeats a leaf of the same batch, so that
    it brings no inf or NaN that is not there anyway."""
    weight: float
    """What the sum of its samples' losses is multiplied by, so that all leaves of all ranks add up to
    the mean of the global batch: 1 / batch_size; 0 for padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaves:
    """How batches of one size are cut. Under a ramp, make one for each size."""

    batch_size: int
    """Samples of a step over all ranks."""
    leaf_size: int
    """Samples of a leaf, which divide the batch: the micro-batch."""
    multiple: int = 1
    """Leaves of a rank are a multiple of this, as an interleaved pipeline wants them."""
    at_least: int = 1
    """Leaves of a rank, at least, as a pipeline with that many stages wants them."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "leaf_size", "multiple", "at_least"):
            whole(name, getattr(self, name), least=1)
        if self.batch_size % self.leaf_size:
            raise UsageError(
                f"a global batch of {self.batch_size} samples is no whole number of micro-batches of "
                f"{self.leaf_size}: make it a multiple of that"
            )

    @property
    def count(self) -> int:
        """Leaves L of a batch, padding not counted."""
        return self.batch_size // self.leaf_size

    def per_rank(self, size: int) -> int:
        """Leaves that each of `size` ranks runs, padding included."""
        whole("a number of ranks", size, least=1)
        wanted = max(-(-self.count // size), self.at_least)
        return -(-wanted // self.multiple) * self.multiple

    def waste(self, size: int) -> float:
        """The part of the work of `size` ranks that is padding, 0 to 1."""
        return 1 - self.count / (size * self.per_rank(size))

    def of(self, consumed: int, rank: int, size: int) -> list[Leaf]:
        """What one of `size` ranks runs, in order, of the batch that begins after `consumed` samples."""
        whole("consumed", consumed, least=0)
        check_rank(rank, size)
        numbers = range(rank, size * self.per_rank(size), size)
        return [self._leaf(consumed, number) for number in numbers]

    def _leaf(self, consumed: int, number: int) -> Leaf:
        count = self.count
        return Leaf(
            number=number,
            places=places(consumed, self.batch_size, number % count, count),
            weight=1 / self.batch_size if number < count else 0.0,
        )

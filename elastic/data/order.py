"""From (samples consumed, seed, batch) to sample ids. Pure.

The samples of a run are one endless sequence: epoch after epoch, each an order of its own of all N
samples. A global batch is the next B places of it, whoever trains, so a batch may end one epoch and
begin the next, and every batch is full. A place alone gives its id: nothing of the size of N is kept.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.proto.errors import UsageError

_ROUNDS = 8
_WORD = 2**64


def whole(name: str, number: Any, *, least: int | None = None) -> int:
    """A number that counts something. Raises `UsageError` for one that is none, a float or a bool say, and for
    one below `least`: what comes of it would be other samples, and no error."""
    try:
        found = operator.index(number)
    except TypeError:
        found = None
    if found is None or isinstance(number, bool):
        raise UsageError(f"{name} is a whole number, not {number!r}")
    if least is not None and found < least:
        raise UsageError(f"{name} is at least {least}, not {found}")
    return found


def check_rank(rank: Any, size: Any) -> None:
    """Raises `UsageError` where there is no such rank of `size`."""
    if not 0 <= whole("a rank", rank) < whole("a number of ranks", size):
        raise UsageError(f"there is no rank {rank} of {size}")


def places(consumed: int, batch: int, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
    """Rank's places of the global batch that begins after `consumed` samples, [b].

    Every world-size-th of `batch`, so the ranks' shares differ by one at most; b may be 0.
    """
    return np.arange(consumed + rank, consumed + batch, world_size, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The sequence of samples of one run. Fixed for all time: resumed runs count on it."""

    length: int
    """Samples N of an epoch."""
    seed: int = 0
    """Decides the order in each epoch; at least 0, below 2^64."""
    shuffle: bool = True
    """False: by id in every epoch."""

    def __post_init__(self) -> None:
        if whole("a dataset's length", self.length, least=0) < 1:
            raise UsageError("a dataset without samples has no order")
        if not 0 <= whole("a seed", self.seed) < _WORD:
            raise UsageError(f"a seed is at least 0 and below 2^64, not {self.seed}")

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids, each in 0..N-1, at places of the sequence, which count from 0; [n] to [n]."""
        epochs, offsets = np.divmod(places, self.length)
        if not self.shuffle:
            return offsets
        ids = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = _shuffled(offsets[chosen], self.length, _keys(self.seed, epoch))
        return ids


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """One for each round of the shuffle, [_ROUNDS]."""
    base = _mixed(_mixed(np.array([seed], np.uint64)) + np.uint64(epoch))
    return _mixed(base + np.arange(1, _ROUNDS + 1).astype(np.uint64))


def _shuffled(
    offsets: NDArray[np.int64], length: int, keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Where a permutation of 0..length-1 takes each offset.

    A Feistel network on rows x columns, which hold `length` and fewer than one row more; what lands
    beyond `length` is sent on until it does not (Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002).
    """
    columns = math.isqrt(length - 1) + 1 if length > 1 else 1
    rows = -(-length // columns)
    width, height = np.uint64(columns), np.uint64(rows)
    found = offsets.astype(np.uint64)
    out = np.arange(len(found))
    while len(out):
        row, column = np.divmod(found[out], width)
        for number, key in enumerate(keys):
            if number % 2:
                row = (row + _mixed(column + key) % height) % height
            else:
                column = (column + _mixed(row + key) % width) % width
        found[out] = row * width + column
        out = out[found[out] >= length]
    return found.astype(np.int64)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each word to another that looks like chance: the last part of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

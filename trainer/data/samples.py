"""From sequences to samples of equal length, in Megatron's order. Pure, but for the tokens read.

As `megatron.core.datasets.gpt_dataset` has it: the sequences of a split are shuffled over all epochs that
the samples need, laid end to end, and cut every s tokens; a sample is s + 1 tokens, so its last is the
first of the next. Then the samples are shuffled, by the same generator. Where the last epoch gives less
than 0.8 of its samples, its sequences and its samples are shuffled apart, so that they come last.

So the order depends on how many epochs the samples asked for take.

Shapes: E epochs of n sequences with T tokens in all, N samples asked for, M made, s tokens predicted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from elastic.proto.errors import UsageError
from elastic.trainer.data.indexed import Indexed

SEPARATE_BELOW = 0.80
"""Share of an epoch's samples below which the last epoch is shuffled apart."""

_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What decides the samples of one split, beside the lengths of its sequences."""

    sequences: range
    """Those of the dataset that are the split's."""
    samples: int | None
    """How many are asked for, N; None: what one epoch gives."""
    seq_length: int
    """Tokens s that a sample predicts."""
    seed: int = 1234
    """Of both shuffles; at least 0, below 2^32."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"seq_length must be at least 1, not {self.seq_length}")
        if self.samples is not None and self.samples < 0:
            raise ValueError(f"samples must be at least 0, not {self.samples}")
        if not 0 <= self.seed <= _UINT32_MAX:
            raise UsageError(f"a seed of data is at least 0 and below 2^32, not {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How far the sequences of a request go: a function of their number of tokens."""

    epochs: int
    """E, the fewest that give the samples asked for."""
    separate: bool
    """Whether the last epoch is shuffled apart."""
    before_last: int
    """Samples that begin and end before the last epoch's tokens, and one that ends in them; 0 for E = 1."""
    samples: int
    """M: all that E epochs give; N or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Indices:
    """Where the tokens of each sample are."""

    documents: NDArray[np.int32]
    """Sequence at each place of all epochs, [E n]."""
    samples: NDArray[np.integer[Any]]
    """Place in `documents` and token there at which each sample begins, and the last ends, [M + 1, 2]."""
    shuffle: NDArray[np.integer[Any]]
    """Row of `samples` that is sample k, [M]."""


def plan(request: Request, tokens: int) -> Plan:
    """How many epochs of `tokens` T the request takes.

    UsageError when there are no tokens, too few for a sample, or so few that no index could count the
    epochs.
    """
    s = request.seq_length
    asked = request.samples
    if tokens == 0 or (asked is None and tokens <= s):
        raise UsageError(
            f"{len(request.sequences)} sequences with {tokens} tokens give no sample of {s} + 1: "
            "give this split more documents"
        )
    epochs = 1 if asked is None else max(1, -(-(asked * s + 1) // tokens))
    if epochs > _INT32_MAX or request.sequences.stop > _INT32_MAX:
        raise UsageError(
            f"{asked} samples of {s} tokens are {epochs} epochs of {len(request.sequences)} sequences "
            f"with {tokens} tokens, more than an index can count: give it more documents"
        )
    before_last = ((epochs - 1) * tokens - 1) // s if epochs > 1 else 0
    last = (asked or 0) - before_last
    each = (tokens - 1) // s
    separate = epochs > 1 and last < int(SEPARATE_BELOW * each)
    samples = (epochs * tokens - 1) // s
    return Plan(epochs=epochs, separate=separate, before_last=before_last, samples=samples)


def index_types(documents: int, samples: int) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Types of the sample index and of the shuffle index, by the places and the samples that they name."""
    wide = np.dtype(np.int64)
    return (
        np.dtype(np.int32) if documents <= _INT32_MAX else wide,
        np.dtype(np.uint32) if samples < _UINT32_MAX - 1 else wide,
    )


def memory(places: int, samples: int) -> int:
    """Bytes that `build` takes at its height, at most, by places of `documents` and samples."""
    return 40 * places + 48 * samples


def build(lengths: NDArray[np.int32], request: Request) -> Indices:
    """The three indices of a request; `lengths` are of all sequences of the dataset, [S].

    UsageError: see `plan`.
    """
    own = request.sequences
    course = plan(request, int(lengths[own.start : own.stop].sum(dtype=np.int64)))
    generator = RandomState(request.seed)
    once = np.arange(own.start, own.stop)
    if course.separate:
        parts = [np.tile(once, course.epochs - 1), once]
    else:
        parts = [np.tile(once, course.epochs)]
    documents = _shuffled(parts, generator).astype(np.int32)
    row, name = index_types(len(documents), course.samples)
    samples = _cut(lengths[documents], course.samples, request.seq_length, row)
    order = np.split(np.arange(course.samples), [course.before_last] if course.separate else [])
    return Indices(
        documents=documents, samples=samples, shuffle=_shuffled(order, generator).astype(name)
    )


def _shuffled(parts: list[NDArray[np.int64]], generator: RandomState) -> NDArray[np.int64]:
    """Each part in an order of its own, one after the other.

    The order does not depend on the type; numpy shuffles words of 8 bytes twice as fast as shorter ones.
    """
    for part in parts:
        generator.shuffle(part)
    return np.concatenate(parts)


def _cut(
    lengths: NDArray[np.int32], count: int, seq_length: int, dtype: np.dtype[Any]
) -> NDArray[np.integer[Any]]:
    """Where each of `count` samples begins, and the last ends, among sequences laid end to end, [M + 1, 2].

    A sample begins in the sequence that holds its first token: never in one without tokens, but for the
    first sample, which begins at the first place whatever it holds.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.arange(count + 1, dtype=np.int64) * seq_length
    # The first sample that begins at an end or behind it is -(-end // s): counting is a linear search.
    places = np.cumsum(np.bincount(-(-ends // seq_length), minlength=count + 1)[: count + 1])
    rows = np.empty((count + 1, 2), dtype)
    rows[:, 0] = places
    rows[:, 1] = starts - (ends[places] - lengths[places])
    rows[0] = 0
    return rows


class Samples:
    """The samples of one split of a dataset: its tokens, found by its indices."""

    def __init__(self, data: Indexed, indices: Indices, seq_length: int) -> None:
        self._data = data
        self._indices = indices
        self._seq_length = seq_length

    def __len__(self) -> int:
        """Samples M; those that were asked for are the first N."""
        return len(self._indices.shuffle)

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        """Tokens of sample k, [s + 1]: all but the last predict, all but the first are predicted.

        UsageError when the indices are not of this dataset.
        """
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        try:
            found = self._pieces(int(self._indices.shuffle[k]))
        except (IndexError, ValueError):
            found = []
        if sum(map(len, found)) != self._seq_length + 1:
            raise UsageError(
                f"sample {k} of {self._data.prefix} is not where its index says: the index is damaged or "
                "of other data; remove it, so that it is made again"
            )
        return np.concatenate(found, dtype=np.int64)

    def _pieces(self, row: int) -> list[NDArray[Any]]:
        """The sample's part of each sequence that it goes over."""
        (first, begin), (last, end) = self._indices.samples[row : row + 2].tolist()
        own = self._indices.documents[first : last + 1].tolist()
        if len(own) == 1:
            return [self._data.tokens(own[0], begin, end + 1 - begin)]
        whole = [self._data.tokens(one) for one in own[1:-1]]
        return [self._data.tokens(own[0], begin), *whole, self._data.tokens(own[-1], 0, end + 1)]

"""What an evaluation reads, and what it comes to. Pure, and the same in any world.

Evaluation k of a set reads the next samples after evaluation k - 1's, as in Megatron, and that is a function
of the step alone. A batch of it is leaves, like one of training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic.data import Leaf, Leaves
from elastic.proto.errors import UsageError
from elastic.trainer.watch.console import perplexity


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one evaluation reads of one set."""

    first: int
    """Place of its first sample; what goes beyond the set begins it again."""
    samples: int
    length: int
    """Samples of the set."""

    def batches(self, batch_size: int) -> int:
        """How many there are; the last one may be filled up with samples that do not count."""
        return -(-self.samples // batch_size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A leaf of an evaluation's batch."""

    number: int
    """In its batch; padding has those from the batch's leaves on."""
    ids: NDArray[np.int64]
    """Of its samples in the set, [b]."""
    counts: NDArray[np.float32]
    """1 for samples that count, 0 for what fills up, [b]: times the loss mask."""


def validation(
    iteration: int, *, interval: int, iters: int, batch_size: int, length: int, final: bool = False
) -> Reading:
    """What is read after `iteration` steps, `iters` batches; final: once more when training is over."""
    number = iteration // interval - (0 if final else 1)
    samples = iters * batch_size
    return Reading(first=number * samples, samples=samples, length=length)


def whole(length: int) -> Reading:
    """All of a set, once: `--full-validation`."""
    return Reading(first=0, samples=length, length=length)


def test(*, iters: int, batch_size: int, length: int) -> Reading:
    """What is read of the test set, at the end."""
    return Reading(first=0, samples=iters * batch_size, length=length)


def pieces(reading: Reading, leaves: Leaves, rank: int, size: int) -> Iterator[list[Piece]]:
    """What one of `size` ranks runs of each batch, in order.

    Raises UsageError for a set without samples.
    """
    if reading.length < 1:
        raise UsageError("a validation or test set has no samples: look at --split")

    def piece(leaf: Leaf) -> Piece:
        counts = ((leaf.places < reading.samples) * (leaf.weight > 0)).astype(np.float32)
        return Piece(
            number=leaf.number if counts.any() else leaves.count,  # a mean of nothing is no number
            ids=(reading.first + leaf.places) % reading.length,
            counts=counts,
        )

    return (
        [piece(leaf) for leaf in leaves.of(batch * leaves.batch_size, rank, size)]
        for batch in range(reading.batches(leaves.batch_size))
    )


def suffixes(sets: int, names: Sequence[str] = ()) -> list[str]:
    """What tells sets apart in tags and lines: nothing for one, `-wiki`, or `-0` without names."""
    if names and len(names) != sets:
        raise UsageError(
            f"--validation-set-names has {len(names)} names for {sets} validation sets: give one each"
        )
    if names:
        return [f"-{name}" for name in names]
    return [""] if sets == 1 else [f"-{number}" for number in range(sets)]


def scalars(
    losses: Mapping[str, float], kind: str = "validation", suffix: str = "", *, ppl: bool = True
) -> dict[str, float]:
    """Megatron's TensorBoard tags of an evaluation; kind: `validation` or `test`."""
    found = {}
    for name, loss in losses.items():
        found[f"{name} {kind}{suffix}"] = loss
        if ppl:
            found[f"{name} {kind}{suffix} ppl"] = perplexity(loss)
    return found

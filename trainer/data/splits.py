"""Train, validation and test: which sequences of a dataset are whose. Pure.

As Megatron cuts them: in the order of the file, nothing is shuffled before, so validation and test are
its tail. Ends are rounded as Python's `round` does (halves to the even), on float64.
"""

import re
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np

from elastic.proto.errors import UsageError

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Splits(Generic[T_co]):
    """One thing for each split."""

    train: T_co
    valid: T_co
    test: T_co


NAMES = tuple(field.name for field in fields(Splits))


def fractions(text: str) -> tuple[float, ...]:
    """The shares of train, validation and test, which sum to 1, of a text such as `949,50,1`.

    Fewer than three mean 0 for the others. UsageError for anything but three numbers, not all 0.
    """
    found = re.findall(r"[.0-9]+", text)
    between = re.sub(r"[.0-9]+", "", text)
    try:
        numbers = [float(one) for one in found]
    except ValueError:
        numbers = []
    total = sum(numbers)
    if between.strip(", /:") or not 1 <= len(numbers) <= len(NAMES) or not 0 < total < float("inf"):
        raise UsageError(f"--split is three shares such as 949,50,1, not {text!r}")
    shares = np.array(numbers + [0.0] * (len(NAMES) - len(numbers)))
    return tuple((shares / shares.sum()).tolist())


def ranges(text: str, sequences: int) -> Splits[range]:
    """Which of `sequences` each split has; it may have none."""
    ends = [round(end * sequences) for end in accumulate(fractions(text), initial=0.0)]
    return Splits(*(range(first, last) for first, last in pairwise(ends)))


def check_asked(found: Splits[range], samples: Splits[int], text: str) -> None:
    """UsageError when samples are asked of a split that has no sequences.

    (Megatron counts epochs without tokens then, for ever.)
    """
    for name in NAMES:
        asked = getattr(samples, name)
        if asked and not getattr(found, name):
            raise UsageError(
                f"--split {text} leaves nothing of {found.test.stop} sequences for {name}, of which "
                f"{asked} samples are asked: give {name} a larger share, or more documents"
            )

"""Several datasets as one: which of them gives sample i, and which of its own that is. Pure.

As Megatron blends them (`build_blending_indices`): sample i comes from the dataset that is furthest behind
its share, w_d * max(i, 1) - taken_d, the first of those that are equally far. All in float64, and with each
product and difference rounded, so that the choice is the same to the last bit.

Shapes: D datasets, N samples asked for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic.proto.errors import UsageError

SURPLUS = 0.005
"""Share of samples that a dataset makes beyond its own of the blend: the order of choice may need some."""
MAX_DATASETS = 32766
"""What an int16 names, by Megatron's count."""

_BLOCK = 1 << 12
"""Samples whose shares are reckoned at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """The samples of several datasets, as one sequence."""

    datasets: NDArray[np.int16]
    """Dataset that gives sample i, [N]."""
    samples: NDArray[np.int64]
    """Which of its own that is: they count up from 0 in each dataset, [N]."""

    def check(self, sizes: Sequence[int]) -> None:
        """UsageError when more is taken of a dataset than it has; `sizes` are the datasets' samples."""
        taken = np.bincount(self.datasets, minlength=len(sizes)).tolist()
        for number, (want, has) in enumerate(zip(taken, sizes, strict=True)):
            if want > has:
                raise UsageError(
                    f"the blend takes {want} samples of dataset {number}, which has {has}: "
                    "give that one a smaller weight, or more documents"
                )


def parse(
    values: Sequence[str], is_there: Callable[[str], bool] = lambda _: True
) -> tuple[list[str], list[float] | None]:
    """Prefixes, and weights where there are any, of --data-path: PREFIX..., or WEIGHT PREFIX...

    is_there: whether a prefix has files. UsageError when only some of the prefixes have a weight, or one of several
    is a number and not there.
    """
    prefixes, weights = _paired(values)
    for one in prefixes if len(values) > 1 else ():
        if _number(one) is not None and not is_there(one):
            raise UsageError(
                f"--data-path {' '.join(values)}: {one} stands where a prefix does: weights and prefixes alternate, "
                "WEIGHT PREFIX WEIGHT PREFIX ..., or there are prefixes alone"
            )
    return prefixes, weights


def _paired(values: Sequence[str]) -> tuple[list[str], list[float] | None]:
    prefixes = [value.strip() for value in values]
    weights = [_number(value) for value in prefixes[::2]]
    named = any(_number(value) is None for value in prefixes[1::2])
    if len(prefixes) % 2 and named and all(weight is not None for weight in weights):
        raise UsageError(
            f"--data-path {' '.join(values)}: weights and prefixes come in pairs, and the last weight has no prefix"
        )
    if len(prefixes) % 2 or all(weight is None for weight in weights):
        return prefixes, None
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(weights):
        raise UsageError(
            f"--data-path {' '.join(values)}: give each prefix a weight before it, or give none"
        )
    return prefixes[1::2], given


def shares(weights: Sequence[float], samples: int) -> list[int]:
    """What a blend of N samples takes of each dataset, each rounded up, [D]."""
    return [math.ceil(samples * weight) for weight in _normalized(weights).tolist()]


def with_surplus(share: int) -> int:
    """How many samples a dataset makes, of which a blend takes `share`."""
    return math.ceil(share * (1 + SURPLUS))


def by_weight(weights: Sequence[float], samples: int) -> Blend:
    """Blend datasets by weights, which need not sum to 1; as long as the sum of `shares`.

    UsageError for a weight that is not above 0.
    """
    # Normalized twice, as Megatron does: the second time may change a last bit.
    twice = _normalized(_normalized(weights).tolist())
    return _blend(twice, sum(shares(weights, samples)), [math.inf] * len(twice))


def by_size(sizes: Sequence[int], samples: int | None = None) -> Blend:
    """Blend datasets in proportion to their samples: N of them, or all.

    UsageError for a dataset without samples.
    """
    if samples is None:
        return _blend(_normalized(sizes), sum(sizes), [float(size) for size in sizes])
    return _blend(_normalized(sizes), min(samples, sum(sizes)), [math.inf] * len(sizes))


def _normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    found = np.array(weights, dtype=np.float64)
    if not 1 <= len(found) <= MAX_DATASETS:
        raise UsageError(f"a blend is of 1 to {MAX_DATASETS} datasets, not {len(found)}")
    total = found.sum()
    if not (found > 0).all() or not np.isfinite(total):
        raise UsageError(f"the weights of a blend are numbers above 0, not {found.tolist()}")
    normalized: NDArray[np.float64] = found / total
    return normalized


def _blend(weights: NDArray[np.float64], size: int, limits: list[float]) -> Blend:
    """Take `size` samples, of no dataset more than its limit."""
    chosen = np.empty(size, np.int16)
    taken = np.zeros(len(weights))
    behind = np.empty(len(weights))
    for first in range(0, size, _BLOCK):
        steps = np.maximum(np.arange(first, min(first + _BLOCK, size)), 1)
        block = []
        for share in steps[:, None] * weights:
            np.subtract(share, taken, out=behind)
            furthest = int(behind.argmax())
            count = taken[furthest] + 1
            taken[furthest] = count if count < limits[furthest] else math.inf
            block.append(furthest)
        chosen[first : first + _BLOCK] = block
    return Blend(datasets=chosen, samples=_counted(chosen))


def _counted(chosen: NDArray[np.int16]) -> NDArray[np.int64]:
    """How often each value was there before, [N]."""
    order = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    samples = np.empty(len(chosen), np.int64)
    samples[order] = np.arange(len(chosen)) - before
    return samples


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

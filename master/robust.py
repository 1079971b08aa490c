"""What some intervals of noisy times say: medians and median distances, which a few wild ones do not move. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, sqrt
from statistics import NormalDist, median_low

WINDOW = 8
"""Intervals of which a median is."""
LEAST = 5
"""Of them that have to be known."""
STAYS = 0.7
"""Part of its bound down to which what was called slow stays so."""

_TO_DEVIATION = 1.4826
"""Of the median distance, where what is measured is normal."""


def known(window: Sequence[float]) -> list[float]:
    """What of it is; NaN is what was not told."""
    return [one for one in window if isfinite(one)]


def spread(values: Sequence[float]) -> float:
    """As a deviation, of the median distance from the median."""
    middle = median_low(values)
    return _TO_DEVIATION * median_low([abs(one - middle) for one in values])


def jitter(values: Sequence[float]) -> float:
    """As a deviation, of the median distance from one to the next: a step from one level to another is none of it."""
    steps = [abs(later - one) for one, later in pairwise(values)]
    return _TO_DEVIATION * median_low(steps) / sqrt(2) if steps else 0.0


def spread_of_most(values: Sequence[float]) -> float:
    """`spread`, or that of those below the median alone, if it is less: large ones, as many as there may be up to half
    of them, do not widen it."""
    ordered = sorted(values)
    half = (len(ordered) + 1) // 2
    below = [ordered[half - 1] - one for one in ordered[: half - 1]]
    return min(spread(ordered), _TO_DEVIATION * median_low(below)) if below else 0.0


def deviations(wrong: float, count: int) -> float:
    """Beyond how many one of `count` that are normal is with a probability of `wrong` at most."""
    return NormalDist().inv_cdf(1 - wrong / max(1, count))


def age(above: Sequence[bool]) -> int:
    """How many intervals ago that began what the newest ones are: at each beginning, as many fit as do not."""
    fits = [sum(above[at:]) + sum(not one for one in above[:at]) for at in range(len(above))]
    return len(above) - fits.index(max(fits))

"""In which order a rank of a pipeline runs its stages' passes: what torch's schedules do, without one. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

from elastic.trainer.parallel.pipeline import Schedule

Kind = Literal["forward", "backward", "inputs", "weights"]
"""The last two are backward in two: gradients of what came in, and of the weights."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One leaf through one stage."""

    kind: Kind
    stage: int
    """Which of the rank's own, from 0."""
    leaf: int


def order(schedule: Schedule, *, rank: int, pp: int, virtual: int, leaves: int) -> list[Pass]:
    """Of the rank's stages, `virtual` many; leaves: as many as the schedule takes."""
    if schedule == "gpipe":
        return [Pass(kind, 0, leaf) for kind in ("forward", "backward") for leaf in range(leaves)]
    if schedule == "1f1b":
        return list(_alternating(min(leaves, pp - rank), leaves))
    return list(_interleaved(rank, pp, virtual, leaves, apart=schedule == "zero-bubble"))


def _alternating(ahead: int, leaves: int) -> Iterator[Pass]:
    """ahead: leaves whose forward is before the first backward."""
    for leaf in range(leaves + ahead):
        if leaf >= ahead:
            yield Pass("backward", 0, leaf - ahead)
        if leaf < leaves:
            yield Pass("forward", 0, leaf)


def _interleaved(rank: int, pp: int, virtual: int, leaves: int, *, apart: bool) -> Iterator[Pass]:
    """apart: weights' gradients by themselves, `rank` passes behind the others."""
    together = leaves // max(1, leaves // pp)  # leaves that a stage runs in a row
    passes = leaves * virtual
    ahead = min((virtual - 1) * together + (1 if apart else 2) * (pp - 1 - rank), passes)

    def numbered(kind: Kind) -> Iterator[Pass]:
        seen = [0] * virtual
        for number in count():
            turn = number // together % virtual
            stage = turn if kind == "forward" else virtual - 1 - turn
            yield Pass(kind, stage, seen[stage])
            seen[stage] += 1

    forward, weights = numbered("forward"), numbered("weights")
    backward = numbered("inputs" if apart else "backward")
    for _ in range(ahead):
        yield next(forward)
    for number in range(passes):
        if number + ahead < passes:
            yield next(forward)
        yield next(backward)
        if apart and number >= rank:
            yield next(weights)
    if apart:
        for _ in range(min(rank, passes)):
            yield next(weights)

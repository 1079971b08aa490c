"""What a stand-in for a model reports of leaf after leaf, and what a rank hears of it."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from elastic.data import Leaf, Leaves
from elastic.trainer.parallel.program import Told
from elastic.trainer.run.step import Share, Stepper, Sums

LEAVES = Leaves(batch_size=4, leaf_size=1)
Reports = Mapping[str, float]
STEPS: tuple[Sequence[Reports], ...] = (
    ({"lm loss": 1.0}, {"lm loss": 2.0, "b": 5.0}, {"a": 3.0, "lm loss": 3.0}, {"lm loss": 4.0}),
    ({"lm loss": 1.0}, {}, {"lm loss": 3.0}, {"late": 7.0, "lm loss": 4.0}),
    ({"lm loss": 1.0}, {"a": 1.0}, {"lm loss": 3.0}, {"late": 7.0}),
)
"""Of each leaf, in three steps."""


class Reporting:
    """Runs leaves by their numbers."""

    def __init__(self, steps: Sequence[Sequence[Reports]]) -> None:
        self._steps = iter(steps)

    def evaluate(self, batch: Mapping[str, torch.Tensor], leaves: int) -> list[Told]:
        step = [*next(self._steps), *[{"of what fills up": 1.0}] * leaves]
        return [
            Told(torch.tensor(2.0).double(), {n: torch.tensor([r, 1.0]).double() for n, r in step[at].items()})
            for at in batch["leaves"].tolist()
        ]  # fmt: skip


def stepper(steps: Sequence[Sequence[Reports]], names: Sequence[str] = ()) -> Stepper:
    laid: Any = SimpleNamespace(
        device=torch.device("cpu"), grid=SimpleNamespace(tp=1), runner=Reporting(steps)
    )
    return Stepper(laid, leaf_tokens=2, names=names)


def share() -> Share:
    mine: Sequence[Leaf] = LEAVES.of(0, dist.get_rank(), dist.get_world_size())
    return Share(mine, {"leaves": torch.tensor([leaf.number for leaf in mine])})


def heard() -> list[Any]:
    """After each step sums by name, and how many leaves had others; in between they are agreed on again."""
    told = stepper(STEPS)
    first, second = _plain(told.evaluate(share(), LEAVES)), _plain(told.evaluate(share(), LEAVES))
    return [first, second, told.agree(), _plain(told.evaluate(share(), LEAVES))]


def _plain(sums: Sums) -> list[Any]:
    return [[name, total.tolist()] for name, total in sums.totals.items()] + [float(sums.unnamed)]


HEARD = [
    [["lm loss", [10.0, 4.0]], ["b", [5.0, 1.0]], ["a", [3.0, 1.0]], 0.0],
    [["lm loss", [8.0, 3.0]], ["b", [0.0, 0.0]], ["a", [0.0, 0.0]], 1.0],
    ["late"],
    [["lm loss", [4.0, 2.0]], ["b", [0.0, 0.0]], ["a", [1.0, 1.0]], ["late", [7.0, 1.0]], 0.0],
]
"""In any world."""

"""One optimizer step's gradients, from this rank's leaves of a global batch; and a batch that only counts.

Shapes: L leaves of the batch, padding not counted; n leaves of this rank, of b samples each.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.data import Leaf, Leaves
from elastic.trainer.parallel.layout import Laid
from elastic.trainer.parallel.program import Batch, Told
from elastic.trainer.transfers import ToHost, to_device


class Share(NamedTuple):
    """This rank's leaves, one behind the other."""

    leaves: Sequence[Leaf]
    """n of them."""
    batch: Batch
    """[n b, ...] each."""


class Sums(NamedTuple):
    """What a batch came to, the same on every rank and in any world."""

    totals: dict[str, Tensor]
    """What the run's loss function reports by name, fp64 [2]: a sum and what it is to be divided by."""
    tokens: Tensor
    """That its losses counted, fp64 []."""
    unnamed: Tensor
    """How many of its leaves reported what the ranks have not agreed on, and is not among them; fp64 []."""
    norm: Tensor | None = None
    """Of its gradients as they were added up, fp32 []; None without a backward."""

    @property
    def loss(self) -> dict[str, Tensor]:
        """Means by name, fp32 []."""
        return {name: (total / of).float() for name, (total, of) in self.totals.items()}


class Stepper:
    """Runs batches through a model that is laid out."""

    def __init__(self, laid: Laid, *, leaf_tokens: int, names: Sequence[str] = ()) -> None:
        """leaf_tokens: of a leaf, b x S; names: of reports, as they were, of a run that goes on."""
        self._laid, self._leaf_tokens = laid, leaf_tokens
        self._saved = tuple(names)
        self._names: list[str] | None = None
        """Of reports, as the ranks have agreed on them."""
        self._new: dict[str, tuple[int, int]] = {}
        """What this rank has seen since, and where first: the leaf's number, and the place among its reports."""

    @property
    def names(self) -> list[str]:
        """Of the reports that are told, on every rank."""
        return list(self._names or self._saved)

    def accumulate(self, share: Share, leaves: Leaves, *, loss_scale: float | Tensor = 1.0) -> Sums:
        """Forward and backward of a batch, again where its sums would not be exact.

        leaves: how the batch is cut. `clip` makes what the model has afterwards the gradients of the
        mean loss.
        """
        runner, gradients, clock = self._laid.runner, self._laid.gradients, self._laid.clock
        weights = torch.tensor([leaf.weight * leaves.leaf_size for leaf in share.leaves])
        weights = to_device(weights, self._laid.device)
        keys = None
        if self._laid.dropout is not None:
            keys = self._laid.dropout.of([int(leaf.places[0]) for leaf in share.leaves])
        while True:
            gradients.begin()
            told = runner.run(share.batch, weights * loss_scale, keys)
            clock.switch("reduce")
            exact = ToHost(gradients.exact())
            gradients.join()
            sums = self._summed(share.leaves, told, leaves.count)
            with clock.inside("clip"):
                sums = sums._replace(norm=gradients.norm())
            if exact.read():  # while the device still has the norm before it
                break
            runner.zero_grad()
        clock.switch("other")
        return sums

    def clip(
        self, sums: Sums, leaves: Leaves, most: float, *, loss_scale: float | Tensor = 1.0
    ) -> Tensor:
        """Divide the gradients by what they are too large by, and scale them down to the norm `most`,
        0 for any; returns their norm before that, fp32 [], on every rank."""
        with self._laid.clock.inside("clip"):
            # Where no token counts, all gradients are 0, whatever they are divided by.
            tokens = torch.where(sums.tokens == 0, 1.0, sums.tokens)
            factor = (leaves.count * self._leaf_tokens / tokens).float() / loss_scale
            assert sums.norm is not None
            norm = sums.norm * factor
            if most > 0:
                factor = factor * torch.clamp(most / (norm + 1e-6), max=1.0)
            self._laid.gradients.scale(factor)
            return norm

    def evaluate(self, share: Share, leaves: Leaves) -> Sums:
        """Forward of a batch."""
        told = self._laid.runner.evaluate(share.batch, len(share.leaves))
        return self._summed(share.leaves, told, leaves.count)

    def means(self, share: Share, leaves: Leaves) -> dict[str, Tensor]:
        """Forward of a batch: what each of its leaves reports by name, fp64 [L], on every rank."""
        told = self._laid.runner.evaluate(share.batch, len(share.leaves))
        names, rows = self._rows(share.leaves, told, leaves.count)
        return {name: rows[:, 1 + 2 * i] / rows[:, 2 + 2 * i] for i, name in enumerate(names)}

    @contextmanager
    def anew(self) -> Iterator[None]:
        """In it the names of reports are agreed on anew: an evaluation's may be others than training's."""
        before = (self._names, self._new, self._saved)
        self._names, self._new, self._saved = None, {}, ()
        try:
            yield
        finally:
            self._names, self._new, self._saved = before

    def agree(self) -> list[str]:
        """On the names of all reports that any rank has seen so far, in an order that no rank's share changes; returns
        those that are new. All ranks call it, and wait."""
        names = self._names or []
        seen: dict[str, list[int]] = {}
        for found in self._told_to_all(json.dumps(self._new)):
            for name, place in json.loads(found).items():
                seen[name] = min(place, seen.get(name, place))
        new = sorted(seen.keys() - set(names), key=lambda name: (seen[name], name))
        self._names, self._new = names + new, {}
        return new

    def _begin(self) -> None:
        """With the names that the run has told of, unless its loss function is another by now, and has none of them."""
        mine, seen = self._new, self.agree()
        if not set(self._saved).isdisjoint(seen):
            self._names = list(self._saved)
            self._new = {name: at for name, at in mine.items() if name not in self._saved}

    def _summed(self, mine: Sequence[Leaf], told: Sequence[Told], count: int) -> Sums:
        names, rows = self._rows(mine, told, count)
        total = rows.sum(dim=0)
        return Sums(dict(zip(names, total[1:-1].view(-1, 2), strict=True)), total[0], total[-1])

    def _rows(
        self, mine: Sequence[Leaf], told: Sequence[Told], count: int
    ) -> tuple[list[str], Tensor]:
        """What is reported, and of each leaf its tokens, two numbers a report, and 1 where it has others;
        fp64 [L, 1 + 2 ... + 1]. What a leaf does not report is 0 of 0."""
        # Nothing is told where there is no loss, and what only fills up is not looked at.
        counted = [
            (leaf.number, one) for leaf, one in zip(mine, told, strict=False) if leaf.number < count
        ]
        for number, one in counted:
            for place, name in enumerate(one.reports):
                if self._names is None or name not in self._names:
                    self._new.setdefault(name, (number, place))
        if self._names is None:
            self._begin()
        assert self._names is not None
        # Each leaf has a row of its own, so that they are added up in one order in any world.
        rows = torch.zeros(
            count, 2 + 2 * len(self._names), dtype=torch.float64, device=self._laid.device
        )
        none = rows.new_zeros(2)
        for number, one in counted:
            parts = [one.tokens.view(1), *(one.reports.get(name, none) for name in self._names)]
            rows[number, :-1] = torch.cat(parts)
            if not one.reports.keys() <= set(self._names):
                rows[number, -1] = 1.0
        dist.all_reduce(rows)  # each is one replica's, and zero on the others
        return self._names, rows / self._laid.grid.tp

    def _told_to_all(self, text: str) -> list[str]:
        """Each rank's that gives one."""
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor(len(mine), device=self._laid.device)
        dist.all_reduce(size, dist.ReduceOp.MAX)
        texts = torch.zeros(
            dist.get_world_size(), int(size), dtype=torch.uint8, device=self._laid.device
        )
        texts[dist.get_rank(), : len(mine)] = mine.to(texts.device)
        dist.all_reduce(texts)
        given = (bytes(one).rstrip(b"\0").decode() for one in texts.tolist())
        return [one for one in given if one]

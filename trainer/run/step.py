"""One optimizer step's gradients, from this rank's leaves of a global batch; and a batch that only counts.

Shapes: L leaves of the batch, padding not counted; n leaves of this rank, of b samples each.
"""

import json
from collections.abc import Sequence
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
    norm: Tensor | None = None
    """Of its gradients as they were added up, fp32 []; None without a backward."""

    @property
    def loss(self) -> dict[str, Tensor]:
        """Means by name, fp32 []."""
        return {name: (total / of).float() for name, (total, of) in self.totals.items()}


class Stepper:
    """Runs batches through a model that is laid out."""

    def __init__(self, laid: Laid, *, leaf_tokens: int) -> None:
        """leaf_tokens: of a leaf, b x S."""
        self._laid, self._leaf_tokens = laid, leaf_tokens
        self._names: list[str] | None = None

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
        """Forward of a batch, whose reports may be others than training's."""
        self._names = None
        told = self._laid.runner.evaluate(share.batch, len(share.leaves))
        sums = self._summed(share.leaves, told, leaves.count)
        self._names = None
        return sums

    def means(self, share: Share, leaves: Leaves) -> Tensor:
        """Forward of a batch: the loss of each of its leaves, fp64 [L], on every rank."""
        told = self._laid.runner.evaluate(share.batch, len(share.leaves))
        _, rows = self._rows(share.leaves, told, leaves.count)
        return rows[:, 1] / rows[:, 2]

    def _summed(self, mine: Sequence[Leaf], told: Sequence[Told], count: int) -> Sums:
        names, rows = self._rows(mine, told, count)
        total = rows.sum(dim=0)
        return Sums(dict(zip(names, total[1:].view(-1, 2), strict=True)), total[0])

    def _rows(
        self, mine: Sequence[Leaf], told: Sequence[Told], count: int
    ) -> tuple[list[str], Tensor]:
        """What is reported, and of each leaf its tokens and two numbers a report, fp64 [L, 1 + 2 ...]."""
        names = self._agreed(told)
        # Each leaf has a row of its own, so that they are added up in one order in any world.
        rows = torch.zeros(count, 1 + 2 * len(names), dtype=torch.float64, device=self._laid.device)
        for leaf, one in zip(mine, told, strict=False):  # nothing is told where there is no loss
            if leaf.number < count:
                parts = [one.tokens.view(1), *(one.reports[name] for name in names)]
                rows[leaf.number] = torch.cat(parts)
        dist.all_reduce(rows)  # each is one replica's, and zero on the others
        return names, rows / self._laid.grid.tp

    def _agreed(self, told: Sequence[Told]) -> list[str]:
        """What is reported, as those ranks name it that have the loss."""
        if self._names is None:
            device, first = self._laid.device, self._laid.grid.end
            text = json.dumps(list(told[0].reports) if told else []).encode()
            size = torch.tensor(len(text), device=device)
            dist.broadcast(size, src=first)
            sent = torch.tensor(list(text), dtype=torch.uint8, device=device)
            if dist.get_rank() != first:
                sent = torch.zeros(int(size), dtype=torch.uint8, device=device)
            dist.broadcast(sent, src=first)
            self._names = json.loads(bytes(sent.tolist()))
        return self._names

"""One optimizer step over this rank's leaves of a global batch.

Shapes: L leaves of the batch, padding not counted; n leaves of this rank, of b samples each; S positions.
"""

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.data import Leaf
from elastic.trainer.parallel.gradients import Gradients


class Share(NamedTuple):
    """This rank's leaves, one behind the other, as the model takes them."""

    leaves: list[Leaf]
    """n of them."""
    inputs: Tensor
    """[n b, S] int64."""
    targets: Tensor
    """[n b, S] int64."""
    weights: Tensor
    """[n b, S]: of each token in the batch's loss; 0 in padding."""


class Runner(Protocol):
    """Runs leaves through the model, alone or with the other stages of a pipeline."""

    def run(self, inputs: Tensor, targets: Tensor, weights: Tensor, leaves: int) -> list[Tensor]:
        """Forward and backward of all, whose gradients are reduced at the end; the leaves' losses, [] each,
        on ranks that have the head, nothing elsewhere."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...


def accumulate(
    runner: Runner, gradients: Gradients, share: Share, count: int, *, copies: int
) -> Tensor:
    """Run this rank's leaves forward and backward, again where the sums would not be exact.

    count: L; copies: how many ranks of the world have the same loss, those that share a layer.
    Returns the batch's loss, fp32 [], on every rank: added up in the leaves' order, so the same in
    any world. The model's gradients are those of the batch.
    """
    while True:
        gradients.begin()
        found = runner.run(share.inputs, share.targets, share.weights, len(share.leaves))
        if gradients.exact():
            break
        runner.zero_grad()
    gradients.join()
    losses = torch.zeros(count, dtype=torch.float64, device=share.inputs.device)
    for leaf, loss in zip(share.leaves, found, strict=False):  # none where there is no head
        if leaf.number < count:
            losses[leaf.number] = loss
    dist.all_reduce(losses)  # each is one replica's, and zero on the others
    return (losses / copies).sum().float()

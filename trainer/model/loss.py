"""The head and the cross entropy in one, over chunks of tokens, so that all logits are never held.

Backward's work is done with forward's, while a chunk's logits are there: what is kept for backward is two
gradients, as large as the hidden states and the head.

Shapes: T tokens, H hidden size, V words, v of them on this rank, c tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor

from elastic.trainer.parallel.collectives import largest, total
from elastic.trainer.parallel.tensor import TensorParallel

CHUNK = 1024
"""Tokens whose logits are held at a time."""


def cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """The sum of the tokens' cross entropies in nats, each times its weight, and each without it.

    `hidden` [T, H] is entered and the same on every rank of `tp`; `head` [v, H] this rank's words;
    `targets` [T] int64; `weights` [T]. Returns a scalar, which has a gradient, and [T], which has
    none; fp32 both, the same on every rank.
    """
    return _CrossEntropy.apply(hidden, head, targets, weights, tp)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, tp: TensorParallel
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            losses[part], slope = _chunk(hidden[part], head, targets[part], tp)
            slope = slope.mul_(weights[part].unsqueeze(1)).to(hidden.dtype)  # [c, v]
            if for_hidden is not None:
                torch.mm(slope, head, out=for_hidden[part])
            if for_head is not None:
                for_head += slope.t() @ hidden[part]
        head_gradient = None if for_head is None else for_head.to(head.dtype)
        ctx.save_for_backward(for_hidden, head_gradient)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for_hidden, for_head = ctx.saved_tensors
        scale = gradients[0]
        return (
            None if for_hidden is None else for_hidden * scale.to(for_hidden.dtype),
            None if for_head is None else for_head * scale.to(for_head.dtype),
            None, None, None,
        )  # fmt: skip


def _chunk(
    hidden: Tensor, head: Tensor, targets: Tensor, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """A chunk's cross entropies [c], and their slope by the logits of this rank's words [c, v]."""
    logits = (hidden @ head.t()).float()
    highest = logits.amax(dim=1)
    if tp.mesh is not None:
        highest = largest(highest, tp.group)
    logits.sub_(highest.unsqueeze(1))
    here = targets - tp.rank * len(head)
    mine = (here >= 0) & (here < len(head))
    word = here.masked_fill(~mine, 0).unsqueeze(1)
    wanted = logits.gather(1, word).squeeze(1).masked_fill(~mine, 0.0)
    powers = logits.exp_()
    both = torch.stack((powers.sum(dim=1), wanted))
    if tp.mesh is not None:
        both = total(both, tp.group)
    slope = powers.div_(both[0].unsqueeze(1))
    slope.scatter_add_(1, word, -mine.unsqueeze(1).to(slope.dtype))
    return both[0].log() - both[1], slope

"""The head and the cross entropy in one, over chunks of tokens, so that all logits are never held.

Backward's work is done with forward's, while a chunk's logits are there: what is kept for backward is two
gradients, as large as the hidden states and the head.

Shapes: T tokens, H hidden size, V words, v of them on this rank, c tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elastic.trainer.model.collectives import largest, total
from elastic.trainer.model.tensor_parallel import TensorParallel

LOGITS = 2**28
"""Of a chunk, at most; a chunk's tokens follow from this and from this rank's words."""

_ALIKE = 2.0**-12
"""By how much, relatively, two weights may differ that are said to be the same."""


def cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    tp: TensorParallel,
    chunk: "Chunk | None" = None,
) -> Tensor:
    """Each token's cross entropy in nats, fp32 [T], the same on every rank of `tp`.

    `hidden` [T, H] is entered and the same on every rank; `head` [v, H] this rank's words; `targets`
    [T] int64. `weights` [T] fp32: what the losses' gradient will be, or any multiple of it; where it
    turns out to be anything else, the gradients are NaN. chunk: `of_chunk`, compiled.
    """
    return _CrossEntropy.apply(hidden, head, targets, weights, tp, chunk or of_chunk)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        tp: TensorParallel,
        chunk: "Chunk",
    ) -> Tensor:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        tokens = tokens_of_chunk(len(head))
        for start in range(0, len(hidden), tokens):
            part = slice(start, start + tokens)
            losses[part], slope = chunk(hidden[part], head, targets[part], weights[part], tp)
            if for_hidden is not None:
                torch.mm(slope, head, out=for_hidden[part])
            if for_head is not None:
                for_head = _added(for_head, slope, hidden[part])
        head_gradient = None if for_head is None else for_head.to(head.dtype)
        ctx.save_for_backward(for_hidden, head_gradient, weights)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for_hidden, for_head, weights = ctx.saved_tensors
        scale = _multiple(gradients[0], weights)
        return (
            None if for_hidden is None else for_hidden * scale.to(for_hidden.dtype),
            None if for_head is None else for_head * scale.to(for_head.dtype),
            None, None, None, None,
        )  # fmt: skip


def _multiple(gradient: Tensor, weights: Tensor) -> Tensor:
    """How often `gradient` is `weights`, both [T]: [], exactly 1 where they are equal; 0 where the
    weights are; NaN where it is no multiple of them."""
    whole = weights.sum()
    found = torch.where(whole == 0, 0.0, gradient.sum() / whole)
    wanted = found * weights
    apart = ((gradient - wanted).abs() > wanted.abs() * _ALIKE).any()
    return torch.where(apart, torch.nan, found)


def of_chunk(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """A chunk's cross entropies fp32 [c], and the slope of their weighted sum by the logits of this rank's
    words, in `hidden`'s dtype [c, v]."""
    logits = (hidden @ head.t()).float()
    highest = logits.amax(dim=1)
    if tp.mesh is not None:
        highest = largest(highest, tp.group)
    logits = logits - highest.unsqueeze(1)
    words = torch.arange(len(head), dtype=torch.int32, device=targets.device)
    wanted = words == (targets - tp.rank * len(head)).int().unsqueeze(1)  # [c, v]
    powers = logits.exp()
    # No gather: behind one, Inductor no longer writes the slope where the logits were.
    both = torch.stack((powers.sum(dim=1), torch.where(wanted, logits, 0.0).sum(dim=1)))
    if tp.mesh is not None:
        both = total(both, tp.group)
    slope = (powers / both[0].unsqueeze(1) - wanted.float()) * weights.unsqueeze(1)
    return both[0].log() - both[1], slope.to(hidden.dtype)


Chunk = Callable[[Tensor, Tensor, Tensor, Tensor, TensorParallel], tuple[Tensor, Tensor]]


def tokens_of_chunk(words: int) -> int:
    """Of a chunk: a function of the model and of what shares its layers, since it decides bits."""
    fitting = max(1, LOGITS // words)
    return fitting // 256 * 256 or fitting


def _added(total: Tensor, slope: Tensor, hidden: Tensor) -> Tensor:
    """total [v, H] fp32 + slope^T hidden, summed up in fp32 where the device can."""
    if total.is_cuda and hidden.dtype != total.dtype:
        return torch.addmm(total, slope.t(), hidden, out_dtype=total.dtype, out=total)
    return total.add_(slope.t() @ hidden)

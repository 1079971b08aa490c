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

_PART = 1024
"""Words at most of which Inductor reduces a row without a loop."""
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
    if not torch.is_grad_enabled():
        head = head.detach()  # else a parameter's gradient is computed all the same
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
            None if for_hidden is None else _times(for_hidden, scale),
            None if for_head is None else _times(for_head, scale),
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


def _times(gradient: Tensor, scale: Tensor) -> Tensor:
    """In `gradient`'s dtype; `scale` fp32 [], which in it would be off by as much for each of them."""
    return torch.mul(gradient, scale.view(1), out=torch.empty_like(gradient))


def of_chunk(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """A chunk's cross entropies fp32 [c], and the slope of their weighted sum by the logits of this rank's
    words, in `hidden`'s dtype [c, v]."""
    logits = (hidden @ head.t()).float()
    # As long as that, Inductor holds a part while it takes both its maximum and its sum: all is read once.
    parts = logits.view(len(hidden), -1, _part(len(head)))
    tops = parts.amax(dim=2)
    sums = (parts - tops.unsqueeze(2)).exp().sum(dim=2)
    highest = tops.amax(dim=1)
    if tp.mesh is not None:
        highest = largest(highest, tp.group)
    powers = (sums * (tops - highest.unsqueeze(1)).exp()).sum(dim=1)
    target = (targets - tp.rank * len(head)).unsqueeze(1)
    found = logits.gather(1, target.clamp(0, len(head) - 1))
    own = torch.where((target >= 0) & (target < len(head)), found, 0.0).squeeze(1)
    if tp.mesh is not None:
        powers, own = total(torch.stack((powers, own)), tp.group).unbind()
    sum_of_all = highest + powers.log()
    words = torch.arange(len(head), dtype=torch.int32, device=targets.device)
    wanted = (words == target.int()).float()  # [c, v]
    slope = ((logits - sum_of_all.unsqueeze(1)).exp() - wanted) * weights.unsqueeze(1)
    return sum_of_all - own, slope.to(hidden.dtype)


Chunk = Callable[[Tensor, Tensor, Tensor, Tensor, TensorParallel], tuple[Tensor, Tensor]]


def compiled_chunk() -> Chunk:
    """`of_chunk`, compiled."""
    # In tiles, else each logit is divided for its row's number.
    tiled: dict[str, Any] = {"triton.prefer_nd_tiling": True}
    return torch.compile(of_chunk, fullgraph=True, dynamic=False, options=tiled)


def tokens_of_chunk(words: int) -> int:
    """Of a chunk: a function of the model and of what shares its layers, since it decides bits."""
    fitting = max(1, LOGITS // words)
    return fitting // 256 * 256 or fitting


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _part(words: int) -> int:
    """Words of each part of a row."""
    return next(part for part in range(_PART, 0, -1) if words % part == 0)


def _added(total: Tensor, slope: Tensor, hidden: Tensor) -> Tensor:
    """total [v, H] fp32 + slope^T hidden, summed up in fp32 where the device can."""
    if total.is_cuda and hidden.dtype != total.dtype:
        return torch.addmm(total, slope.t(), hidden, out_dtype=total.dtype, out=total)
    return total.add_(slope.t() @ hidden)

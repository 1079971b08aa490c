"""The step of a language model, as Megatron's scripts have it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from elastic.trainer.parallel.program import Batch, LossFunction


def batch(samples: Tensor) -> Batch:
    """[b, S + 1] tokens -> what a data set gives."""
    return {
        "tokens": samples[:, :-1].contiguous(),
        "labels": samples[:, 1:].contiguous(),
        "loss_mask": torch.ones_like(samples[:, 1:], dtype=torch.float32),
    }


def forward_step(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
    one = next(batches)
    mask = one["loss_mask"]

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (losses * mask).sum(), mask.sum()
        return total, count, {"lm loss": torch.stack((total.detach(), count))}

    losses: Any = model(one["tokens"], None, None, labels=one["labels"], loss_mask=mask)
    return losses, loss

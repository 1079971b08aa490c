"""A leaf's batch, and what a script does with it.

Shapes: b samples of a leaf, S positions.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic.proto.errors import UsageError
from elastic.trainer.current import current
from elastic.trainer.data import blend
from elastic.trainer.megatron import absent
from elastic.trainer.megatron.core.parallel_state import (
    is_pipeline_first_stage,
    is_pipeline_last_stage,
)
from elastic.trainer.megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model
from elastic.trainer.megatron.training import print_rank_0, print_rank_last
from elastic.trainer.parallel.program import Batch

__all__ = [
    "average_losses_across_data_parallel_group", "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank", "get_blend_and_blend_per_split", "get_ltor_masks_and_position_ids",
    "is_first_or_last_pipeline_stage", "print_rank_0", "print_rank_last", "unwrap_model",
]  # fmt: skip

__getattr__ = absent.attributes(__name__)

Blend = tuple[list[str], list[float] | None]


def get_batch_on_this_tp_rank(
    data_iterator: Iterator[Batch], mtp_on_this_rank: bool = False
) -> dict[str, Tensor | None]:
    """The leaf: tokens, labels, loss_mask, attention_mask, position_ids, in this order, [b, S] each.

    Every rank reads its own, so nothing is broadcast. There is no attention_mask, attention is causal; and
    without --reset-position-ids no position_ids, which count from 0.
    """
    if mtp_on_this_rank:
        raise UsageError("get_batch_on_this_tp_rank: multi-token prediction is not here")
    batch = next(data_iterator)
    positions = batch["position_ids"] if current().settings.data.reset_position_ids else None
    return {
        "tokens": batch["tokens"], "labels": batch["labels"], "loss_mask": batch["loss_mask"],
        "attention_mask": None, "position_ids": positions,
    }  # fmt: skip


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[None, Tensor, Tensor | None]:
    """Of tokens [b, S]: attention_mask, which is None, loss_mask and position_ids, [b, S] each, or None for
    positions that count from 0."""
    if reset_attention_mask:
        raise UsageError("reset_attention_mask: attention is causal over the whole sample here")
    ends = data == eod_token
    mask = torch.ones_like(data, dtype=torch.float32)
    if eod_mask_loss:
        mask = mask.masked_fill(ends, 0.0)
    if not reset_position_ids:
        return None, mask, None
    places = torch.arange(data.shape[1], device=data.device).expand_as(data)
    starts = torch.zeros_like(data)
    starts[:, 1:] = (places[:, 1:]).where(ends[:, :-1], 0)
    return None, mask, places - starts.cummax(dim=1).values


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Whether a stage has the embedding or the loss; without a number, whether the rank has."""
    return is_pipeline_first_stage(vp_stage=vp_stage) or is_pipeline_last_stage(vp_stage=vp_stage)


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """The losses themselves, detached: a run averages what is reported over all leaves by itself, padding left
    out, so that it is the same in any world."""
    return torch.cat([loss.detach().view(1) for loss in losses])


def get_blend_and_blend_per_split(args: Any) -> tuple[Blend | None, list[Blend | None] | None]:
    """--data-path as prefixes and weights; or that of each split."""
    each = (args.train_data_path, args.valid_data_path, args.test_data_path)
    if any(each):
        return None, [blend.parse(words) if words else None for words in each]
    return (blend.parse(args.data_path) if args.data_path else None), None

"""Where `training.utils` was until 2024."""

from elastic.trainer.megatron import absent
from elastic.trainer.megatron.training.utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_ltor_masks_and_position_ids,
    print_rank_0,
    print_rank_last,
    unwrap_model,
)

__all__ = [
    "average_losses_across_data_parallel_group", "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank", "get_ltor_masks_and_position_ids", "print_rank_0",
    "print_rank_last", "unwrap_model",
]  # fmt: skip

__getattr__ = absent.attributes(__name__)

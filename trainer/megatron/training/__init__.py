"""The run, and what a script asks of it."""

import torch.distributed as dist

from elastic.trainer.current import current
from elastic.trainer.data.tokenizers import Tokenizer
from elastic.trainer.megatron.training import inprocess_restart
from elastic.trainer.pretrain import get_args, get_timers, pretrain, print_rank_0
from elastic.trainer.watch.reporter import say

__all__ = [
    "get_args", "get_timers", "get_tokenizer", "inprocess_restart", "pretrain", "print_rank_0",
    "print_rank_last", "set_startup_timestamps",
]  # fmt: skip


def get_tokenizer() -> Tokenizer:
    """The run's: `vocab_size`, `eod`, `encode` and `decode`."""
    return current().tokenizer


def print_rank_last(message: object) -> None:
    """Print on the last rank."""
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        say(str(message))


def set_startup_timestamps(
    program_start: float | None = None, main_entry: float | None = None
) -> None:
    """Without effect: `elasticctl events` tells what a start took."""

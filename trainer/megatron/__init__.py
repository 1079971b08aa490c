"""Megatron-LM's names, for a team's training script: `from elastic.trainer.megatron.training import pretrain`.

Each module here has the path that it has in Megatron, and each name is what the trainer has for it; docs/trainer-megatron.md
lists them. What is Megatron's and not here is in `absent.py`. This module has the names that were
`megatron`'s own until 2024.
"""

from elastic.trainer.megatron import absent
from elastic.trainer.megatron.training import (
    get_args,
    get_timers,
    get_tokenizer,
    print_rank_0,
    print_rank_last,
)

__all__ = ["get_args", "get_timers", "get_tokenizer", "print_rank_0", "print_rank_last"]

absent.install()

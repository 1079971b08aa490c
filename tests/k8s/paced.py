"""`pretrain_gpt` whose steps take a while, as those of a larger model do, so that much can happen between two."""

import functools
import threading
from collections.abc import Callable
from typing import Any

from elastic.trainer import pretrain_gpt
from elastic.trainer.parallel.program import Program
from elastic.trainer.pretrain import pretrain

STEP = 0.05
"""Seconds of each micro-batch."""


def paced(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wait_first(*arguments: Any, **named: Any) -> Any:
        threading.Event().wait(STEP)
        return forward(*arguments, **named)

    return wait_first


if __name__ == "__main__":
    Program.forward = paced(Program.forward)  # type: ignore[method-assign]
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        None,
        pretrain_gpt.forward_step,
    )

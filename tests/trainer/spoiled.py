"""A team's script: data that are easy to learn, but for some samples, whose numbers are in SPOILED.

`python -m tests.trainer.spoiled ...`, with the arguments of pretrain_gpt. Where there is no agent and AVAILABLE
names a file, this machine has as much memory for snapshots as that says.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic.agent import boot
from elastic.trainer.pretrain import pretrain
from elastic.trainer.pretrain_gpt import forward_step, model_provider

BATCH = 12
SPOILED = range(24 * BATCH, 27 * BATCH)
"""Of steps 25 to 27."""
SEQUENCE = 16


class Counting:
    """Sequences that count up, and noise."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < self.length:
            raise IndexError(f"sample {number} of {self.length}")
        tokens = (number % 7 + np.arange(SEQUENCE + 1)) % 50
        if number in SPOILED:
            tokens = np.random.default_rng(number).integers(50, 300, SEQUENCE + 1)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": np.ones(SEQUENCE, np.float32),
            "position_ids": np.arange(SEQUENCE),
            "dataset_id": np.int64(0),
        }


def datasets(samples: Sequence[int]) -> tuple[Any, Any, Any]:
    train, valid, _ = samples
    return Counting(train), Counting(valid), None


def poor() -> None:
    """Have the keeper of snapshots be one of a machine with little memory."""
    command = boot.command
    vars(boot)["command"] = lambda python, _, *args: command(
        python, "tests.elastic.checkpoint.poor_keeper", *args
    )


if __name__ == "__main__":
    if "AVAILABLE" in os.environ:
        poor()
    pretrain(datasets, model_provider, None, forward_step)

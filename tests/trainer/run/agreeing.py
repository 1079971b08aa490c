"""`python -m tests.trainer.run.agreeing FOLDER`: ranks that are told the same, and some that are not."""

import time

import torch
import torch.distributed as dist

from elastic.proto.errors import CheckpointDamaged, UsageError
from elastic.trainer.run import state
from tests.trainer.forks import main
from tests.trainer.run import reported

SIZES = {
    "alike": 2,
    "other data": 3,
    "another processor": 2,
    "another clock": 3,
    "damage": 2,
    "reports": 3,
}


def load(damaged: int | None) -> tuple[int, str] | int:
    """What comes of a load in which one rank finds damage."""

    def load() -> int:
        if dist.get_rank() == damaged:
            raise CheckpointDamaged("a bit", older=2)
        return 3

    try:
        return state._alike(load)
    except CheckpointDamaged as error:
        return error.older or 0, error.what


def find(name: str) -> object:
    """What a rank hears."""
    if name == "another clock":
        time.time = lambda: 100.5 - dist.get_rank()
        return state.job()
    if name == "reports":
        return reported.heard()
    if name == "damage":
        return [load(damaged) for damaged in (None, 1)]
    data = f"node {dist.get_rank() > 1}" if name == "other data" else "one"
    processor = f"cpu {dist.get_rank()}" if name == "another processor" else "cpu"
    told = {"seed": 1, "data": data, "batch_sizes": [[0, 8]], "device": processor}
    try:
        state.agree(told, torch.device("cpu"))
    except UsageError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(SIZES, find)

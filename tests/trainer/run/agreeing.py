"""`python -m tests.trainer.run.agreeing FOLDER`: ranks that are told the same, and some that are not."""

import time

import torch
import torch.distributed as dist

from elastic.proto.errors import UsageError
from elastic.trainer.run import state
from tests.trainer.forks import main

SIZES = {"alike": 2, "other data": 3, "another processor": 2, "another clock": 3}


def find(name: str) -> object:
    """What a rank hears."""
    if name == "another clock":
        time.time = lambda: 100.5 - dist.get_rank()
        return state.job()
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

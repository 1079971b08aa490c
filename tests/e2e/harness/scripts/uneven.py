"""A rank whose state differs from that of others, without elastic-run.

    uneven.py FOLDER CASE

zero: DDP, and each of two ranks' optimizer has only every other parameter (ZeRO-1 by hand). names: DDP under
another name on each rank. `load` after it: what was saved is loaded and compared with what was computed.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.checkpoint import Checkpointer
from elastic.proto.errors import CheckpointError

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])
STEPS = 3


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    ddp = DistributedDataParallel(model)
    if CASE == "names":
        return {f"model of {RANK}": ddp}
    own = [*model.parameters()][RANK::2]
    return {"model": ddp, "optimizer": torch.optim.Adam(own, lr=0.1)}


def train(state: dict[str, Any], step: int) -> None:
    """The owner of a parameter tells the other what it is."""
    ddp = next(iter(state.values()))
    ddp(torch.full((2, 4), float(step))).sum().backward()
    if "optimizer" in state:
        state["optimizer"].step()
    for number, parameter in enumerate(ddp.parameters()):
        dist.broadcast(parameter.detach(), number % 2)
        parameter.grad = None


def bits(state: dict[str, Any]) -> list[list[float]]:
    tensors = [*next(iter(state.values())).parameters()]
    if "optimizer" in state:
        found = state["optimizer"].state
        tensors += [
            value
            for p in state["optimizer"].param_groups[0]["params"]
            for value in found[p].values()
        ]
    return [tensor.detach().flatten().tolist() for tensor in tensors]


def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    dist.init_process_group("gloo")
    truth = made()
    for step in range(1, STEPS + 1):
        train(truth, step)
    with Checkpointer(FOLDER / "checkpoint") as checkpoint:
        if sys.argv[3:] == ["load"]:
            state = made()
            step = checkpoint.load(state)
            print("loaded", step, bits(state) == bits(truth), flush=True)
            return
        assert checkpoint.load(truth) == 0
        for step in range(STEPS, STEPS + 2):
            checkpoint.save(step, truth, persist=True)
            try:
                checkpoint.wait(120)
                print("kept", step, flush=True)
            except CheckpointError as error:
                print(error, flush=True)


main()
dist.destroy_process_group()  # with no model left; see examples/plain.py

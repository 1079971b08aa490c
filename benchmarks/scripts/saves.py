"""A rank with a model and AdamW of its own, saved by `Checkpointer` or by DLRover's `DdpCheckpointer` to
memory; appends what a save costs to $BENCH_OUT/figures, a line of JSON each."""

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["BENCH_OUT"])
PARAMETERS = 32
EVERY = 4
SAVES = 6
Save = Callable[[int], None]


def tell(measure: str, value: float, unit: str) -> None:
    line = {"measure": measure, "value": value, "unit": unit}
    with open(FOLDER / "figures", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def elastic(state: dict[str, Any]) -> Save:
    from elastic.checkpoint import Checkpointer

    checkpoint = Checkpointer(FOLDER / "checkpoint")
    checkpoint.load(state)
    checkpoint.save(1, state)  # says how much memory it takes
    checkpoint.wait_ready(every=True)
    return lambda step: checkpoint.save(step, state)


def dlrover(state: dict[str, Any]) -> Save:
    ddp = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
    ranks = dist.get_world_size()
    checkpointer = ddp.DdpCheckpointer(
        str(FOLDER / "checkpoint"), local_shard_num=ranks, global_shard_num=ranks
    )

    def save(step: int) -> None:
        told = {name: part.state_dict() for name, part in state.items()} | {"step": step}
        if checkpointer.save_checkpoint(step, told, storage_type=ddp.StorageType.MEMORY) is False:
            raise SystemExit(f"step {step} was not saved")

    return save


def together() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


class Training:
    """Steps of matrix products and a fused AdamW."""

    def __init__(self, gib: float, device: torch.device, products: int) -> None:
        side = int((gib * (1 << 30) / 12 / PARAMETERS) ** 0.5)
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((side, side), float(n + 1), device=device))
            for n in range(PARAMETERS)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, None)
        self._a = torch.randn(size, size, device=device, dtype=dtype)
        self._products = products
        self.step = 0

    def steps(self, count: int, save: Save | None = None) -> tuple[float, list[float]]:
        """Seconds of so many, all told; and of the calls of `save`, after every fourth."""
        calls = []
        together()
        begin = time.perf_counter()
        for number in range(count):
            for _ in range(self._products):
                torch.mm(self._a, self._a)
            self.optimizer.step()
            self.step += 1
            if save is not None and number % EVERY == 0:
                at = time.perf_counter()
                save(self.step)
                calls.append(time.perf_counter() - at)
        if self._a.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--products",
        type=int,
        help="of a step: 200 of 256 x 256 on a CPU, 100 of 8192 x 8192 on a GPU",
    )
    parser.add_argument("--by", choices=("elastic", "dlrover"), required=True)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    training = Training(args.gib, device, args.products or (100 if cuda else 200))
    training.steps(1)
    state = {"model": training.model, "optimizer": training.optimizer}
    save = {"elastic": elastic, "dlrover": dlrover}[args.by](state)
    _, (first,) = training.steps(1, save)
    tell("the first save", first, "s")
    training.steps(EVERY * SAVES, save)  # every slot has been written
    for _ in range(3):
        plain, _ = training.steps(EVERY * SAVES)
        saved, calls = training.steps(EVERY * SAVES, save)
        tell("time added a save, every 4 steps", 1e3 * (saved - plain) / SAVES, "ms")
        for seconds in calls:
            tell("of it in the call", 1e3 * seconds, "ms")
    dist.destroy_process_group()
    os._exit(0)  # DLRover's threads would keep it


if __name__ == "__main__":
    main()

"""A rank that trains by DDP on a GPU: products of matrices forward and backward, and a few gradients to send.

    slow_gpus.py FOLDER ROWS PRODUCTS

Ranks share GPUs where there are more of them, and then talk over Gloo. A file "fault-RANK" in FOLDER makes the rank
slow while it is there: {"products": N} more of them, {"sleep": SECONDS} of its host before each step. A file named
"finish" ends it.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER, ROWS, PRODUCTS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
RANK, ROUND, WORLD = (int(os.environ[name]) for name in ("RANK", "ELASTIC_ROUND", "WORLD_SIZE"))
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
SHARED = torch.cuda.device_count() < WORLD
WIDTH = 4096
FAULT = FOLDER / f"fault-{RANK}"


def tell(kind: str, **fields: object) -> None:
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(FOLDER / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def fault() -> dict[str, float]:
    """Written whole, by a rename."""
    try:
        found: dict[str, float] = json.loads(FAULT.read_text())
        return found
    except FileNotFoundError:
        return {}


class Model(torch.nn.Module):
    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, WIDTH)
        self.register_buffer("factor", torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, batch: torch.Tensor, products: int) -> torch.Tensor:
        value: torch.Tensor = self.first(batch)
        for _ in range(products):
            value = value @ self.factor
        return value.float().square().mean()


def main() -> None:
    tell("start")
    torch.cuda.set_device(DEVICE)
    if SHARED:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=DEVICE)
    inner = Model().to(DEVICE, torch.bfloat16)
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    optimizer = torch.optim.SGD(inner.parameters(), lr=1e-6)
    batch = torch.randn(ROWS, 64, device=DEVICE, dtype=torch.bfloat16)
    finish = torch.zeros(1, device=DEVICE)
    for step in range(1 << 20):
        slow = fault()
        time.sleep(slow.get("sleep", 0.0))
        optimizer.zero_grad()
        model(batch, PRODUCTS + int(slow.get("products", 0))).backward()
        optimizer.step()
        finish[0] = float((FOLDER / "finish").exists())
        dist.all_reduce(finish)
        done = bool(finish[0])
        tell("step", step=step)
        if done:
            break
    dist.destroy_process_group()
    tell("end")


main()

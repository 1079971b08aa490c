"""A rank that trains by DDP over Gloo: a sleep, as a host that waits for its device, and work for a core.

    stragglers.py FOLDER SLEEP_SECONDS PRODUCTS PARAMETERS

A step multiplies PRODUCTS matrices of 128 x 128 and sends the gradients of some PARAMETERS. A file named "finish"
in FOLDER ends it.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER, SLEEP, PRODUCTS, PARAMETERS = (
    Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]),
)  # fmt: skip
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["ELASTIC_ROUND"])


def tell(kind: str, **fields: object) -> None:
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(FOLDER / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def main() -> None:
    tell("start")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(128, max(1, PARAMETERS // 128)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    factor = torch.randn(128, 128)
    finish = torch.zeros(1)
    for step in range(1 << 20):
        time.sleep(SLEEP)
        for _ in range(PRODUCTS):
            batch = factor @ factor
        optimizer.zero_grad()
        model(batch[:4]).sum().backward()
        optimizer.step()
        finish[0] = float((FOLDER / "finish").exists())
        dist.all_reduce(finish)
        tell("step", step=step)
        if finish[0]:
            break
    # Else DDP's C++ is the last to let go of the group, and waits for its threads with the GIL, which they may want.
    del model, optimizer
    dist.destroy_process_group()
    tell("end")


main()

"""A tiny DDP model that notes the moment each step is finished. Imports nothing of ours.

Each event is one line in the file `$BENCH_OUT/events`, appended in one write:
`kind monotonic-seconds node rank pid world-size step`. CLOCK_MONOTONIC is one clock for a host.
"""

import os
import time

EVENTS = os.open(
    os.path.join(os.environ["BENCH_OUT"], "events"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
)


def note(kind: str, step: int) -> None:
    """Append one event."""
    names = (os.environ.get("BENCH_NODE", "0"), os.environ["RANK"])
    fields = (kind, repr(time.monotonic()), *names, os.getpid(), os.environ["WORLD_SIZE"], step)
    os.write(EVENTS, (" ".join(map(str, fields)) + "\n").encode())


note("start", -1)  # the first line that a new rank runs, before any import that costs

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hold-gib", type=float, default=0.0, help="device memory a rank holds")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds a step lasts at least")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    held = torch.empty(int(args.hold_gib * 2**30), dtype=torch.uint8, device=device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    note("ready", int(held.numel() > 0))
    step = 0
    while True:
        optimizer.zero_grad()
        loss = model(torch.ones(8, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()  # the device has finished
        note("step", step)
        step += 1
        time.sleep(args.pause)


if __name__ == "__main__":
    main()

"""A rank with its part of a sharded state, saved at every step; it notes events as `steps.py` does, and with
`loaded` the step, with `read` how many bytes lie in the files of the checkpoint that the load has opened."""

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


note("start", -1)

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from elastic.checkpoint import Checkpointer

TENSORS = 8
PERSIST_EVERY = 5
PATH = Path(os.environ["BENCH_OUT"], "checkpoint")


class Opened:
    """Bytes of the files of the checkpoint that this process opens, however much of them is read."""

    def __init__(self) -> None:
        self.bytes = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            path = Path(args[0])
            if path.is_relative_to(PATH) and path.is_file():
                self.bytes += path.stat().st_size


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1e9 / (1 << 30), help="state of a node")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = [torch.zeros(int(args.gib * (1 << 30)) // TENSORS // 4) for _ in range(TENSORS)]
    state = {f"w{k}": DTensor.from_local(parts[k], mesh, [Shard(0)]) for k in range(TENSORS)}
    opened = Opened()
    with Checkpointer(PATH, persist_every=PERSIST_EVERY) as checkpoint:
        step = checkpoint.load(state)
        note("read", opened.bytes)
        note("loaded", step)
        for k, part in enumerate(parts):
            if not part.eq(step * (k + 1)).all():
                raise SystemExit(f"w{k} is not what it was at step {step}")
        while True:
            for k, part in enumerate(parts):
                part += k + 1
            time.sleep(args.step_s)
            dist.barrier()
            step += 1
            checkpoint.save(step, state)
            note("step", step)


if __name__ == "__main__":
    main()

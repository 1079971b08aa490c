"""On a GPU: phases add up to the clock's steps, and memory that runs out leaves its history and a line.

`python -m tests.trainer.watch.gpu FOLDER` prints what it found as JSON.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch

from elastic.trainer.watch import flops, memory, phases


def follow(folder: Path) -> dict[str, float]:
    """Steps of products, copies and waits of the host; seconds by phase, and by the host's clock."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    host = torch.randn(64, 2**20).pin_memory()
    with contextlib.closing(phases.clock(folder, 0, cuda=True)) as clock:
        began = 0.0
        for step in range(1, 23):
            if step == 3:  # the first ones load kernels
                torch.cuda.synchronize()
                clock.take()
                began = time.perf_counter()
            clock.begin(step)
            with clock.inside("data"):
                batch = host.to("cuda", non_blocking=True)
                sum(range(200_000))  # the host is busy
            with clock.inside("forward"):
                b = a @ a
            with clock.inside("backward"):
                b = b @ a @ a @ a
            with clock.inside("optimizer"):
                batch.add_(b.float().mean())
        clock.switch("log")
        found = clock.take()
        return found | {"wall": (time.perf_counter() - began) / 20}


def run_out(folder: Path) -> dict[str, object]:
    """Until the device is full, in a world where that is said."""
    path = folder / "snapshot.pickle"
    kept = []
    try:
        with memory.recorded(path, 0):
            while True:
                kept.append(torch.empty(2**33, dtype=torch.uint8, device="cuda"))
    except RuntimeError as error:
        found = memory.of_device(torch.device("cuda"))
        line = memory.explained(error, where="rank 0", memory=found, advice=["x"], saved=True)
        return {
            "line": str(line),
            "ran_out": memory.ran_out(error),
            "bytes": path.stat().st_size,
            "ooms": found and found.ooms,
        }
    raise AssertionError("a device without end")


def main() -> None:
    folder = Path(sys.argv[1])
    name = torch.cuda.get_device_name()
    found = {"device": name, "peak": flops.peak(name), "phases": follow(folder), **run_out(folder)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

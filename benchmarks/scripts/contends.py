"""Has a GPU for a part of the time, in turns of some milliseconds: `python -m benchmarks.scripts.contends DEVICE PART`."""

import sys
import time

import torch

PERIOD = 0.05
"""Seconds."""
CYCLES = 100_000_000
"""For which it is first kept busy, to see how many there are in a second."""


def main() -> None:
    device, part = torch.device("cuda", int(sys.argv[1])), float(sys.argv[2])
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    began = time.monotonic()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    cycles = CYCLES / (time.monotonic() - began)
    print("it has begun", flush=True)
    while True:
        began = time.monotonic()
        torch.cuda._sleep(int(cycles * part * PERIOD))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        time.sleep(max(0.0, PERIOD - (time.monotonic() - began)))


main()

"""A process that shares a GPU with others: `competing.py load|steps DEVICE ROWS PRODUCTS`.

load: a line on stdin says which part of the time it is to keep the GPU busy, in bursts, a hundred a second; 0 at first.
steps: a line on stdin makes it take forward and backward passes as slow_gpus.py does, and print the median of their
milliseconds. Both begin with a line, once they are ready, and end with stdin.
"""

import select
import statistics
import sys
import time

import torch

MODE, DEVICE, ROWS, PRODUCTS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
PERIOD = 0.01
WIDTH, SIZE = 4096, 2048
STEPS = 40


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def products(factor: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(factor, factor)
    torch.cuda.synchronize()


def load() -> None:
    factor = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    products(factor, 200)
    began = time.monotonic()
    products(factor, 1000)
    one = (time.monotonic() - began) / 1000
    say("ready")
    share, due = 0.0, time.monotonic()
    while True:
        due = max(due + PERIOD, time.monotonic())
        if share:
            products(factor, max(1, round(share * PERIOD / one)))
        pause = max(0.0, due - time.monotonic()) if share else None
        if select.select([sys.stdin], [], [], pause)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            share = float(line)
            say("ready")


def steps() -> None:
    factor = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / WIDTH**0.5
    batch = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    say("ready")
    while sys.stdin.readline():
        took = []
        for _ in range(STEPS):
            began = time.monotonic()
            value = batch
            for _ in range(PRODUCTS):
                value = value @ factor
            torch.autograd.backward(value.float().square().mean())
            batch.grad = None
            torch.cuda.synchronize()
            took.append(time.monotonic() - began)
        say(f"{1000 * statistics.median(took[STEPS // 4 :]):.4f}")


torch.cuda.set_device(DEVICE)
{"load": load, "steps": steps}[MODE]()

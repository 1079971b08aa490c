"""Microseconds of an optimizer's step that has hardly anything to do: the least of several means."""

import time

import torch

STEPS, TIMES = 20_000, 7


def mean(optimizer: torch.optim.Optimizer) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    return (time.perf_counter() - began) / STEPS * 1e6


parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
sgd = torch.optim.SGD([parameter], lr=0.0)
mean(sgd)
print(f"{min(mean(sgd) for _ in range(TIMES)):.2f}")

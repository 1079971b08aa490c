"""A small training script that fails as it is told to: what the corpus is recorded from.

`train.py FAULT [--on RANK] [--step N] [--linger S] [--timeout S] [--alone] [--variant V]`. The
faults are the functions of faults_*.py beside it. `--linger`: the failing rank closes its process
group, then takes so long to exit, so that its peers' complaints are heard first.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

MODULES = ("faults_python", "faults_data", "faults_system", "faults_group", "faults_device")


def find(name: str) -> object:
    for module in MODULES:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise SystemExit(f"there is no fault {name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("--on", type=int, default=0)
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--linger", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=30.0)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--variant", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    return parser.parse_args()


@contextlib.contextmanager
def closing(linger: float) -> Iterator[None]:
    """As scripts do that end their process group and flush their logs whatever happens."""
    import torch.distributed as dist

    try:
        yield
    finally:
        if linger and dist.is_initialized():
            dist.destroy_process_group()
        time.sleep(linger)


def enter_network() -> None:
    """The network namespace of our node, where it has one."""
    path = os.environ.get("ELASTIC_TEST_NETWORK")
    if path:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(path) as namespace:
            assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def main() -> None:
    args = arguments()
    enter_network()
    rank = int(os.environ["RANK"])
    fault = find(args.fault)
    assert callable(fault)
    here = rank == args.on
    if args.step < 0:  # before anything else
        if here:
            fault(args)
        sys.stdout.write("ready\n")
    if args.alone:
        fault(args)
        return
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if args.device == "cuda":  # ranks of several nodes share one machine
        backend = "nccl"
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(args.linger if here else 0.0):
        for step in range(40):
            if step == args.step and (here or getattr(fault, "everywhere", False)):
                fault(args)
            loss = model(torch.randn(args.batch_size, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""`python -m benchmarks.replicas`: what it takes to compare two replicas bit for bit, beside a step.

Of small GPTs in two Gloo processes of one thread each, or (`--device cuda`) of 125M and 1.3B on two GPUs, for ZeRO 0 and
1: milliseconds of a step and of a check, medians of interleaved ones, and bytes that are looked at and that each rank sends.
"""

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from elastic import replicas
from elastic.data import Leaves
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Layout, lay_out
from elastic.trainer.run.replicas import Replicas
from elastic.trainer.run.step import Share, Stepper
from tests.trainer.model.shapes import GPT2
from tests.trainer.program import batch, forward_step

RANKS = 2
ROUNDS = 15
LEAVES = Leaves(batch_size=4, leaf_size=2)
SHAPES = {
    "cpu": [
        replace(GPT2, hidden_size=64, ffn_hidden_size=256),
        replace(GPT2, hidden_size=256, ffn_hidden_size=1024),
    ],
    "cuda": [
        GPTConfig(num_layers=n, hidden_size=size, num_attention_heads=size // 64, seq_length=2048, vocab_size=50304)
        for n, size in ((12, 768), (24, 2048))
    ],
}  # fmt: skip
NUMBERS = 2
"""Of 64 bits, that a rank sends for a check, and one more: whether it has something to say."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    kind = parser.parse_args().device
    torch.set_num_threads(1)
    print(
        "| hidden | ZeRO | parameters | step | check | part of a step | looked at | sent by a rank |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for config in SHAPES[kind]:
        for zero in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                pids = [_start(rank, Path(folder), kind, config, zero) for rank in range(RANKS)]
                if any(os.waitpid(pid, 0)[1] for pid in pids):
                    raise SystemExit("a rank failed")


def _start(rank: int, folder: Path, kind: str, config: GPTConfig, zero: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        store = FileStore(str(folder / "store"), RANKS)
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
        _measure(config, zero, device)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _measure(config: GPTConfig, zero: int, device: torch.device) -> None:
    laid = lay_out(
        config, Layout(zero=zero), make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=LEAVES.leaf_size, leaves=LEAVES.count, seed=1, device=device,
    )  # fmt: skip
    initialize(laid.model, config, 1, 0.02)
    stepper = Stepper(laid, leaf_tokens=LEAVES.leaf_size * config.seq_length)
    adam = torch.optim.AdamW(laid.model.parameters(), lr=1e-3)
    compared = Replicas(laid, adam, None, zero=zero, interval=1)
    leaves = LEAVES.of(0, laid.place.dp, laid.grid.dp)
    shape = (sum(len(leaf.places) for leaf in leaves), config.seq_length + 1)
    made = batch(torch.randint(config.vocab_size, shape))
    mine = Share(leaves, {name: tensor.to(device) for name, tensor in made.items()})

    def step() -> None:
        stepper.clip(stepper.accumulate(mine, LEAVES), LEAVES, 1.0)
        adam.step()
        adam.zero_grad()

    steps, checks = [], []
    for number in range(ROUNDS):
        steps.append(_seconds(step, device))
        checks.append(_seconds(partial(compared.check, number), device))
    if dist.get_rank() == 0:
        held = replicas.tensors(laid.model, adam if zero == 0 else None)
        numel = sum(one.numel() for one in held.values())
        count = sum(one.numel() for one in laid.model.parameters())
        looked = numel * (4 if zero == 0 else 2)  # what is gathered is bf16
        a_step, a_check = median(steps[1:]), median(checks[1:])
        print(
            f"| {config.hidden_size} | {zero} | {count} | {a_step * 1e3:.1f} ms | {a_check * 1e3:.2f} ms | {a_check / a_step:.2f} | "
            f"{looked} B | {8 * (NUMBERS + 1)} B |",
            flush=True,
        )


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    _finish(device)
    began = time.perf_counter()
    act()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""`python -m benchmarks.replicas`: what it takes to compare two replicas bit for bit, beside a step, on CPUs.

Of a small GPT in two Gloo processes of one thread each, for ZeRO 0 and 1: seconds of a step and of a check, medians of
interleaved ones, and bytes that are looked at and that each rank sends.
"""

import os
import tempfile
import time
from collections.abc import Callable
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
from elastic.trainer.run.step import Stepper
from tests.trainer.model.shapes import GPT2
from tests.trainer.program import forward_step
from tests.trainer.run.worlds import share

RANKS = 2
ROUNDS = 15
LEAVES = Leaves(batch_size=4, leaf_size=2)
NUMBERS = 2
"""Of 64 bits, that a rank sends for a check, and one more: whether it has something to say."""


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| hidden | ZeRO | parameters | step | check | part of a step | looked at | sent by a rank |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for hidden in (64, 256):
        for zero in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                pids = [_start(rank, Path(folder), hidden, zero) for rank in range(RANKS)]
                if any(os.waitpid(pid, 0)[1] for pid in pids):
                    raise SystemExit("a rank failed")


def _start(rank: int, folder: Path, hidden: int, zero: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        store = FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        _measure(hidden, zero)
        code = 0
    finally:
        os._exit(code)


def _measure(hidden: int, zero: int) -> None:
    fields = {name: getattr(GPT2, name) for name in GPTConfig.__dataclass_fields__}
    config = GPTConfig(**fields | {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden})
    laid = lay_out(
        config, Layout(zero=zero), make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, config, 1, 0.02)
    stepper = Stepper(laid, leaf_tokens=2 * config.seq_length)
    adam = torch.optim.AdamW(laid.model.parameters(), lr=1e-3)
    compared = Replicas(laid, adam, None, zero=zero, interval=1)
    mine = share(LEAVES.of(0, laid.place.dp, laid.grid.dp))

    def step() -> None:
        stepper.clip(stepper.accumulate(mine, LEAVES), LEAVES, 1.0)
        adam.step()
        adam.zero_grad()

    steps, checks = [], []
    for number in range(ROUNDS):
        steps.append(_seconds(step))
        checks.append(_seconds(lambda number=number: compared.check(number)))  # type: ignore[misc]
    if dist.get_rank() == 0:
        held = replicas.tensors(laid.model, adam if zero == 0 else None)
        numel = sum(one.numel() for one in held.values())
        count = sum(one.numel() for one in laid.model.parameters())
        looked = numel * (4 if zero == 0 else 2)  # what is gathered is bf16
        a_step, a_check = median(steps[1:]), median(checks[1:])
        print(
            f"| {hidden} | {zero} | {count} | {a_step * 1e3:.1f} ms | {a_check * 1e3:.2f} ms | {a_check / a_step:.2f} | "
            f"{looked} B | {8 * (NUMBERS + 1)} B |",
            flush=True,
        )


def _seconds(act: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

"""A rank that trains on nothing and saves with `Checkpointer`, and with DCP beside it; appends what it
measured to FOLDER/figures, a line of JSON each. In its second life it loads what the first left.

A step is matrix products of `--step-ms` and a fused AdamW of `--gib` of state, as much as a real one.
"""

import argparse
import json
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

from elastic.checkpoint import Checkpointer
from elastic.checkpoint.save.saving import SnapshotPath

PARSER = argparse.ArgumentParser()
PARSER.add_argument("folder", type=Path)
PARSER.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
PARSER.add_argument("--gib", type=float, default=11.5e9 / (1 << 30))
PARSER.add_argument("--step-ms", type=float, default=160.0)
PARSER.add_argument("--saves", type=int, default=6)
PARSER.add_argument("--dcp-saves", type=int, default=1)
PARSER.add_argument("--ways", default="shadow,stream,sync,dcp")
ARGS = PARSER.parse_args()
RANK, LOCAL, ROUND = (int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "ELASTIC_ROUND"))
CUDA = ARGS.device == "cuda"
DEVICE = torch.device("cuda", LOCAL) if CUDA else torch.device("cpu")
WAYS = ARGS.ways.split(",")
SNAPSHOTS: tuple[SnapshotPath, ...] = ("shadow", "stream", "sync")
MADV_POPULATE_WRITE = 23  # the mmap module names it from 3.14 on
PARAMETERS = 32


def tell(measure: str, who: str, value: float, unit: str) -> None:
    note(measure=measure, who=who, value=value, unit=unit)


def note(**line: object) -> None:
    line["rank"] = RANK
    with open(ARGS.folder / "figures", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def clock() -> float:
    """Seconds, once the device has done all that was asked of it."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Training:
    """Parameters, their optimizer's state, and steps that take as long as they should."""

    def __init__(self) -> None:
        side = int((ARGS.gib * (1 << 30) / 12 / PARAMETERS) ** 0.5)
        self.model = nn.ParameterList(
            nn.Parameter(torch.full((side, side), float(n + 1), device=DEVICE))
            for n in range(PARAMETERS)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        size = 8192 if CUDA else 256
        self._a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16 if CUDA else None)
        self._products = 1
        self.done = 0

    @property
    def bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters()) * 3

    def calibrate(self, seconds: float) -> None:
        """Have a step take that long."""
        self._products = 1
        self.steps(2)
        one = self.steps(3) / 3
        self._products = 33
        product = (self.steps(3) / 3 - one) / 32
        self._products = max(1, round(1 + (seconds - one) / max(product, 1e-6)))

    def steps(self, count: int, after: Callable[[int], None] | None = None) -> float:
        """Seconds that so many take; `after` is called with how many are done after each."""
        begin = clock()
        for _ in range(count):
            for _ in range(self._products):
                torch.mm(self._a, self._a)
            self.optimizer.step()
            self.done += 1
            if after is not None:
                after(self.done)
        return clock() - begin

    def agree(self) -> None:
        """Count on from the same number on every rank: a step is whole only if all save it."""
        done = torch.tensor([self.done])
        dist.all_reduce(done, dist.ReduceOp.MAX)
        self.done = int(done)

    def digest(self) -> float:
        state = self.optimizer.state
        return sum(
            float(t.double().sum()) for p in self.model.parameters()
            for t in (p.detach(), state[p]["exp_avg"], state[p]["exp_avg_sq"])
        )  # fmt: skip


def together() -> None:
    clock()
    dist.barrier()


def added(training: Training, steps: int, save: Callable[[int], None], end: Callable[[], None],
          every: int = 4) -> tuple[float, float]:  # fmt: skip
    """(seconds added a save, share of the time added). As many steps as between two saves follow the
    last one, so that what it does behind them is counted; then comes what it has not done by then."""
    together()
    plain = training.steps(steps + every)
    together()
    last = training.done + steps
    with_saves = training.steps(
        steps + every,
        lambda done: save(done) if (last - done) % every == 0 and done <= last else None,
    )
    begin = clock()
    end()
    over = with_saves + (clock() - begin)
    return (over - plain) / (steps // every), (over - plain) / plain


def saving(training: Training, checkpoint: Checkpointer) -> Callable[[int], None]:
    return lambda done: checkpoint.save(done, training.state)


def bandwidths(training: Training, checkpoint: Checkpointer, who: str) -> float:
    """Of a snapshot and of a copy into registered memory, all ranks at once; seconds of a snapshot."""
    seconds = 0.0
    pinned = torch.empty(1 << 30 if CUDA else 1 << 24, dtype=torch.uint8, pin_memory=CUDA)
    source = torch.zeros_like(pinned, device=DEVICE)
    for _ in range(3):
        together()
        begin = clock()
        for _ in range(10):
            pinned.copy_(source, non_blocking=True)
        tell(
            "device to host",
            "registered copy",
            10 * pinned.nbytes / (clock() - begin) / 1e9,
            "GB/s",
        )
        training.done += 1
        together()
        begin = clock()
        checkpoint.save(training.done, training.state)
        checkpoint.wait()
        seconds = clock() - begin
        tell("device to host, summed and committed", who, training.bytes / seconds / 1e9, "GB/s")
        if who == "shadow":  # the second save waits until the first one's shadow has been read
            training.done += 2
            together()
            checkpoint.save(training.done - 1, training.state)
            begin = clock()
            checkpoint.save(training.done, training.state)
            seconds_of_it = time.perf_counter() - begin
            tell("device to host", who, training.bytes / seconds_of_it / 1e9, "GB/s")
            checkpoint.wait()
    return seconds


def first_life(training: Training) -> None:
    path = ARGS.folder / "checkpoint"
    training.steps(3)
    training.calibrate(ARGS.step_ms / 1e3)
    plain = training.steps(10) / 10
    tell("step", "plain", plain * 1e3, "ms")
    fresh_pages(training.bytes)
    for way in SNAPSHOTS:
        if way in WAYS:
            with Checkpointer(path, snapshot=way) as checkpoint:
                begin = clock()
                become_ready(training, checkpoint, way, plain)
                costs(training, checkpoint, way, begin)
                training.calibrate(ARGS.step_ms / 1e3)
    with Checkpointer(path, snapshot="shadow") as checkpoint:
        training.agree()
        training.done += 1
        checkpoint.save(training.done, training.state, persist=False)
        checkpoint.wait_ready()
        training.done += 1
        checkpoint.save(training.done, training.state)
        checkpoint.wait()
        (ARGS.folder / f"left.{RANK}").write_text(f"{training.done} {training.digest()!r}")
        together()
        os.kill(os.getpid(), signal.SIGKILL)


def fresh_pages(size: int) -> None:
    """What the machine takes for pages of a slot's size, all ranks at once, with nothing of ours: a virtual
    machine that gets its memory as it touches it is slow the first time, whoever does it."""
    for times in ("the first time", "again"):
        together()
        begin = time.perf_counter()
        with mmap.mmap(-1, size) as pages:
            pages.madvise(mmap.MADV_HUGEPAGE)
            pages.madvise(MADV_POPULATE_WRITE)
            tell("as many bytes touched", times, time.perf_counter() - begin, "s")
        together()


def become_ready(
    training: Training, checkpoint: Checkpointer, way: SnapshotPath, plain: float
) -> None:
    """Train until snapshots are taken. plain: seconds that a step takes alone."""
    begin = clock()
    checkpoint.load(training.state)
    count, spent = 0, 0.0
    while not checkpoint.ready and CUDA:
        spent += training.steps(1)
        count += 1
    checkpoint.wait_ready()
    tell("ready after the first call", way, clock() - begin, "s")
    if count:
        tell("steps until ready", way, 100 * (spent / count / plain - 1), "% slower")
    training.agree()


def costs(training: Training, checkpoint: Checkpointer, way: SnapshotPath, begin: float) -> None:
    """Of saves, from the first on. begin: when memory began to be made."""
    for number in range(4):
        training.done += 1
        together()
        start = clock()
        checkpoint.save(training.done, training.state)
        checkpoint.wait()
        measure = "a later save to host memory" if number else "the first save to host memory"
        tell(measure, way, clock() - start, "s")
    checkpoint.wait_ready(every=True)
    tell("all slots after the first call, four saves included", way, clock() - begin, "s")
    for _ in range(2):
        save = saving(training, checkpoint)
        cost, _ = added(training, 4 * ARGS.saves, save, checkpoint.wait)
        tell("time added a save, every 4 steps", way, cost * 1e3, "ms")
    copied = bandwidths(training, checkpoint, way)
    for times, steps in ((10, 3), (1, 10)) if way != "sync" else ():
        training.calibrate(copied * times)
        save = saving(training, checkpoint)
        _, share = added(training, steps, save, checkpoint.wait, every=1)
        tell(f"every step saved, steps of {times} x the copy", way, share * 100, "% slower")


def beside_dcp(training: Training) -> None:
    pending: list[Any] = []

    def save(done: int) -> None:
        if pending:
            pending.pop().result()
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        pending.append(async_save({f"rank{RANK}": state}, checkpoint_id=ARGS.folder / "dcp"))

    cost, _ = added(training, 4 * ARGS.dcp_saves, save, lambda: pending.pop().result())
    tell("time added a save, every 4 steps", "DCP async_save", cost * 1e3, "ms")


def second_life(training: Training) -> None:
    together()
    begin = clock()
    with Checkpointer(ARGS.folder / "checkpoint", snapshot="shadow") as checkpoint:
        step = checkpoint.load(training.state)
        seconds = clock() - begin
        tell("load after SIGKILL, verified", "own memory", seconds, "s")
        left = (ARGS.folder / f"left.{RANK}").read_text().split()
        assert (str(step), repr(training.digest())) == (left[0], left[1])
        begin = clock()
        checkpoint.load(training.state)
        tell("load once more, verified", "own memory", clock() - begin, "s")
    if "dcp" in WAYS:
        training.calibrate(ARGS.step_ms / 1e3)
        beside_dcp(training)  # the last: it may take minutes
    note(over=True)


def main() -> None:
    if CUDA:
        torch.cuda.set_device(LOCAL)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    training = Training()
    if ROUND == 1:
        first_life(training)
    second_life(training)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a pipeline's ranks wait for one another, beside the formula of docs/trainer.md: `python -m benchmarks.bubble`.

Ranks are those of `elastic-run --nproc-per-node RANKS`, one a device, all of one pipeline. Forward and backward of steps of
more and more leaves are timed under each schedule, in turn, and the fastest of some rounds counts, since what else a machine
does is no waiting. What a leaf more takes under 1F1B, whose ranks wait equally
long whatever the leaves, is what a rank computes for one; what a step takes beyond that for its leaves is waiting.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.memory import forward_step
from benchmarks.table import heading
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Layout, lay_out
from elastic.trainer.parallel.zero_bubble import LOSS_IN_ONE
from elastic.trainer.world import World, joined

SMALL = GPTConfig(
    num_layers=8, hidden_size=256, num_attention_heads=4, seq_length=128, vocab_size=128
)
LARGE = GPTConfig(
    num_layers=16, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=128
)
"""Their words are few, so that the last stage takes as long as another."""
LEAF = 4
"""Samples of a leaf."""
TIMES = (1, 2, 4, 8)
"""Leaves of a step, times the pipeline's ranks."""


@dataclass(frozen=True, slots=True)
class Case:
    layout: Layout
    leaves: int
    """Of a step."""

    @property
    def formula(self) -> float:
        """How much longer a step takes than a rank is busy, as docs/trainer.md has it."""
        pp, virtual, leaves = self.layout.pp, self.layout.virtual, self.leaves
        if self.layout.schedule != "zero-bubble":
            return (pp - 1) / (virtual * leaves)
        if not LOSS_IN_ONE:
            return (pp - 1) / (3 * virtual * leaves)
        if virtual == 1:
            return (2 * pp - 1) / (3 * leaves)
        return (pp + (pp - 1) * leaves / pp) / (3 * virtual * leaves)


def cases(pp: int, compute: torch.dtype) -> list[Case]:
    base = Layout(pp=pp, exact=False, compute=compute)
    layouts = [
        base,
        replace(base, schedule="gpipe"),
        replace(base, schedule="interleaved", virtual=2),
        replace(base, schedule="zero-bubble"),
        replace(base, schedule="zero-bubble", virtual=2),
    ]
    return [Case(layout, times * pp) for layout in layouts for times in TIMES]


def prepared(config: GPTConfig, case: Case, device: torch.device) -> Callable[[], None]:
    """Forward and backward of a step of it."""
    laid = lay_out(
        config, case.layout, make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=LEAF, leaves=case.leaves, seed=1, device=device,
    )  # fmt: skip
    initialize(laid.model, config, 1, 0.02)
    size = LEAF * case.leaves, config.seq_length + 1
    drawn = torch.randint(config.vocab_size, size, device=device)
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    mask = torch.ones_like(labels, dtype=torch.float32)
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    weights = torch.ones(case.leaves, device=device)

    def step() -> None:
        laid.gradients.begin()
        laid.runner.run(batch, weights, None)
        laid.runner.zero_grad()

    return step


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began


def measured(world: World, rounds: int) -> None:
    """Print a row a case."""
    on_gpu = world.device.type == "cuda"
    torch.set_num_threads(1)
    config = LARGE if on_gpu else SMALL
    found = cases(world.size, torch.bfloat16 if on_gpu else torch.float32)
    steps = [prepared(config, case, world.device) for case in found]
    seconds: list[list[float]] = [[] for _ in found]
    for number in range(rounds + 1):
        for step, own in zip(steps, seconds, strict=True):
            took = timed(step, world.device)
            if number:  # the first loads kernels and takes memory
                own.append(took)
    if world.is_first:
        _tell(found, [min(own) for own in seconds])


def _tell(found: Sequence[Case], seconds: Sequence[float]) -> None:
    once = [
        (case.leaves, took)
        for case, took in zip(found, seconds, strict=True)
        if case.layout.schedule == "1f1b"
    ]
    leaf = statistics.linear_regression(*zip(*once, strict=True)).slope
    print(f"a rank computes {1e3 * leaf:.2f} ms for a leaf")
    print(f"{'schedule':<14}{'stages':>7}{'leaves':>8}{'step ms':>10}{'waits':>9}{'formula':>9}")
    for case, took in zip(found, seconds, strict=True):
        waits = took / (leaf * case.leaves) - 1
        print(
            f"{case.layout.schedule:<14}{case.layout.virtual:>7}{case.leaves:>8}{1e3 * took:>10.1f}"
            f"{waits:>9.1%}{case.formula:>9.1%}"
        )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bubble", description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--be-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be_rank:
        with joined() as world:
            measured(world, args.rounds)
        return 0
    print(heading(), flush=True)
    launcher = ["-m", "elastic.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command = [sys.executable, *launcher, "-m", "benchmarks.bubble", "--be-rank", *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

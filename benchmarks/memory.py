"""Peak memory of a step beside the formula (`trainer/parallel/footprint.py`): `python -m benchmarks.memory`.

Ranks are those of `elastic-run --nproc-per-node RANKS`, one a device. Each layout runs two steps of two leaves, of
four where two ranks are a pipeline; its row is that of the rank which is furthest from the formula. Without GPUs the
peak is what the profiler tells of the CPU's allocator, of a smaller model, and what is no pipeline is one rank of a
world that only it believes in: Gloo's threads let go of what they reduced when they like.
"""

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.data import Leaves
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.parallel.footprint import Footprint, footprint
from elastic.trainer.parallel.layout import Layout, lay_out
from elastic.trainer.parallel.program import Batch, LossFunction
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run.step import Share, Stepper
from elastic.trainer.world import World, joined

SMALL = GPTConfig(
    num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=256, vocab_size=2048
)
LARGE = GPTConfig(
    num_layers=12, hidden_size=1024, num_attention_heads=16, seq_length=2048, vocab_size=50304
)
LEAF, LEAVES = 8, 2
"""Samples of a leaf; leaves of a step, times the pipeline's ranks."""
WITHIN = 0.08
"""How far the formula may be off, relatively."""
RECOMPUTE = {
    "": Recompute(), "-selective": Recompute(granularity="selective"),
    "-full": Recompute(granularity="full"),
}  # fmt: skip


def layouts(ranks: int, *, compiled: bool) -> Iterator[tuple[str, Layout]]:
    """ZeRO x recompute x sequence parallelism, exact and fast, eager and compiled; and pipelines."""
    for exact, compile_ in product((True, False), (False, True) if compiled else (False,)):
        kind = f"{'exact' if exact else 'fast'}{'-compiled' if compile_ else ''}"
        base = Layout(exact=exact, compile=compile_)
        for (again, recompute), stage in product(RECOMPUTE.items(), range(4)):
            layout = replace(base, recompute=recompute, zero=stage)
            yield f"{kind}-zero{stage}{again}", layout
            if ranks % 2 == 0:
                layout = replace(layout, tp=2)
                yield f"{kind}-tp2-zero{stage}{again}", layout
                yield f"{kind}-tp2-sp-zero{stage}{again}", replace(layout, sequence=True)
        if ranks % 2 == 0:
            yield f"{kind}-pp2", replace(base, pp=2)
            yield f"{kind}-pp2-gpipe", replace(base, pp=2, schedule="gpipe")
            for virtual, schedule in product((1, 2), ("interleaved", "zero-bubble")):
                if not (compile_ and schedule == "zero-bubble"):
                    layout = replace(base, pp=2, virtual=virtual, schedule=schedule)  # type: ignore[arg-type]
                    yield f"{kind}-pp2-{schedule}-{virtual}", layout


def measured(config: GPTConfig, layout: Layout, device: torch.device) -> tuple[int, Footprint]:
    """What this rank's device had at the most, in bytes, and what the formula says of it."""
    torch.compiler.reset()
    laid, count = None, LEAVES * layout.pp

    def steps() -> None:
        nonlocal laid
        laid = lay_out(
            config, layout, make=lambda part: GPT(config, part.tp, part.layers),
            forward_step=forward_step, leaf_size=LEAF, leaves=count, seed=1, device=device,
        )  # fmt: skip
        initialize(laid.model, config, 1, 0.02)
        stepper = Stepper(laid, leaf_tokens=LEAF * config.seq_length)
        adam = optimizers.build(laid.model, betas=(0.9, 0.95), eps=1e-8)
        leaves = Leaves(batch_size=LEAF * count * laid.grid.dp, leaf_size=LEAF)
        mine = leaves.of(0, laid.place.dp, laid.grid.dp)
        drawn = torch.randint(
            config.vocab_size, (LEAF * count, config.seq_length + 1), device=device
        )
        tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        mask = torch.ones_like(labels, dtype=torch.float32)
        batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        for _ in range(2):
            sums = stepper.accumulate(Share(mine, batch), leaves)
            stepper.clip(sums, leaves, 1.0)
            optimizers.set_rates(adam, 1e-4, 0.1)
            adam.step()
            adam.zero_grad()

    peak = _peak(steps, device)
    assert laid is not None
    return peak, footprint(
        config, layout, laid.grid, laid.place, leaf_size=LEAF, leaves=count,
        keeps_sent=device.type == "cpu",
    )  # fmt: skip


def _peak(function: Callable[[], None], device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, LossFunction]:
    one = next(batches)
    mask = one["loss_mask"]

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return (losses * mask).sum(), mask.sum(), {}

    return model(one["tokens"], None, None, labels=one["labels"], loss_mask=mask), loss


def rows(world: World, match: str) -> Iterator[dict[str, Any]]:
    """One a layout, on rank 0; all ranks take part."""
    on_gpu = world.device.type == "cuda"
    for name, layout in layouts(world.size, compiled=on_gpu):
        if match not in name or not (on_gpu or layout.pp > 1):
            continue
        own = row(name, LARGE if on_gpu else SMALL, layout, world.device)
        all_ranks: list[Any] = [None] * world.size
        dist.all_gather_object(all_ranks, own)
        if world.is_first:
            yield max(all_ranks, key=lambda row: abs(off(row)))


def alone(ranks: int, match: str) -> Iterator[dict[str, Any]]:
    """One a layout without a pipeline, on a CPU."""
    for name, layout in layouts(ranks, compiled=False):
        if match in name and layout.pp == 1:
            believe_in(ranks)
            yield row(name, SMALL, layout, torch.device("cpu"))


def believe_in(size: int) -> None:
    """Be rank 0 of so many, of which the others take and give nothing."""
    if dist.is_initialized() and dist.get_world_size() != size:
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def row(name: str, config: GPTConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """This rank's of one layout."""
    peak, said = measured(config, layout, device)
    return {"name": name, "peak": peak, "formula": said.total, "parts": asdict(said)}


def off(row: dict[str, Any]) -> float:
    """How much more the formula says, relatively."""
    return float(row["formula"] / row["peak"] - 1)


def told(found: Iterator[dict[str, Any]], out: Path | None) -> float:
    """Print each; how far the formula is off at the most."""
    worst = 0.0
    for one in found:
        worst = max(worst, abs(off(one)))
        mib = {
            name: size / 2**20 for name, size in ({"total": one["formula"]} | one["parts"]).items()
        }
        parts = ", ".join(f"{name} {size:.0f}" for name, size in mib.items())
        print(f"{one['name']:<40} {one['peak'] / 2**20:9.1f} MiB, formula {off(one):+6.1%}: {parts}", flush=True)  # fmt: skip
        if out:
            with out.open("a") as file:
                file.write(json.dumps(one) + "\n")
    return worst


def main() -> int:
    """Status 1 where the formula is further off than it may be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--match", default="", help="only layouts whose name has this")
    parser.add_argument("--out", type=Path, help="also as JSON lines")
    parser.add_argument("--be-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be_rank:
        with joined() as world:
            worst = told(rows(world, args.match), args.out)
            if world.is_first:
                print(f"at most {worst:.1%} off")
        return int(worst > WITHIN)
    worst = 0.0
    if not torch.cuda.is_available():
        worst = told(alone(args.ranks, args.match), args.out)
        print(f"at most {worst:.1%} off", flush=True)
    launcher = ["-m", "elastic.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command = [sys.executable, *launcher, "-m", "benchmarks.memory", "--be-rank", *sys.argv[1:]]
    return max(subprocess.run(command, check=False).returncode, int(worst > WITHIN))


if __name__ == "__main__":
    sys.exit(main())

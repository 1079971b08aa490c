"""Every layout of the trainer on the devices that are here: `python -m benchmarks.layouts [--out FILE]`.

Ranks are processes of this program's: NCCL on GPUs, Gloo on CPUs. With `--world` there may be more of them than GPUs, which
they share: NCCL then takes each for a host of its own, and goes over sockets. Each layout runs two steps of a
small GPT. The table says how far its loss and gradients are from one process's that knows no layout,
whether they are the same bits as with other numbers of replicas, what collectives a block's forward makes,
the largest peak of device memory and the second step's seconds. What fails is a row, too.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic.data import Leaves
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.parallel.layout import Laid, Layout, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run.step import Share, Stepper
from tests.trainer.forks import whole
from tests.trainer.parallel.one_process import SEED, Counted, reference, share
from tests.trainer.program import forward_step

LEAVES = Leaves(batch_size=8, leaf_size=1)
STD = 0.02
FP16_SCALE = 4096.0
"""Of losses, of whose gradients none then vanishes or overflows."""
_reference = cache(sdpa_kernel(SDPBackend.MATH)(partial(reference, leaves=LEAVES, std=STD)))
SMALL = GPTConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=512)  # fmt: skip
LARGE = GPTConfig(
    num_layers=8, hidden_size=768, num_attention_heads=12, seq_length=512, vocab_size=8192
)
FULL, SELECTIVE = Recompute(granularity="full"), Recompute(granularity="selective")
PLAIN = Layout(compute=torch.float32)
_SHORT = {
    "all_reduce": "AR", "all_gather_into_tensor": "AG", "reduce_scatter_tensor": "RS",
    "all_to_all_single": "A2A",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout on so many replicas."""

    dp: int
    layout: Layout
    dropout: float = 0.0
    name: str = field(default="")

    @property
    def size(self) -> int:
        return self.dp * self.layout.tp * self.layout.pp

    @property
    def alike(self) -> tuple[Any, ...]:
        """Those that have this in common end with the same bits, if they are exact."""
        layout = self.layout
        every_leaf = layout.sequence and layout.zero > 1
        return (
            layout.tp, layout.sequence, layout.pp > 1, layout.compile, str(layout.compute),
            layout.compile and layout.recompute == SELECTIVE, every_leaf, self.dropout,
            layout.offload == "all",
        )  # fmt: skip


def cases(world: int) -> Iterator[Case]:
    """All of them, up to `world` ranks."""
    sizes = [size for size in (1, 2, 4, 8) if size <= world]
    for size in sizes:
        for tp in (t for t in sizes if size % t == 0):
            for pp in (p for p in sizes if size // tp % p == 0):
                yield from _of(tp, pp, size // tp // pp)


def _of(tp: int, pp: int, dp: int) -> Iterator[Case]:
    """The layouts of one product."""
    base = replace(PLAIN, tp=tp, pp=pp)
    several = {"virtual": 2}
    changes: dict[str, dict[str, Any]] = {"": {}, "bf16": {"compute": torch.bfloat16}}
    changes |= {"fp16": {"compute": torch.float16}}
    changes |= {"full": {"recompute": FULL}, "compile": {"compile": True}}
    if tp > 1:
        changes |= {"sp": {"sequence": True}, "sp-full": {"sequence": True, "recompute": FULL}}
        changes |= {"sp-compile": {"sequence": True, "compile": True}}
    if pp > 1:
        changes |= {
            "gpipe": {"schedule": "gpipe"},
            "interleaved": {"schedule": "interleaved", **several},
            "zero-bubble": {"schedule": "zero-bubble", **several},
            "zero-bubble-selective": {"schedule": "zero-bubble", **several, "recompute": SELECTIVE},
            "zero0": {"zero": 0},
        }
    else:
        changes |= {f"zero{stage}": {"zero": stage} for stage in (0, 2, 3)}
        changes |= {"selective": {"recompute": SELECTIVE}}
        changes |= {"zero3-full-bf16": {"zero": 3, "recompute": FULL, "compute": torch.bfloat16}}
        changes |= {f"offload-{what}": {"offload": what} for what in ("optimizer", "all")}
    if tp == pp == 1:
        compiled = {"compile": True, "compute": torch.bfloat16}
        changes |= {"fast": {"exact": False}, "compile-bf16": compiled}
        changes |= {"compile-bf16-full": {**compiled, "recompute": FULL}}
        changes |= {"compile-bf16-selective": {**compiled, "recompute": SELECTIVE}}
    for what, change in changes.items():
        name = f"tp{tp}-pp{pp}-dp{dp}" + (f"-{what}" if what else "")
        yield Case(dp=dp, layout=replace(base, **change), name=name)
    yield Case(dp=dp, layout=base, dropout=0.1, name=f"tp{tp}-pp{pp}-dp{dp}-dropout")


# --- a rank --------------------------------------------------------------------------------------


def be(rank: int, wanted: Sequence[Case], folder: Path, device: torch.device) -> None:
    """Run cases of one size, one after the other; what came of each is left in `folder`."""
    config = LARGE if device.type == "cuda" else SMALL
    for case in wanted:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=rank,
            store=FileStore(str(folder / f"store-{case.name}"), case.size),
            world_size=case.size, timeout=timedelta(seconds=60),
        )  # fmt: skip
        try:
            found = measured(case, config, device)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the case's row
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
            (folder / f"{case.name}.{rank}.trace").write_text(traceback.format_exc())
        partial = folder / f"{case.name}.{rank}.partial"
        partial.write_text(json.dumps(found))
        partial.rename(folder / f"{case.name}.{rank}.json")
        if "error" in found:
            os._exit(1)  # the others may wait for this rank for ever
        dist.destroy_process_group()


def measured(case: Case, config: GPTConfig, device: torch.device) -> dict[str, Any]:
    """What this rank finds of a case."""
    torch.compiler.reset()
    config = replace(config, hidden_dropout=case.dropout, attention_dropout=case.dropout)
    gc.collect()  # what is left of the case before
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    laid = lay_out(
        config, case.layout, make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=1, leaves=LEAVES.count, seed=SEED,
        device=device,
    )  # fmt: skip
    initialize(laid.model, config, SEED, STD)
    multiple, least = legal(case.layout.schedule, case.layout.pp)
    leaves = replace(LEAVES, multiple=multiple, at_least=least)
    stepper = Stepper(laid, leaf_tokens=config.seq_length)
    on_host = case.layout.offload == "optimizer"
    optimizer = optimizers.build(laid.model, betas=(0.9, 0.999), eps=1e-8, on_host=on_host)
    optimizers.set_rates(optimizer, 1e-4, 1e-2)
    mine = share(leaves, laid.place.dp, laid.grid.dp, config, device)
    scale = FP16_SCALE if case.layout.compute == torch.float16 else 1.0
    loss, norm = step(stepper, mine, leaves, scale)
    first = {n: whole(p.grad) for n, p in laid.model.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    began = time.perf_counter()
    later = step(stepper, mine, leaves, scale)
    optimizer.step()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    digests = {n: _digest(gradient) for n, gradient in first.items()}
    parameters = {n: _digest(whole(p.detach())) for n, p in laid.model.named_parameters()}
    wanted_loss, wanted = _reference(config, device=device)
    return {
        "loss": abs(loss / wanted_loss - 1),
        "gradients": max(
            float((first[n].cpu() - wanted[n].cpu()).norm() / wanted[n].cpu().norm()) for n in first
        ),
        "bits": {"steps": [loss.hex(), norm.hex(), *(x.hex() for x in later)]},
        "digests": {"gradients": digests, "parameters": parameters},
        "collectives": collectives(laid, case, config),
        "peak": peak,
        "seconds": seconds,
    }


def step(stepper: Stepper, mine: Share, leaves: Leaves, scale: float) -> tuple[float, float]:
    """A step's loss and norm; the gradients are those of the mean. scale: of losses, for backward."""
    sums = stepper.accumulate(mine, leaves, loss_scale=scale)
    norm = stepper.clip(sums, leaves, 0.0, loss_scale=scale)
    return float(sums.loss["lm loss"]), float(norm)


def collectives(laid: Laid, case: Case, config: GPTConfig) -> str:
    """Those of a block's forward; compiled ones cannot be counted from outside."""
    if case.layout.compile:
        return ""
    model: Any = laid.model
    block = next(iter(model.blocks.values()))
    length = config.seq_length // (case.layout.tp if case.layout.sequence else 1)
    with Counted() as counted, torch.no_grad():
        block(torch.zeros(1, length, config.hidden_size, device=laid.device, dtype=case.layout.compute))  # fmt: skip
    return " ".join(f"{times} {_SHORT[name]}" for name, times in sorted(counted.calls.items()))


def _digest(tensor: Tensor) -> int:
    """Of its bits, in whole numbers, whose sums no order changes."""
    bits = tensor.contiguous().view(-1).view(torch.int32).long()
    weights = torch.arange(1, 2 * len(bits), 2, device=bits.device) * 0x9E3779B97F4A7C15
    return int(((bits + 1) * weights).sum())


# --- the one that starts them --------------------------------------------------------------------


def run(wanted: Sequence[Case], folder: Path, *, gpus: bool, patience: float) -> Iterator[Any]:
    """Each case with what its ranks found, or with why not. All are of one size."""
    left = list(wanted)
    while left:
        ranks = _start(left, folder, gpus)
        try:
            while left:
                found = _await(left[0], ranks, folder, patience)
                yield left.pop(0), found
                if "error" in found[0]:
                    break
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _start(wanted: Sequence[Case], folder: Path, gpus: bool) -> list[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }  # fmt: skip
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    shared = gpus and wanted[0].size > torch.cuda.device_count()
    names = ",".join(case.name for case in wanted)
    return [
        subprocess.Popen(
            [
                sys.executable, "-W", "ignore", "-m", "benchmarks.layouts", "--rank", str(rank),
                "--world", str(wanted[0].size), "--cases", names, "--folder", str(folder),
            ],
            env=environment | (_own_host(rank) if shared else {}), stderr=(folder / f"stderr.{rank}").open("ab"),
        )
        for rank in range(wanted[0].size)
    ]  # fmt: skip


def _own_host(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks on one device of one host."""
    return {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}


def _await(
    case: Case, ranks: Sequence[subprocess.Popen[bytes]], folder: Path, patience: float
) -> list[dict[str, Any]]:
    """What all ranks found; or one, of which one has an error or none came in time."""
    ends = time.monotonic() + patience
    files = [folder / f"{case.name}.{rank}.json" for rank in range(case.size)]
    while True:
        gone = [number for number, rank in enumerate(ranks) if rank.poll() is not None]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        bad = [one for one in found if "error" in one]
        if bad or len(found) == len(files):
            return bad or found
        if gone and not all(files[number].exists() for number in gone):
            return [{"error": f"rank {gone[0]} ended with {ranks[gone[0]].poll()}"}]
        if time.monotonic() > ends:
            return [{"error": f"not done after {patience:.0f} s"}]
        time.sleep(0.05)


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A case's row."""
    if "error" in ranks[0]:
        return dict(ranks[0])
    digests: dict[str, dict[str, int]] = {"gradients": {}, "parameters": {}}
    for one in ranks:
        for kind, by_name in one["digests"].items():
            digests[kind].update(by_name)
    return {
        "loss": max(one["loss"] for one in ranks),
        "gradients": max(one["gradients"] for one in ranks),
        "steps": ranks[0]["bits"]["steps"],
        "digests": digests,
        "collectives": ranks[0]["collectives"],
        "peak": max(one["peak"] for one in ranks),
        "seconds": max(one["seconds"] for one in ranks),
    }


def compare(rows: dict[str, dict[str, Any]], all_cases: Sequence[Case]) -> None:
    """Add to each row whether it has the bits of the first that should have the same."""
    first: dict[tuple[Any, ...], str] = {}
    for case in all_cases:
        row = rows[case.name]
        if "error" in row:
            continue
        if not case.layout.exact:
            row["same"] = ""
            continue
        other = first.setdefault(case.alike, case.name)
        bits = (rows[other]["steps"], rows[other]["digests"])
        row["same"] = "first" if other == case.name else (
            "same" if (row["steps"], row["digests"]) == bits else f"not {other}"
        )  # fmt: skip


def line(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{name:<36} FAILED {row['error']}"
    return (
        f"{name:<36} {row['loss']:8.1e} {row['gradients']:9.1e} {row.get('same', ''):<12} "
        f"{row['collectives']:<12} {row['peak'] / 2**20:8.0f} {row['seconds']:8.3f}"
    )


def main() -> int:
    """Status 1 where a layout failed, is further than 1e-5 off in fp32, or has other bits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description=__doc__)
    parser.add_argument("--world", type=int, help="ranks at most (GPUs that are here; CPUs: 2)")
    parser.add_argument("--cpu", action="store_true", help="on CPUs though there are GPUs")
    parser.add_argument("--match", default="", help="only cases whose name has this")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for a case (120)")
    parser.add_argument("--out", type=Path, help="also as JSON")
    for internal in ("--rank", "--cases", "--folder"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    args = parser.parse_args()
    gpus = 0 if args.cpu else torch.cuda.device_count()
    world = args.world or gpus or 2
    if args.rank is not None:
        device = torch.device("cuda", int(args.rank) % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
        torch.set_num_threads(1)
        by_name = {case.name: case for case in cases(world)}
        be(int(args.rank), [by_name[name] for name in args.cases.split(",")], Path(args.folder), device)  # fmt: skip
        return 0
    wanted = [case for case in cases(world) if args.match in case.name]
    rows: dict[str, dict[str, Any]] = {}
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if gpus else 'CPU'}, {world} ranks")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for size in sorted({case.size for case in wanted}):
            of_size = [case for case in wanted if case.size == size]
            for case, found in run(of_size, Path(folder), gpus=bool(gpus), patience=args.patience):
                rows[case.name] = merged(found)
                sys.stderr.write(line(case.name, rows[case.name]) + "\n")
    compare(rows, wanted)
    heads = (
        f"{'loss':>8} {'gradients':>9} {'bits':<12} {'a block':<12} {'peak MiB':>8} {'s a step':>8}"
    )
    print(f"{'':<36} {heads}")
    for case in wanted:
        print(line(case.name, rows[case.name]))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    fp32 = {case.name for case in wanted if case.layout.compute == torch.float32}
    bad = [
        name
        for name, row in rows.items()
        if "error" in row
        or row["same"].startswith("not")
        or (name in fp32 and max(row["loss"], row["gradients"]) > 1e-5)
    ]
    print(f"{len(rows) - len(bad)} of {len(rows)} layouts are right" + "".join(f"\n  wrong: {name}" for name in bad))  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

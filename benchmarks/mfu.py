"""Model FLOPs utilization of the trainer beside a plain compiled GPT: `python -m benchmarks.mfu [NAME ...]`.

Each is a process of its own on the same devices: ours is `elastic-run -m elastic.trainer.pretrain_gpt` as a user
starts it, plain is a GPT in one file (bf16 autocast, fp32 AdamW, compiled whole, all logits at once) on one
device. Both take the same micro-batches and accumulate as many. FLOPs of both are 6N + 12Lds a token.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PEAK = 989e12
WORDS = 50304


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    seq: int
    micro: int
    """Samples of a micro-batch."""
    leaves: int
    """Micro-batches of a step and device."""
    steps: int
    """That are timed; as many before them are not: a node builds its standby meanwhile."""

    @property
    def parameters(self) -> int:
        return (
            12 * self.layers * self.hidden**2
            + 13 * self.layers * self.hidden
            + (2 + WORDS + self.seq) * self.hidden
        )

    @property
    def flops(self) -> float:
        """Of a token."""
        return 6 * self.parameters + 12 * self.layers * self.hidden * self.seq


SHAPES = {
    "125m-1024": Shape(layers=12, hidden=768, heads=12, seq=1024, micro=32, leaves=8, steps=20),
    "125m": Shape(layers=12, hidden=768, heads=12, seq=2048, micro=16, leaves=8, steps=20),
    "1.3b": Shape(layers=24, hidden=2048, heads=16, seq=2048, micro=8, leaves=8, steps=8),
    "6.7b": Shape(layers=32, hidden=4096, heads=32, seq=4096, micro=1, leaves=8, steps=6),
}


def accumulating(shape: Shape, leaves: int) -> Shape:
    """The same with so many leaves a step, in as many steps as take about as long."""
    steps = max(4, round(shape.steps * shape.leaves / leaves))
    return replace(shape, leaves=leaves, steps=steps)


class Plain(nn.Module):
    """What a careful person writes in an afternoon."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        self.words = nn.Embedding(WORDS, hidden)
        self.positions = nn.Parameter(torch.randn(shape.seq, hidden) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.LayerNorm(hidden), "qkv": nn.Linear(hidden, 3 * hidden),
                    "out": nn.Linear(hidden, hidden), "n2": nn.LayerNorm(hidden),
                    "up": nn.Linear(hidden, 4 * hidden), "down": nn.Linear(4 * hidden, hidden),
                }
            )
            for _ in range(shape.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions
        batch, seq, hidden = x.shape
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            cut = (batch, seq, 3, self.shape.heads, -1)
            q, k, v = block["qkv"](block["n1"](x)).view(cut).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](mixed.transpose(1, 2).reshape(batch, seq, hidden))
            x = x + block["down"](F.gelu(block["up"](block["n2"](x)), approximate="tanh"))
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.view(-1, WORDS).float(), labels.view(-1))


def plain(shape: Shape) -> float:
    """Seconds of a step."""
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Plain(shape)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = torch.compile(model)
    tokens = torch.randint(WORDS, (shape.micro, shape.seq + 1), device="cuda")
    for number in range(2 * shape.steps):
        if number == shape.steps:
            torch.cuda.synchronize()
            began = time.perf_counter()
        for _ in range(shape.leaves):
            with torch.autocast("cuda", torch.bfloat16):
                loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / shape.leaves).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / shape.steps


def arguments(shape: Shape, ranks: int) -> list[str]:
    """Of pretrain_gpt: the model and its batch, compiled, in bf16."""
    return [
        f"--num-layers={shape.layers}", f"--hidden-size={shape.hidden}",
        f"--num-attention-heads={shape.heads}", f"--seq-length={shape.seq}",
        f"--micro-batch-size={shape.micro}",
        f"--global-batch-size={shape.micro * shape.leaves * ranks}", "--mock-data",
        f"--vocab-size={WORDS - 1}", "--hidden-dropout=0", "--attention-dropout=0", "--bf16",
        "--compile", "--lr=1e-4", "--eval-iters=0",
    ]  # fmt: skip


def ours(shape: Shape, ranks: int, more: Sequence[str], folder: Path) -> dict[str, float]:
    """What the run's metrics say of the last steps."""
    metrics = folder / "metrics.jsonl"
    command = [sys.executable, "-m", "elastic.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "elastic.trainer.pretrain_gpt", *arguments(shape, ranks)]
    command += [f"--train-iters={2 * shape.steps}", f"--log-interval={shape.steps}"]
    command += ["--log-mfu", f"--metrics-file={metrics}", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-1500:] + done.stderr[-1500:])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"][-1:]
    memory = [line for line in lines if line["kind"] == "memory"][-1:]
    peak = memory[0]["peak_allocated"] / 1e9 if memory else math.nan
    return {"seconds": steps[0]["seconds"], "peak": peak}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mfu", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SHAPES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--leaves", type=int, help="micro-batches of a step and device")
    parser.add_argument("--reductions", nargs="+", default=["exact", "fast"])
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--saving", action="store_true", help="each step into host memory")
    parser.add_argument("--out", type=Path, help="also as JSON lines")
    parser.add_argument("--be-plain", choices=SHAPES, help=argparse.SUPPRESS)
    args, more = parser.parse_known_args()
    shapes = SHAPES
    if args.leaves:
        shapes = {name: accumulating(shape, args.leaves) for name, shape in SHAPES.items()}
    if args.be_plain:
        sys.stdout.write(f"{plain(shapes[args.be_plain])}\n")
        return 0
    for name in args.names:
        shape = shapes[name]
        for reduction in args.reductions:
            with tempfile.TemporaryDirectory() as folder:
                flags = [f"--reduction={reduction}", *more]
                if args.saving:
                    flags.append(f"--save={folder}/checkpoints")
                try:
                    found = ours(shape, args.ranks, flags, Path(folder))
                except SystemExit as error:
                    sys.stdout.write(f"{name} {reduction} failed: {error}\n")
                    continue
            _tell(
                args, name, shape, f"{reduction}{' saving' * args.saving} {' '.join(more)}", found
            )
        if not args.no_plain:
            command = [sys.executable, "-m", "benchmarks.mfu", f"--be-plain={name}"]
            command += [f"--leaves={shape.leaves}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.stdout.write(f"{name} plain failed: {done.stderr[-500:]}\n")
                continue
            found = {"seconds": float(done.stdout.split()[-1]), "peak": math.nan}
            _tell(args, name, shape, "plain", found)
    return 0


def _tell(
    args: argparse.Namespace, name: str, shape: Shape, what: str, found: dict[str, float]
) -> None:
    tokens = shape.micro * shape.leaves * shape.seq / found["seconds"]
    row = {
        "shape": name, "what": what, "ranks": args.ranks, "leaves": shape.leaves, **found,
        "tokens_per_second_and_device": tokens, "mfu": shape.flops * tokens / PEAK,
    }  # fmt: skip
    sys.stdout.write(
        f"{name:10} {what:16} {found['seconds'] * 1e3:8.1f} ms {tokens:10.0f} tokens/s/device "
        f"MFU {row['mfu']:.1%} peak {found['peak']:.1f} GB\n"
    )
    sys.stdout.flush()
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())

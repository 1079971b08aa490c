"""The head and the loss on one GPU, by chunks of so many logits: `python -m benchmarks.head [SHAPE ...]`.

Milliseconds of a leaf's forward and backward of `trainer/model/loss.py`, compiled, beside plain cross entropy over
all logits at once, compiled; and of the three products alone, where the one for the head's gradient is
summed up in fp32 in several ways.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.mfu import SHAPES, WORDS
from elastic.trainer.model import loss
from elastic.trainer.model.tensor_parallel import TensorParallel

BF16 = torch.bfloat16


def milliseconds(function: Callable[[], object], times: int = 20) -> float:
    """Of one call, behind three that warm it up."""
    for _ in range(3):
        function()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(times):
        function()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / times


def ours(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    weights = torch.full((len(targets),), 1.0 / len(targets), device="cuda")
    losses = loss.cross_entropy(hidden, head, targets, weights, TensorParallel(), _chunk)
    torch.autograd.backward((losses * weights).sum())


_chunk = loss.compiled_chunk()


def at_once(hidden: Tensor, head: Tensor, targets: Tensor) -> None:
    torch.autograd.backward(_plain(hidden, head, targets))


def _all_logits(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ head.t()).float(), targets)


_plain = torch.compile(_all_logits, dynamic=False)


def products(tokens: int, words: int, width: int) -> dict[str, Callable[[], object]]:
    """Those of a chunk: [c, H] x [H, v], [c, v] x [v, H] and [v, c] x [c, H]."""
    hidden = torch.randn(tokens, width, device="cuda", dtype=BF16)
    head = torch.randn(words, width, device="cuda", dtype=BF16)
    slope = torch.randn(tokens, words, device="cuda", dtype=BF16)
    total = torch.zeros(words, width, device="cuda")
    turned = torch.zeros(width, words, device="cuda")
    narrow = torch.zeros(words, width, device="cuda", dtype=BF16)

    def in_place() -> None:
        torch.addmm(total, slope.t(), hidden, out_dtype=torch.float32, out=total)

    def apart() -> None:
        total.add_(torch.mm(slope.t(), hidden, out_dtype=torch.float32))

    def cast() -> None:
        total.add_(slope.t() @ hidden)

    return {
        "logits": lambda: hidden @ head.t(),
        "for hidden": lambda: slope @ head,
        "for head, bf16": lambda: torch.mm(slope.t(), hidden, out=narrow),
        "for head, fp32 alone": lambda: torch.mm(slope.t(), hidden, out_dtype=torch.float32),
        "for head, addmm": lambda: torch.addmm(total, slope.t(), hidden, out_dtype=torch.float32),
        "for head, addmm in place": in_place,
        "for head, addmm turned": lambda: torch.addmm(
            turned, hidden.t(), slope, out_dtype=torch.float32
        ),
        "for head, mm and add": apart,
        "for head, bf16 and add": cast,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=__doc__)
    parser.add_argument("names", nargs="*", default=["125m", "1.3b"])
    for name in parser.parse_args().names:
        shape = SHAPES[name]
        tokens, width = shape.micro * shape.seq, shape.hidden
        hidden = torch.randn(tokens, width, device="cuda", dtype=BF16, requires_grad=True)
        head = (torch.randn(WORDS, width, device="cuda", dtype=BF16) * 0.02).requires_grad_()
        targets = torch.randint(WORDS, (tokens,), device="cuda")
        spent = milliseconds(partial(at_once, hidden, head, targets), 5)
        print(f"{name}: all logits at once {spent:.2f} ms", flush=True)
        for power in range(26, 31):
            loss.LOGITS = 2**power
            torch.compiler.reset()
            torch.cuda.reset_peak_memory_stats()
            spent = milliseconds(partial(ours, hidden, head, targets), 5)
            peak = torch.cuda.max_memory_allocated() / 2**30
            chunk = min(tokens, loss.tokens_of_chunk(WORDS))
            print(f"  2^{power} logits, {chunk} tokens: {spent:.2f} ms, {peak:.1f} GiB", flush=True)
            flops = 2 * chunk * WORDS * width
            for what, product in products(chunk, WORDS, width).items():
                try:
                    spent = milliseconds(product)
                except (RuntimeError, TypeError) as error:
                    print(f"    {what}: {str(error).splitlines()[0]}")
                    continue
                print(f"    {what:<26} {spent:7.3f} ms {flops / spent / 1e9:6.0f} TFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A leaf's gradients, added to those before, on one GPU: `python -m benchmarks.adding [SHAPE ...]`.

Milliseconds of all of a model's blocks and ends: as FSDP adds them, a tensor at a time, and as the trainer does
(`trainer/parallel/accumulators.py`), a block at a time, in fast mode, and rounded in exact mode. Beside them the
bytes that have to be moved, at the speed of a copy.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.head import BF16, milliseconds
from benchmarks.mfu import SHAPES, WORDS, Shape
from elastic.data import exact
from elastic.trainer.parallel import accumulators

Group = tuple[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor]
"""Gradients of tensors, their sums, magnitudes and offsets."""


def sizes(shape: Shape) -> Iterator[list[int]]:
    """Of each block's tensors, and of the ends'."""
    h = shape.hidden
    for _ in range(shape.layers):
        yield [h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h]
    yield [WORDS * h, shape.seq * h, h, h]


def groups(shape: Shape, wide: torch.dtype) -> list[Group]:
    found: list[Group] = []
    for numels in sizes(shape):
        gradients = [torch.randn(numel, device="cuda", dtype=BF16) for numel in numels]
        sums = [torch.zeros_like(one, dtype=wide) for one in gradients]
        magnitudes = torch.zeros(len(numels), device="cuda")
        tops = torch.full((len(numels),), 8, device="cuda")
        found.append((gradients, sums, magnitudes, exact.offsets(tops, 8)))
    return found


def each(function: Callable[..., None], having: Sequence[Group]) -> None:
    for group in having:
        function(*group)


def one_by_one(gradients: Sequence[Tensor], sums: Sequence[Tensor], *_: Tensor) -> None:
    for gradient, total in zip(gradients, sums, strict=True):
        total += gradient


def ways(kernels: accumulators.Kernels) -> dict[str, tuple[torch.dtype, Callable[..., None]]]:
    def fast(gradients: Sequence[Tensor], sums: Sequence[Tensor], *_: Tensor) -> None:
        kernels.add(gradients, sums)

    def rounded(gradients: Sequence[Tensor], sums: Sequence[Tensor], *grids: Tensor) -> None:
        kernels.round(gradients, *grids)
        one_by_one(gradients, sums)

    return {
        "fast, tensor by tensor": (torch.float32, one_by_one),
        "fast": (torch.float32, fast),
        "exact, rounded and then tensor by tensor": (torch.float64, rounded),
        "exact": (torch.float64, kernels.add_rounded),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adding", description=__doc__)
    parser.add_argument("names", nargs="*", default=["125m", "1.3b"])
    for name in parser.parse_args().names:
        for way, (wide, function) in ways(accumulators.kernels(compiled=True)).items():
            having = groups(SHAPES[name], wide)
            spent = milliseconds(partial(each, function, having))
            numel = sum(one.numel() for gradients, *_ in having for one in gradients)
            del having
            # A gradient is read, its sum is read and written.
            source = torch.empty(numel * (1 + wide.itemsize) // 2, dtype=BF16, device="cuda")
            least = milliseconds(partial(source.copy_, torch.empty_like(source)))
            print(f"{name} {way:<42} {spent:7.3f} ms, bytes alone {least:.3f}", flush=True)
            del source
    return 0


if __name__ == "__main__":
    sys.exit(main())

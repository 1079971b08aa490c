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


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adding", description=__doc__)
    parser.add_argument("names", nargs="*", default=["125m", "1.3b"])
    for name in parser.parse_args().names:
        shape, kernels = SHAPES[name], accumulators.kernels(compiled=True)

        def rounded_first(*group: Tensor, kernels: accumulators.Kernels = kernels) -> None:
            gradients, sums, *grids = group
            kernels.round(gradients, *grids)
            one_by_one(gradients, sums)

        for what, wide, ways in (
            ("fast", torch.float32, {
                "tensor by tensor": one_by_one,
                "here": lambda gradients, sums, *_, add=kernels.add: add(gradients, sums),
            }),
            ("exact", torch.float64, {
                "rounded, then tensor by tensor": rounded_first, "here": kernels.add_rounded,
            }),
        ):  # fmt: skip
            having = groups(shape, wide)
            numel = sum(one.numel() for gradients, *_ in having for one in gradients)
            moved = torch.empty(numel * (1 + wide.itemsize), dtype=BF16, device="cuda")
            least = milliseconds(partial(torch.Tensor.copy_, moved[: len(moved) // 2], moved[len(moved) // 2 :][: len(moved) // 2]))  # fmt: skip
            del moved
            for way, function in ways.items():
                spent = milliseconds(partial(each, function, having))
                print(f"{name} {what:<6} {way:<32} {spent:7.3f} ms, bytes alone {least:.3f}", flush=True)  # fmt: skip
            del having
    return 0


if __name__ == "__main__":
    sys.exit(main())

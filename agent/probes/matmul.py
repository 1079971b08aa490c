"""Matrix products: how fast, and whether every bit of them is right.

The factors are whole numbers so small that no sum of their products reaches 2^24, so fp32 adds them
up without rounding, in whatever order a kernel does it. What is left is the last rounding, to the
product's own dtype. So the result is the same bits in each repetition and on each device, and may
differ from the true one by half a unit in the last place of that dtype, and no more.
"""

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.agent.probes.program import Clock, Fault, ask, begin, parser, tell

SEED = 20261125
TILE = 128
"""Rows and columns of what one block of a GPU's kernel computes: each is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    n: int
    repetitions: int


SIZES = {
    ("cuda", "quick"): Size(n=8192, repetitions=16),
    ("cuda", "full"): Size(n=8192, repetitions=2000),
    ("cpu", "quick"): Size(n=1024, repetitions=6),
    ("cpu", "full"): Size(n=2048, repetitions=60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Of two matrices on a device, and looked at."""

    left: Tensor
    right: Tensor
    first: Tensor


def product(device: torch.device, level: str, clock: Clock) -> Product:
    """The first, which also loads the libraries. Raises Fault where an element is not what it must be.

    clock: is told what the host takes for each part; a GPU may still be at it.
    """
    n = SIZES[device.type, level].n
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Else cuBLAS may add up partial sums in bf16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with clock.part("factors"):
        left, right = (matrix(n, which, device).to(dtype) for which in (0, 1))
    with clock.part("first"):
        first = torch.mm(left, right)
    with clock.part("check"):
        check(first)
    return Product(left=left, right=right, first=first)


def measure(device: torch.device, level: str, made: Product | None = None) -> dict[str, float]:
    """Multiply n x n matrices again and again; raises Fault where a bit is not what it must be.

    made: by `product` before; None: it is made now.
    """
    size = SIZES[device.type, level]
    made = made or product(device, level, Clock())
    again = torch.empty_like(made.first)
    seconds = []
    for repetition in range(1, size.repetitions + 1):
        seconds.append(timed(lambda: torch.mm(made.left, made.right, out=again), device))
        if what := difference(made.first, again):
            raise Fault(f"in repetition {repetition} of the same product {what}")
    work, median = 2 * size.n**3 / 1e12, statistics.median(seconds)
    return {
        "tflops": work / median,
        "slowest_tflops": work / max(seconds),
        "checksum": float(checksum(made.first)),
        "median_s": median,
    }


def use(name: str) -> torch.device:
    """The device of this process from here on."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that it took, on the device's own clock where it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


# --- the numbers ---------------------------------------------------------------------------------


def matrix(n: int, which: int, device: torch.device) -> Tensor:
    """n x n whole numbers, int64, each a function of its place: any device makes the same."""
    index = torch.arange(n, device=device)
    return elements(index, index, n, which)


def elements(rows: Tensor, columns: Tensor, n: int, which: int) -> Tensor:
    """The numbers of matrix `which` (0: left, 1: right) of size n at these rows and columns:
    int64[len(rows), len(columns)], from -`largest(n)` to `largest(n)`."""
    mask, most = 0xFFFFFFFF, largest(n)
    mixed = rows[:, None] * 0x9E3779B1 + columns[None, :] * 0x85EBCA77 + SEED * (which + 1)
    mixed = mixed & mask
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & mask
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & mask
    return (mixed ^ (mixed >> 15)) % (2 * most + 1) - most


def largest(n: int) -> int:
    """So that n products of two add up to less than 2^24; bf16 has whole numbers to 256."""
    return min(math.isqrt(((1 << 24) - 1) // n), 256)


# --- the comparisons -----------------------------------------------------------------------------


def check(product: Tensor) -> None:
    """One element of each tile against the host's own arithmetic. Raises Fault.

    product: [n, n], floating point, of matrices 0 and 1.
    """
    places, true = truth(product.shape[0])
    there = places.to(product.device)
    got = product[there][:, there].cpu()
    if what := wrong(got, true, places):
        raise Fault(what)


@functools.cache
def truth(n: int) -> tuple[Tensor, Tensor]:
    """Rows and columns at which a product of n x n matrices is looked at, and what it has there, int64[k] and fp64[k, k]:
    the host's work, which may be done ahead."""
    places = torch.tensor([at + at // TILE * 37 % TILE for at in range(0, n - TILE + 1, TILE)])
    everything = torch.arange(n)
    left = elements(places, everything, n, 0).double()
    right = elements(everything, places, n, 1).double()
    return places, left @ right


def wrong(got: Tensor, true: Tensor, places: Tensor) -> str:
    """Where `got` is further from `true` (fp64, same shape) than half a unit in the last place of its
    dtype; empty: nowhere. places: the rows and columns of the product that these are."""
    bound = _half_units(true, got.dtype)
    bad = ~((got.double() - true).abs() <= bound)  # a NaN is in no bound
    count = int(bad.sum())
    if not count:
        return ""
    row, column = (int(at) for at in bad.nonzero()[0])
    return (
        f"{count} of {bad.numel()} elements of a product are wrong: row {int(places[row])}, column "
        f"{int(places[column])} is {got[row, column].item():.9g}, not {true[row, column].item():.9g}"
    )


def _half_units(true: Tensor, dtype: torch.dtype) -> Tensor:
    """Half of what the last place of `dtype` is worth at each number; 0 at 0."""
    _, exponent = torch.frexp(true)  # of a fraction from 1/2 to 1
    quarter = torch.full_like(true, torch.finfo(dtype).eps / 4)
    return torch.ldexp(quarter, exponent) * (true != 0)


def difference(first: Tensor, again: Tensor) -> str:
    """Where two results differ in a bit; empty: nowhere."""
    bad = bits(first) != bits(again)
    count = int(bad.sum())
    if not count:
        return ""
    row, column = (int(at) for at in bad.nonzero()[0])
    return (
        f"{count} elements differ: row {row}, column {column} was {first[row, column].item():.9g}, "
        f"then {again[row, column].item():.9g}"
    )


def checksum(product: Tensor) -> int:
    """Of every bit of it."""
    return int(bits(product).sum(dtype=torch.int64)) % (1 << 32)


def bits(of: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return of.view(torch.int16 if of.dtype.itemsize == 2 else torch.int32)


def main(argv: list[str]) -> None:
    arguments = parser("matmul", __doc__)
    arguments.add_argument("--device", default="cpu", help="cpu, cuda:N")
    args = arguments.parse_args(argv)
    tell(begin(args.parent), ask("matmul", lambda: measure(use(args.device), args.level)))


if __name__ == "__main__":
    main(sys.argv[1:])

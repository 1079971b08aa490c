"""What a GPU did in a trace of `--profile --use-pytorch-profiler`: `python -m benchmarks.kernels TRACE`.

Milliseconds of kernels by kind and by name, and those in which the device had nothing to do, with what ran
before and behind the longest of them. Streams that run at once count once in the busy time.
"""

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {
    "attention": ("flash", "fmha", "sdpa", "flex"),
    "collectives": ("nccl",),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset", "copy"),
}
"""What the names of kernels have in them; the first that fits counts."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Kernel(NamedTuple):
    """Microseconds."""

    name: str
    start: float
    end: float


class Gap(NamedTuple):
    """In which a device has nothing to do; microseconds."""

    spent: float
    before: str
    behind: str


def read(trace: Path) -> list[Kernel]:
    """Those of a Chrome trace, gzipped or not, by their start."""
    data = trace.read_bytes()
    events = json.loads(gzip.decompress(data) if trace.suffix == ".gz" else data)["traceEvents"]
    return sorted(_kernels(events), key=lambda kernel: kernel.start)


def _kernels(events: Sequence[dict[str, Any]]) -> Iterator[Kernel]:
    for event in events:
        if event.get("cat") in DEVICE:
            size = event.get("args", {}).get("bytes")  # of copies, and what is filled
            name = event["name"] if size is None else f"{event['name']} of {size} bytes"
            yield Kernel(name, event["ts"], event["ts"] + event["dur"])


def gaps(kernels: Sequence[Kernel]) -> list[Gap]:
    """Between kernels, which are given by their start; the longest first."""
    found, last = [], kernels[0]
    for kernel in kernels[1:]:
        if kernel.start > last.end:
            found.append(Gap(kernel.start - last.end, last.name, kernel.name))
        last = max(last, kernel, key=lambda one: one.end)
    return sorted(found, reverse=True)


def kind(name: str) -> str:
    return next(
        (kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)),
        "other",
    )


def _most(spent: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(spent.items(), key=lambda item: -item[1])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--most", type=int, default=25, help="rows of each table")
    args = parser.parse_args()
    kernels = read(args.trace)
    if not kernels:
        sys.stderr.write(f"{args.trace} has no kernels of a GPU\n")
        return 1
    whole = max(kernel.end for kernel in kernels) - kernels[0].start
    idle = gaps(kernels)
    nothing = sum(gap.spent for gap in idle)
    print(
        f"{whole / 1e3:.1f} ms, of which nothing ran for {nothing / 1e3:.1f} ms in {len(idle)} gaps"
    )
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    counts = Counter(kernel.name for kernel in kernels)
    for kernel in kernels:
        kinds[kind(kernel.name)] += kernel.end - kernel.start
        names[kernel.name] += kernel.end - kernel.start
    for name, spent in _most(kinds):
        print(f"{spent / 1e3:9.2f} ms  {name}")
    print("by name:")
    for name, spent in _most(names)[: args.most]:
        print(f"{spent / 1e3:9.2f} ms {counts[name]:6d} x  {name[:110]}")
    print("gaps:")
    for gap in idle[: args.most]:
        print(f"{gap.spent / 1e3:9.3f} ms  {gap.before[:60]}  ->  {gap.behind[:60]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

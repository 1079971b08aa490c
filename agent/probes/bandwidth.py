"""A device's own memory: how fast, and whether it gives back what was written."""

import statistics
import sys

import torch
from torch import Tensor

from elastic.agent.probes.matmul import timed, use
from elastic.agent.probes.program import Fault, ask, begin, parser, tell

BYTES = {
    ("cuda", "quick"): 1 << 30, ("cuda", "full"): 1 << 30,
    ("cpu", "quick"): 256 << 20, ("cpu", "full"): 1 << 30,
}  # fmt: skip
"""Of what is copied."""
REPETITIONS = {"quick": 5, "full": 20}
SWEEP = 0.8
"""Part of a GPU's free memory that the full probe writes and reads."""


def measure(device: torch.device, level: str) -> dict[str, float]:
    """Copy from memory to memory; on a GPU the full probe then goes through most of what is free.
    Raises Fault."""
    count = BYTES[device.type, level] // 4
    source, target = pattern(count, 0, device), torch.zeros(count, dtype=torch.int32, device=device)
    timed(lambda: target.copy_(source), device)  # pages, on a CPU
    seconds = [timed(lambda: target.copy_(source), device) for _ in range(REPETITIONS[level])]
    if what := changed(target, source):
        raise Fault(f"of a copy within the memory {what}")
    figures = {"gb_s": 8 * count / 1e9 / statistics.median(seconds)}  # read and written
    if device.type == "cuda" and level == "full":
        del source, target
        torch.cuda.empty_cache()
        figures["swept_bytes"] = sweep(device, 1 << 30)
    return figures


def sweep(device: torch.device, chunk: int) -> float:
    """Write chunks of so many bytes, all kept, and read each again; bytes gone through. Raises Fault."""
    free, _ = torch.cuda.mem_get_info(device)
    chunks = max(1, int(free * SWEEP) // chunk - 3)  # the rest is for what a comparison takes
    kept = [pattern(chunk // 4, number, device) for number in range(chunks)]
    for number, one in enumerate(kept):
        if what := changed(one, pattern(chunk // 4, number, device)):
            raise Fault(f"of GiB {number} of its memory {what}")
    return float(chunks * chunk)


def pattern(count: int, number: int, device: torch.device) -> Tensor:
    """int32[count] that tell their own addresses; neighbours have opposite bits."""
    index = torch.arange(count, dtype=torch.int32, device=device)
    index += number * 0x01000193 & 0x7FFFFFFF
    index[1::2].bitwise_not_()
    return index


def changed(got: Tensor, wanted: Tensor) -> str:
    """Where words are not what was written; empty: nowhere."""
    if torch.equal(got, wanted):
        return ""
    bad = (got != wanted).nonzero()
    at = int(bad[0])
    was, is_ = (int(one[at]) & 0xFFFFFFFF for one in (wanted, got))
    return f"{len(bad)} words are not what was written: word {at} is {is_:#010x}, not {was:#010x}"


def main(argv: list[str]) -> None:
    arguments = parser("bandwidth", __doc__)
    arguments.add_argument("--device", default="cpu", help="cpu, cuda:N")
    args = arguments.parse_args(argv)
    tell(begin(args.parent), ask("bandwidth", lambda: measure(use(args.device), args.level)))


if __name__ == "__main__":
    main(sys.argv[1:])

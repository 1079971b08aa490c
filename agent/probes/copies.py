"""Copies between a GPU and pinned host memory, both ways."""

import statistics
import sys

import torch

from elastic.agent.probes.bandwidth import changed, pattern
from elastic.agent.probes.matmul import timed, use
from elastic.agent.probes.program import Fault, NotKnown, ask, begin, parser, tell

BYTES = {"quick": 64 << 20, "full": 1 << 30}
"""To pin them takes longer than to copy them."""
REPETITIONS = {"quick": 4, "full": 20}


def measure(device: torch.device, level: str) -> dict[str, float]:
    """To the device and back; raises Fault where what comes back is not what went."""
    if device.type != "cuda":
        raise NotKnown("there is no device to copy to")
    count = BYTES[level] // 4
    there = pattern(count, 0, device)
    host = torch.empty(count, dtype=torch.int32, pin_memory=True)
    back = torch.empty_like(there)
    down = [
        timed(lambda: host.copy_(there, non_blocking=True), device)
        for _ in range(REPETITIONS[level])
    ]
    up = [
        timed(lambda: back.copy_(host, non_blocking=True), device)
        for _ in range(REPETITIONS[level])
    ]
    if what := changed(back, there):
        raise Fault(f"of a copy to the host and back {what}")
    gigabytes = 4 * count / 1e9
    return {
        "to_host_gb_s": gigabytes / statistics.median(down),
        "to_device_gb_s": gigabytes / statistics.median(up),
    }


def main(argv: list[str]) -> None:
    arguments = parser("copies", __doc__)
    arguments.add_argument("--device", default="cuda:0", help="cuda:N")
    args = arguments.parse_args(argv)
    tell(begin(args.parent), ask("copies", lambda: measure(use(args.device), args.level)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""A node's host memory: what is left of it, of the machine's and of our cgroups', and who waits for it."""

import contextlib
import math
import re
import sys
from pathlib import Path

from elastic.agent import cgroup
from elastic.agent.probes import judge
from elastic.agent.probes.program import Fault, NotKnown, ask, begin, parser, tell


def measure(proc: Path) -> dict[str, float]:
    """proc: `/proc`. Raises Fault, NotKnown."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        meminfo = (proc / "meminfo").read_text()
        for name, key in (("total_bytes", "MemTotal"), ("free_bytes", "MemAvailable")):
            if match := re.search(rf"^{key}:\s+(\d+) kB", meminfo, re.MULTILINE):
                found[name] = float(int(match[1]) << 10)
    # Without a limit version 1 has a number that no machine reaches.
    limits = [
        (m, u) for m, u in cgroup.limits(proc / "self") if m < found.get("total_bytes", math.inf)
    ]
    if limits:
        most, used = min(limits, key=lambda limit: limit[0] - limit[1])
        found |= {"cgroup_bytes": float(most), "cgroup_free_bytes": float(max(0, most - used))}
    found |= _pressure(proc / "pressure/memory", "")
    if (ours := cgroup.unified(proc / "self")) is not None:
        found |= _pressure(ours / "memory.pressure", "cgroup_")
    if what := judge.memory(found):
        raise Fault(what, found)
    if not found:
        raise NotKnown("nothing can be read of it")
    return found


def _pressure(path: Path, prefix: str) -> dict[str, float]:
    """Percent of the last ten seconds in which some, or all, waited for memory."""
    found = {}
    with contextlib.suppress(OSError):
        text = path.read_text()
        for name, key in (("waited", "some"), ("stalled", "full")):
            if match := re.search(rf"^{key} avg10=([\d.]+)", text, re.MULTILINE):
                found[f"{prefix}{name}_percent"] = float(match[1])
    return found


def main(argv: list[str]) -> None:
    arguments = parser("memory", __doc__)
    arguments.add_argument("--proc", type=Path, default=Path("/proc"))
    args = arguments.parse_args(argv)
    tell(begin(args.parent), ask("memory", lambda: measure(args.proc)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""How much memory snapshots may take, reckoned before a page is touched."""

import re
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.cgroup import limits
from elastic.agent.numa import ranges

RESERVE = 1 << 30
"""Bytes that are left to everything else, at least; a tenth of the memory where that is more."""

SLOTS = 4
"""Of each rank: the newest whole snapshot, one that is on its way to be whole, one that is written,
and one that is flushed."""
REPLICATED = SLOTS + 2
"""With replicas: also the newest that is replicated, and the one that is being replicated."""
COPIES = 2
"""Replicas of each rank of another node: the newest that is complete, and the one that comes."""
FEWEST = 2
"""Slots of a rank: one keeps the newest whole snapshot while the other is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoning:
    slots: int
    """Of each rank; 0: storage only."""
    replicas: bool
    """There is room for those of another node, and for what our own need."""
    reason: str
    """Why fewer than were wanted; empty where all are to be had."""


def reckon(*, slot_bytes: int, ranks: int, available: int, replicas: bool) -> Reckoning:
    """How many slots of that size each of so many ranks can have. Pure.

    available: bytes that may be taken, the reserve already off. The order of retreat: no replicas,
    fewer slots, none.
    """
    sets = max(0, available) // max(1, slot_bytes * ranks)
    wanted = REPLICATED + COPIES if replicas else SLOTS
    if sets >= wanted:
        return Reckoning(slots=REPLICATED if replicas else SLOTS, replicas=replicas, reason="")
    slots = min(SLOTS, sets)
    need = f"{wanted} slots of {_gib(slot_bytes)} for each of {ranks} ranks"
    room = f"{_gib(max(0, available))} of memory can be had for snapshots, {need} were wanted"
    without = ", and there are no replicas" if replicas else ""
    if slots < FEWEST:
        words = f"{room}: none are taken, and what is to be persisted is written to storage at once"
        return Reckoning(slots=0, replicas=False, reason=words)
    return Reckoning(slots=slots, replicas=False, reason=f"{room}: each has {slots}{without}")


def available(
    meminfo: Path = Path("/proc/meminfo"),
    status: Path = Path("/proc/self/status"),
    nodes: Path = Path("/sys/devices/system/node"),
) -> int:
    """Bytes that snapshots may take now: of this machine, of every cgroup above us, and of the NUMA nodes
    to which a cpuset keeps us."""
    text = meminfo.read_text()
    total, free = (_kibibytes(text, name) for name in ("MemTotal", "MemAvailable"))
    room = [(total, free), *((most, most - used) for most, used in limits())]
    room += _allowed(status, nodes)
    return min(left - max(RESERVE, most // 10) for most, left in room)


def _allowed(status: Path, nodes: Path) -> list[tuple[int, int]]:
    """Bytes that our NUMA nodes have together, and how many of those can be had; empty where all nodes
    are ours, since the kernel goes on to the next one when one is full."""
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", status.read_text(), re.MULTILINE)
    there = {int(node.name.removeprefix("node")): node for node in nodes.glob("node[0-9]*")}
    ours = there.keys() & ranges(allowed[1] if allowed else "")
    if not ours or ours == there.keys():
        return []
    texts = [(there[node] / "meminfo").read_text() for node in ours]
    kinds = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    total = sum(_kibibytes(text, "MemTotal") for text in texts)
    return [(total, sum(_kibibytes(text, kind) for text in texts for kind in kinds))]


def _kibibytes(meminfo: str, name: str) -> int:
    """Of a line such as `MemFree: 12 kB`, before which a node's file has `Node 0`."""
    found = re.search(rf"^(?:Node \d+ )?{re.escape(name)}:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

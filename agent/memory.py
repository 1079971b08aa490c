"""How much memory snapshots may take, reckoned before a page is touched."""

import re
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.cgroup import limits

RESERVE = 1 << 30
"""Bytes that are left to everything else, at least; a tenth of the memory where that is more."""

FEWEST = 2
"""Slots of a rank: one keeps the newest whole snapshot while the other is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoning:
    slots: int
    """Of each rank; 0: storage only."""
    reason: str
    """Why fewer than were wanted; empty where all are to be had."""


def reckon(*, slot_bytes: int, ranks: int, wanted: int, available: int) -> Reckoning:
    """How many slots of that size each of so many ranks can have. Pure.

    available: bytes that may still be taken, the reserve already off.
    """
    each = max(1, slot_bytes * ranks)
    slots = min(wanted, available // each)
    if slots >= wanted:
        return Reckoning(slots=wanted, reason="")
    need = f"{wanted} slots of {_gib(slot_bytes)} for each of {ranks} ranks"
    room = f"{_gib(max(0, available))} of memory can be had for snapshots, {need} were wanted"
    if slots < FEWEST:
        return Reckoning(slots=0, reason=f"{room}: none are taken in memory, all go to storage")
    return Reckoning(slots=slots, reason=f"{room}: each has {slots}")


def available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that snapshots may take now: of this machine, and of every cgroup above us."""
    text = meminfo.read_text()
    total, free = (_kibibytes(text, name) for name in ("MemTotal", "MemAvailable"))
    room = [(total, free), *((most, most - used) for most, used in limits())]
    return min(left - max(RESERVE, most // 10) for most, left in room)


def _kibibytes(meminfo: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

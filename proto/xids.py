"""Records of Xids, what NVIDIA's driver calls a GPU's errors: the kernel's log has them, and NVML tells of them where that may
not be read. Pure.

In the log an address is domain, bus and device, all in hexadecimal, or a UUID follows it in brackets.
"""

import re
from typing import NamedTuple

_RECORD = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-f]+(?::[0-9a-f]+){2}(?:\.[0-9a-f]+)?)[^)]*\): (\d+)",
    re.IGNORECASE,
)


class Xid(NamedTuple):
    bus: str
    """The GPU's address, `0000:3b:00`."""
    number: int


def find(record: str) -> Xid | None:
    match = _RECORD.search(record)
    return Xid(match[1], int(match[2])) if match else None


def record(bus: str, number: int) -> str:
    """As the kernel would."""
    return f"NVRM: Xid (PCI:{bus}): {number}, by NVML"

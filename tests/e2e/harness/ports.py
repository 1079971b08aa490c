"""Which addresses a process listens on, from /proc."""

import contextlib
import os
import re
import socket
from pathlib import Path

_LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """TCP over IPv4: (address, port)."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                    inodes.add(match[1])
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                address, port = fields[1].split(":")
                packed = int(address, 16).to_bytes(4, "little")
                found.add((socket.inet_ntoa(packed), int(port, 16)))
    return found

"""Which addresses a process listens on, from /proc; ports that others need beforehand."""

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import sys
from pathlib import Path

_LISTEN = "0A"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """One that no connection gets by chance before it is listened on, being below the range of those;
    none of the jobs' own (29400), which each have on an address of their own."""
    first = int(_EPHEMERAL.read_text().split()[0])
    while True:
        port = first // 2 + secrets.randbelow(first // 2)
        if port == 29400:
            continue
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def listening(pid: int) -> set[tuple[str, int]]:
    """TCP: (address, port)."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                    inodes.add(match[1])
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """Words of four bytes, each in the order of this machine."""
    words = (int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8))
    found = ipaddress.ip_address(b"".join(words))
    return str(getattr(found, "ipv4_mapped", None) or found)

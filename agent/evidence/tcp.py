"""Bytes that ranks, and processes that they began, move over TCP, as the kernel's sock_diag(7) tells: no file of /proc has
what send(2) and recv(2) do."""

import contextlib
import socket
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elastic.agent import children
from elastic.agent.tasks import sockets

LITTLE = 64 << 10
"""Bytes between two looks, half a minute apart at most: fewer are a heartbeat's, as to a store."""

_SOCK_DIAG, _BY_FAMILY = 4, 20
"""NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY."""
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
"""Types of netlink(7)'s messages."""
_INFO = 2
"""INET_DIAG_INFO: a struct tcp_info."""
_STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11
"""Those in which bytes are still under way, in either direction."""
_HEADER = struct.Struct("=IHHII")
_ASK = struct.Struct("=BBBxI48x")
"""struct inet_diag_req_v2: of any address."""
_SOCKET, _INODE = 72, struct.Struct("=68xI")
"""struct inet_diag_msg: its size, and what is at its end."""
_ATTRIBUTE = struct.Struct("=HH")
_MOVED = struct.Struct("=120xQQ")
"""Of struct tcp_info: bytes_acked and bytes_received."""
_ROOM = 1 << 16
"""Bytes; the kernel puts 32 KiB into one datagram at most."""
_ANSWER = 1.0
"""Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that the sockets of a process have moved since it was first counted."""

    own: int = 0
    helpers: int = 0
    """By sockets of what descends from it alone: a loader's workers have their rank's, too."""


class Counter:
    """Counts from look to look, so that a socket counts on that was closed; not in two threads at once."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        """Of the last reading, by inode."""
        self._moved: dict[int, Moved] = {}
        """As the last count told."""

    def count(self, pids: Collection[int]) -> dict[int, Moved]:
        """By process, for these ranks. Their open files are looked at only where sockets have moved much, those of their
        descendants only where it was none of the ranks' own: a file is 5 us, and there may be 10,000."""
        now = read()
        moved, self._before = grown(self._before, now), now
        own = {pid: sockets(pid) & moved.keys() if moved else set() for pid in pids}
        rest = moved.keys() - set().union(*own.values())
        found = {}
        for pid in pids:
            theirs = set[int]()
            for helper in children.tree(pid)[1:] if rest else ():
                theirs |= sockets(helper) & rest
            before = self._moved.get(pid, Moved())
            found[pid] = Moved(
                own=before.own + sum(map(moved.__getitem__, own[pid])),
                helpers=before.helpers + sum(map(moved.__getitem__, theirs)),
            )
        self._moved = found
        return found


def read() -> dict[int, int]:
    """Bytes by the inode of each socket: those that its peer's kernel has taken, and those that came. Empty where the
    kernel does not tell, as gVisor's, or may not be asked. Takes each socket's lock, as who sends does while the memory
    that it sends is read from a disk: not for a loop that others need."""
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
            link.settimeout(_ANSWER)
            for family in (socket.AF_INET, socket.AF_INET6):
                link.send(request(family))
                over = False
                while not over:
                    told, over = parse(link.recv(_ROOM))
                    found |= told
    except OSError:
        return {}
    return found


def request(family: int) -> bytes:
    """For all sockets of this family that are connected."""
    ask = _ASK.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
    size = _HEADER.size + len(ask)
    return _HEADER.pack(size, _BY_FAMILY, _REQUEST | _DUMP, 0, 0) + ask


def parse(answer: bytes) -> tuple[dict[int, int], bool]:
    """Of one datagram: bytes by inode, and whether it is the last, or a refusal. What is no such answer tells nothing, and
    is the last."""
    found: dict[int, int] = {}
    with contextlib.suppress(struct.error):
        while answer:
            size, kind, *_ = _HEADER.unpack_from(answer)
            if kind in (_ERROR, _DONE) or size < _HEADER.size:
                return found, True
            body = answer[_HEADER.size : size]
            (inode,) = _INODE.unpack_from(body)
            if inode and (info := _info(body[_SOCKET:])):  # 0: no process has it any more
                found[inode] = sum(_MOVED.unpack_from(info))
            answer = answer[_aligned(size) :]
        return found, False
    return found, True


def _info(attributes: bytes) -> bytes:
    while attributes:
        size, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _INFO or size < _ATTRIBUTE.size:
            return attributes[_ATTRIBUTE.size : size]
        attributes = attributes[_aligned(size) :]
    return b""


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def grown(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Bytes by inode that sockets have moved from one reading to the next, but for heartbeats."""
    if not before:  # nothing was told
        return {}
    more = {inode: count - before.get(inode, 0) for inode, count in now.items()}
    return {inode: count for inode, count in more.items() if count >= LITTLE}

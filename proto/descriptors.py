"""Descriptors that come beside a message. Imports nothing that a guardian must not."""

import array
import os
import select
import socket
from collections.abc import Iterable


def receive(end: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """The next message and its descriptors, which no program that we execute inherits.

    (`socket.recv_fds` takes flags, and passes them on to nobody.) Raises OSError.
    """
    space = socket.CMSG_LEN(4 * most)
    try:
        data, control, _, _ = end.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it died with something unread; what it said before is still here
        data, control, _, _ = end.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def memory_file(data: bytes) -> int:
    """A memfd that holds `data`, to go beside a message that would be too long."""
    fd = os.memfd_create("elastic-message", os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def ready(fds: Iterable[int], timeout: float | None) -> set[int]:
    """Those that can be read, or have ended, once one can, or after `timeout` seconds; None: no limit.

    Of any number: `select.select` takes none above 1,023. Raises ValueError for one that is closed.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}


def close(fds: list[int]) -> None:
    """Those that nobody takes."""
    for fd in fds:
        os.close(fd)

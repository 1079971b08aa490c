"""Messages of frozen dataclasses between two processes of a host: one JSON object (`codec.py`) a
datagram of a SOCK_SEQPACKET pair, with descriptors beside it."""

import socket
from collections.abc import Sequence
from typing import Any

from elastic.proto import codec, descriptors
from elastic.proto.errors import CodecError

SIZE = 1 << 16
"""Bytes of one."""


def send(end: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Raises OSError; BlockingIOError where there is no room now."""
    socket.send_fds(end, [codec.dumps(message).encode()], list(fds), socket.MSG_NOSIGNAL)


def receive(end: socket.socket, kind: object, most_fds: int) -> tuple[Any, list[int]] | None:
    """The next message, of `kind` (a union), and its descriptors, ours from here on; None at the end.

    Raises `CodecError`, OSError.
    """
    data, fds = descriptors.receive(end, SIZE, most_fds)
    try:
        if data:
            return codec.loads(kind, data), fds
        descriptors.close(fds)
        return None
    except CodecError:
        descriptors.close(fds)
        raise

"""A console that is written to without ever waiting for whoever should read it."""

import contextlib
import os
import select
import stat
import time

CHUNK = 1 << 16
"""Bytes of one write where none can block."""


class Console:
    """A terminal, a pipe or a file, by its descriptor.

    A terminal that is stopped and a pipe that is full block a write. To set O_NONBLOCK would hurt the
    ranks, which share the open file description: so terminals and pipes are opened a second time.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._most = _open_again(fd)
        self._stuck: float | None = None

    def write(self, data: bytes) -> int:
        """How many bytes it takes now; all of them once nobody can ever read it."""
        try:
            if self._most == select.PIPE_BUF and not self.wait(0):
                taken = 0
            else:
                taken = os.write(self._fd, data[: self._most])
        except BlockingIOError:
            taken = 0
        except OSError:
            taken = len(data)
        if taken or self._stuck is None:
            self._stuck = time.monotonic() if taken < len(data) else None
        return taken

    @property
    def idle(self) -> float:
        """Seconds for which it has taken nothing of what it was given."""
        return 0.0 if self._stuck is None else time.monotonic() - self._stuck

    def wait(self, timeout: float) -> bool:
        """Until it may take something again, `timeout` seconds at most."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(max(0.0, timeout) * 1000))


def _open_again(fd: int) -> tuple[int, int]:
    """A description of our own, and how much of it one write may take.

    What has none (a socket, a terminal of somebody else after su) takes PIPE_BUF without blocking once
    it is ready, as a rule.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd, CHUNK
    if os.isatty(fd) or stat.S_ISFIFO(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", flags), CHUNK
    return fd, select.PIPE_BUF

"""The launcher's own lines on standard error, which must never hold up a job."""

import collections
import logging
import os
import select
import time

PATIENCE = 0.1
"""Seconds that one line waits for a slow reader."""
LAST_PATIENCE = 1.0
"""Seconds that the lines that are left get when the process ends."""
KEPT = 1000
"""Lines kept for a reader that does not come; older ones are dropped."""
LONGEST = select.PIPE_BUF
"""Bytes of a line; a pipe that is ready takes so many without blocking."""


class ConsoleHandler(logging.Handler):
    """Writes whole lines to a descriptor, and keeps them while nobody reads there.

    A terminal that is stopped or a pipe that is full would block a write, and with it the loop on
    which signals, ranks and the master are served.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lines: collections.deque[bytes] = collections.deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except (TypeError, ValueError):  # a message that does not fit its arguments
            self.handleError(record)
            return
        waiting = bool(self._lines)
        self._lines.extend(
            line.encode(errors="backslashreplace")[: LONGEST - 1] + b"\n"
            for line in text.splitlines()
        )
        self._write(0.0 if waiting else PATIENCE)

    def flush(self) -> None:
        self._write(LAST_PATIENCE)

    def _write(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while self._lines:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return
            try:
                os.write(self._fd, self._lines[0])
            except OSError:  # nobody will ever read it
                self._lines.clear()
                return
            self._lines.popleft()

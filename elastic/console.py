"""The launcher's own lines on standard error, which must never hold up a job."""

import collections
import logging
import os
import select
import time

from elastic.agent.logs.console import Console
from elastic.proto.visible import visible

PATIENCE = 0.1
"""Seconds that one line waits for a slow reader."""
LAST_PATIENCE = 1.0
"""Seconds that a reader may take nothing before the lines that are left are given up at the end."""
KEPT = 1000
"""Lines kept for a reader that does not come; older ones are dropped."""
LONGEST = select.PIPE_BUF
"""Bytes of a line, so that a pipe takes it as a whole."""


class ConsoleHandler(logging.Handler):
    """Writes whole lines to a descriptor, and keeps them while nobody reads there.

    A terminal that is stopped or a pipe that is full would block a write, and with it the loop on
    which signals, ranks and the master are served.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._console = Console(fd)
        self._lines: collections.deque[bytes] = collections.deque(maxlen=KEPT)
        os.register_at_fork(after_in_child=self._lines.clear)  # they are the parent's to write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except (TypeError, ValueError):  # a message that does not fit its arguments
            self.handleError(record)
            return
        patience = 0.0 if self._lines else PATIENCE
        self._lines.extend(
            visible(line).encode(errors="backslashreplace")[: LONGEST - 1] + b"\n"
            for line in text.splitlines()
        )
        self._write(patience)

    def flush(self) -> None:
        """At the end: as long as the reader goes on to read."""
        while self._lines:
            self._write(LAST_PATIENCE - self._console.idle)
            if self._console.idle >= LAST_PATIENCE:
                return

    def _write(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while self._lines:
            taken = self._console.write(self._lines[0])
            if taken == len(self._lines[0]):
                self._lines.popleft()
                continue
            self._lines[0] = self._lines[0][taken:]
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._console.wait(left)

"""What teed ranks write, on its way from their files to the console: one thread for each of the
launcher's two streams, over all rounds, that no console holds up.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from elastic.agent.logs.console import Console

log = logging.getLogger(__name__)

POLL = 0.1
"""Seconds between looks at teed files, as in torchrun."""
MOMENT = 1.0
"""Seconds that a round's last words get before the next round, if the console takes them."""
LAST_WORDS = 1.0
"""Seconds that the console may take nothing at the end of the job, before the rest is given up."""
CHUNK = 1 << 16
"""Bytes read at a time."""
LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is copied all the same."""


class Tail:
    """A file that a rank writes, read as it grows: whole lines, each with a prefix."""

    def __init__(self, path: Path, prefix: str, words: tuple[str, ...] = ()) -> None:
        """words: only lines with one of them; none: all lines. Raises OSError."""
        self._source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix = prefix.encode()
        self._words = tuple(word.encode() for word in words)
        self._rest = b""
        self._returned = False
        """What was read last ended in a carriage return; a newline that follows belongs to it."""

    def read(self) -> bytes:
        """Some of the lines that came; empty: there are none. As in torchrun, a carriage return ends
        a line too."""
        with contextlib.suppress(OSError):
            while data := os.read(self._source, CHUNK):
                data = data.removeprefix(b"\n") if self._returned else data
                self._returned = data.endswith(b"\r")
                text = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                *lines, self._rest = text.split(b"\n")
                if len(self._rest) > LONGEST_LINE:
                    lines, self._rest = [*lines, self._rest], b""
                if found := self._chosen(lines):
                    return found
        return b""

    def end(self) -> bytes:
        """A last line without an end; nothing is read any more."""
        os.close(self._source)
        return self._chosen([self._rest] if self._rest else [])

    def _chosen(self, lines: list[bytes]) -> bytes:
        return b"".join(
            self._prefix + line + b"\n"
            for line in lines
            if not self._words or any(word in line for word in self._words)
        )


class Shown:
    """What one round shows on one stream."""

    def __init__(self, tails: list[Tail]) -> None:
        self.tails = tails
        self.ended = False
        """Its ranks have ended."""


class Tee:
    """Shows rounds on a console, one after another."""

    def __init__(self, fd: int) -> None:
        self._console = Console(fd)
        self._rounds: list[Shown] = []
        """Not shown to their ends, oldest first; never more than two."""
        self._next = b""
        """Read, and not taken by the console yet."""
        self._taken = 0
        self._over = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tee", daemon=True)
        self._thread.start()

    def show(self, shown: Shown) -> None:
        """Show a round that begins. Of those before, the last at most may still wait for that."""
        with self._news:
            while len(self._rounds) > 1:
                for tail in self._rounds.pop(0).tails:
                    tail.end()
            self._rounds.append(shown)
            self._news.notify_all()

    def settle(self, shown: Shown) -> None:
        """Its ranks have ended: wait a moment until all of it is shown, unless nobody reads."""
        deadline = time.monotonic() + MOMENT
        with self._news:
            shown.ended = True
            self._news.notify_all()
            while (
                (shown in self._rounds or self._next)
                and self._console.idle < POLL
                and time.monotonic() < deadline
            ):
                self._news.wait(POLL)

    def finish(self) -> bool:
        """The job is over: wait for a console as long as it takes something; whether it took all."""
        with self._news:
            self._over = True
            for shown in self._rounds:
                shown.ended = True
            self._news.notify_all()
        while self._thread.is_alive() and self._console.idle < LAST_WORDS:
            before = self._taken
            self._thread.join(LAST_WORDS - self._console.idle)
            if self._taken == before:  # not for want of a reader: a file that cannot be read, say
                break
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._fetch():
            taken = self._console.write(self._next)
            with self._news:
                self._next = self._next[taken:]
                self._taken += taken
                if not taken:  # a console may say that it is ready, and take nothing
                    self._news.wait(POLL)
            if self._next:
                self._console.wait(POLL)

    def _fetch(self) -> bool:
        """Wait until there is something to write; False: there will be nothing."""
        with self._news:
            while not self._next:
                self._next = self._read()
                if not self._next:
                    self._news.notify_all()
                    if self._over:
                        return False
                    self._news.wait(POLL if self._rounds else None)
        return True

    def _read(self) -> bytes:
        """The next lines: of the oldest round that has any, each file in its turn."""
        for shown in list(self._rounds):
            for tail in list(shown.tails):
                if data := tail.read():
                    shown.tails.remove(tail)
                    shown.tails.append(tail)
                    return data
            while shown.ended and shown.tails:
                if data := shown.tails.pop().end():
                    return data
            if shown.ended:
                self._rounds.remove(shown)
        return b""


_tees: dict[int, Tee] = {}
"""Of this process, by descriptor."""


def tee(fd: int) -> Tee:
    """The one that writes to this process's standard output (1) or error (2)."""
    if fd not in _tees:
        _tees[fd] = Tee(fd)
    return _tees[fd]


def finish() -> None:
    """Show what is left, and say so where the console does not take it."""
    shown = [found.finish() for found in _tees.values()]
    if not all(shown):
        log.warning("the console takes no output: what it lacks is in the log files")

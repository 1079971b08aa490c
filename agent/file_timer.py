"""torch's countdown timers: who holds one for longer than it asked for is ended.

With TORCHELASTIC_ENABLE_FILE_TIMER=1, ranks find the name of a pipe in TORCHELASTIC_TIMER_FILE, as
under torchrun. The FileTimerClient of torch.distributed.elastic.timer writes a line of JSON there to
take a timer, and another one to give it back. Whatever else is written there is passed over.
"""

import asyncio
import contextlib
import json
import math
import os
import select
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elastic.proto.errors import UsageError

MOST = 10_000
"""Timers that are kept at a time; what is taken beyond them never ends."""


def pipe(environ: Mapping[str, str]) -> str | None:
    """Where the launcher with this environment has the pipe; None: it has none."""
    if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") != "1":
        return None
    usual = os.path.join(tempfile.gettempdir(), f"elastic-timers-{os.getpid()}")
    return environ.get("TORCHELASTIC_TIMER_FILE") or usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """What a process has taken, or, with an end before 0, given back."""

    pid: int
    scope: str
    end: float
    signal: int
    """What ends the process; 0 or less: nothing does."""


def parse(line: bytes) -> Timer | None:
    """One line of a client's; None for anything else."""
    try:
        told = json.loads(line)
        timer = Timer(
            pid=told["pid"],
            scope=told["scope_id"],
            end=float(told["expiration_time"]),
            signal=told["signal"],
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    whole = type(timer.pid) is type(timer.signal) is int and isinstance(timer.scope, str)
    return timer if whole and _makes_sense(timer) else None


def _makes_sense(timer: Timer) -> bool:
    known = timer.signal <= 0 or timer.signal in signal.valid_signals()
    return known and 0 < timer.pid < 2**31 and math.isfinite(timer.end)


class Timers:
    """Those that are held. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._rest = b""
        self._held: dict[tuple[int, str], Timer] = {}

    def feed(self, data: bytes, ahead: float) -> None:
        """Take what was written; `ahead`: seconds by which the clients' clock is before ours."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= select.PIPE_BUF else b""
        for timer in filter(None, map(parse, lines)):
            key = timer.pid, timer.scope
            if timer.end < 0:
                self._held.pop(key, None)
            elif key in self._held or len(self._held) < MOST:
                self._held[key] = replace(timer, end=timer.end - ahead)

    @property
    def next(self) -> float | None:
        """When the first of them is over."""
        return min((timer.end for timer in self._held.values()), default=None)

    def expired(self, now: float) -> list[Timer]:
        """Of each process with timers that are over, the first that ends it; all of its are gone."""
        over = sorted((t for t in self._held.values() if t.end <= now), key=lambda t: t.end)
        pids = {timer.pid for timer in over}
        self._held = {key: timer for key, timer in self._held.items() if timer.pid not in pids}
        ends: dict[int, Timer] = {}
        for timer in over:
            if timer.signal > 0:
                ends.setdefault(timer.pid, timer)
        return list(ends.values())


class Server:
    """The reading end of the pipe at `path`; `expired` is called with each timer that is over.

    Raises UsageError where there can be no pipe.
    """

    def __init__(self, path: str, expired: Callable[[Timer], None]) -> None:
        self._path = path
        self._expired = expired
        self._timers = Timers()
        self._alarm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        try:
            _remove(path)
            os.mkfifo(path, 0o600)
            # Also for writing: so it never comes to its end.
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"TORCHELASTIC_TIMER_FILE {path}: {error.strerror}") from error
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
            self._timers.feed(data, time.time() - self._loop.time())
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        end = self._timers.next
        self._alarm = None if end is None else self._loop.call_at(end, self._ring)

    def _ring(self) -> None:
        for timer in self._timers.expired(self._loop.time()):
            self._expired(timer)
        self._set_alarm()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        with contextlib.suppress(OSError):
            _remove(self._path)


def _remove(path: str) -> None:
    """A pipe of an earlier life; anything else is left, and in the way."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISFIFO(os.lstat(path).st_mode):
            os.unlink(path)

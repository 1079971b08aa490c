"""Keys of what is to be looked at: each once however often it was added, one worker a key, later with
growing pauses where it failed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from elastic.proto.errors import ElasticError

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST, MOST = 0.005, 300.0
"""Seconds before a key that failed comes again: the first time, and at most."""


class Queue(Generic[K]):
    """A key that is added while it is worked on comes once more, afterwards."""

    def __init__(self, *, first: float = FIRST, most: float = MOST) -> None:
        self._first, self._most = first, most
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()  # in _ready, or to go there once it is done
        self._working: set[K] = set()
        self._later: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._more = asyncio.Event()

    def __len__(self) -> int:
        """How many wait now."""
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Look at `key` as soon as a worker is free."""
        if key in self._waiting:
            return
        self._waiting.add(key)
        if key not in self._working:
            self._offer(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Look at `key` then, unless it is sooner already."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        waiting = self._later.get(key)
        if waiting is not None:
            if waiting.when() <= when:
                return
            waiting.cancel()
        self._later[key] = loop.call_at(when, self._due, key)

    async def get(self) -> K:
        """The next key; `done` or `failed` must follow. What it was to wait for is forgotten: it is
        looked at now, and says anew when it wants to be looked at again."""
        while not self._ready:
            self._more.clear()
            await self._more.wait()
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._working.add(key)
        if (timer := self._later.pop(key, None)) is not None:
            timer.cancel()
        return key

    def done(self, key: K, again: float | None = None) -> None:
        """It was looked at; again: seconds until it wants to be looked at once more."""
        self._failures.pop(key, None)
        if again is not None:
            self.add_after(key, again)
        self._finish(key)

    def failed(self, key: K) -> float:
        """It could not be; returns the seconds after which it comes again."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        pause = min(self._first * 2.0 ** min(failures, 64), self._most)
        self.add_after(key, pause)
        self._finish(key)
        return pause

    async def run(self, look: Callable[[K], Awaitable[float | None]], *, workers: int = 8) -> None:
        """Work until cancelled: `look` at each key, as many as `workers` at once; it answers with
        `done`'s `again`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(look))

    async def _work(self, look: Callable[[K], Awaitable[float | None]]) -> None:
        while True:
            key = await self.get()
            try:
                again = await look(key)
            except Exception as error:  # one bad object must not stop the others
                pause = self.failed(key)
                log.warning("%s: %s; again in %.3g s", key, error, pause, exc_info=_odd(error))
            else:
                self.done(key, again)

    def _due(self, key: K) -> None:
        del self._later[key]
        self.add(key)

    def _offer(self, key: K) -> None:
        self._ready.append(key)
        self._more.set()

    def _finish(self, key: K) -> None:
        self._working.discard(key)
        if key in self._waiting:
            self._offer(key)


def _odd(error: Exception) -> bool:
    """Whether an error is a bug of ours, whose place is worth knowing."""
    return not isinstance(error, ElasticError)

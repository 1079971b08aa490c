"""A starter that is built in the background, and built again when it dies: a standby, a nursery."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from elastic.agent.starters.starter import Starter
from elastic.proto.errors import StarterDied

log = logging.getLogger(__name__)

BUILD_TIMEOUT = 10.0
"""Seconds that building one takes at most while starts wait for it; then others start them."""
LONG_TIMEOUT = 600.0
"""The same of one that is to start all of them."""

QUICK = 10.0
"""Seconds; one that dies sooner, or before it is ready, was no use, and three in a row are the end of it."""


class Kept:
    """Nothing is built before `begin`, and nothing after `end`."""

    def __init__(
        self,
        kind: str,
        launch: Callable[[], Awaitable[Starter]],
        of_no_use: Callable[[str], None],
        extend: Callable[[Starter], Awaitable[None]] | None = None,
        *,
        awaited: bool = False,
    ) -> None:
        """launch raises OSError; of_no_use gets the reason why there will be none any more; extend
        does more with one that is ready. awaited: it is to start all, and waited for longer."""
        self.kind = kind
        self.starter: Starter | None = None
        self.ready = asyncio.Event()
        self._settled = asyncio.Event()
        """It is ready, or not worth waiting for."""
        self._launch = launch
        self._of_no_use = of_no_use
        self._extend = extend
        self._awaited = awaited
        self._begun = False
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def usable(self) -> Starter | None:
        """The starter, if it can fork something now."""
        starter = self.starter
        alive = starter is not None and self.ready.is_set() and not starter.died.is_set()
        return starter if alive else None

    async def wanted(self) -> Starter | None:
        """The same, after some time for the one that is being built: it imports what a spawned
        process would have to, and began before."""
        if self._begun:
            await self._settled.wait()
        return self.usable

    def begin(self) -> None:
        """Build it in the background, and again each time that it has died; once is enough."""
        if not self._begun:
            self._begun = True
            self._task = asyncio.get_running_loop().create_task(self._keep())
            self._task.add_done_callback(self._check)

    def _check(self, task: "asyncio.Task[None]") -> None:
        self._settled.set()
        if not task.cancelled():
            task.result()  # a bug is the loop's to tell

    async def _keep(self) -> None:
        quick_deaths = 0
        clock = asyncio.get_running_loop().time
        while not self._ended:
            born = clock()
            self._settled.clear()
            try:
                starter = self.starter = await self._launch()
            except OSError as error:
                log.info("no %s for now: %s", self.kind, error)
                self._begun = False
                return
            of_use = await self._live(starter)
            quick_deaths = 0 if of_use and clock() - born >= QUICK else quick_deaths + 1
            if not self._ended:
                log.info("the %s died after %.1f s", self.kind, clock() - born)
            if quick_deaths == 3:
                self._give_up(f"the {self.kind} died three times as soon as it was built")

    def end(self) -> None:
        """There will be none any more."""
        self._ended = True
        self._settled.set()
        self.ready.clear()
        if self.starter is not None:
            self.starter.kill()  # it holds torch in memory, for nobody

    async def _live(self, starter: Starter) -> bool:
        """See one through, from its start to its death; whether it was ready."""
        loop = asyncio.get_running_loop()
        told = loop.call_later(BUILD_TIMEOUT, self._say_late) if self._awaited else None
        limit = LONG_TIMEOUT if self._awaited else BUILD_TIMEOUT
        late = loop.call_later(limit, self._settled.set)
        prepared = loop.create_task(self._prepare(starter))
        try:
            await starter.died.wait()
        finally:
            of_use = self.ready.is_set()
            self.ready.clear()
            late.cancel()
            if told is not None:
                told.cancel()
            prepared.cancel()
        with contextlib.suppress(StarterDied, asyncio.CancelledError):
            await prepared
        return of_use

    def _say_late(self) -> None:
        if not self._settled.is_set():
            log.warning(
                "ranks wait for the %s, whose imports take more than %g s", self.kind, BUILD_TIMEOUT
            )

    async def _prepare(self, starter: Starter) -> None:
        ready = await starter.ready()
        if ready.threads != 1:
            self._give_up(f"torch left {ready.threads} threads in the {self.kind}")
            return
        self.ready.set()
        self._settled.set()
        log.info("the %s is ready", self.kind)
        if self._extend is not None:
            await self._extend(starter)

    def _give_up(self, reason: str) -> None:
        if not self._ended:
            self.end()
            self._of_no_use(reason)

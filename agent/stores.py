"""This node's stores: one spare, kept ready on a socket of our own, the one in use, and those of
rounds that are over, while ranks somewhere still have time to save.

Every round gets a fresh store. The socket is bound and listens from the start, so a rank that
comes before the store process is up just waits in the kernel's queue. Where no process of ours has
torch imported yet, one is started only for ranks that import it, or that wait in that queue: many a
script never does, and the import is seconds of a core.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

from elastic.agent import children
from elastic.agent.environment import mark, resolver
from elastic.agent.ports import connected, listen
from elastic.agent.settings import AgentSettings
from elastic.agent.starters.spec import StartSpec
from elastic.agent.starters.starters import Starters
from elastic.proto import env
from elastic.proto.errors import ElasticError, UsageError

log = logging.getLogger(__name__)


PAUSE = 0.2
"""Seconds before a spare store that died is made again."""
LOOK = 0.1
"""Seconds between looks at who is connected to a store; the kernel offers no event for it."""


class _Store:
    def __init__(self, listener: socket.socket, address: str) -> None:
        self.listener = listener
        self.address = address
        self.port = int(address.rpartition(":")[2] or 0)
        self.pid = 0
        self.ended: asyncio.Future[int] | None = None
        self.starting: asyncio.Task[None] | None = None
        self.lost = False
        """It died as a spare; another one is on its way."""

    def close(self) -> None:
        """Close our listener; where no process has a copy, whoever waits in its queue is refused."""
        if self.listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.listener)
            self.listener.close()


class Stores:
    """`lost` is called when the store in use dies, `changed` with each new spare's address."""

    def __init__(
        self,
        settings: AgentSettings,
        starters: Starters,
        lost: Callable[[], None],
        changed: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._starters = starters
        self._lost = lost
        self._changed = changed
        try:
            self._spare = self._bind()
        except OSError as error:
            raise UsageError(f"no port for a store: {error}; see --port-range") from error
        self._current: _Store | None = None
        self._retired: dict[_Store, asyncio.TimerHandle] = {}
        """Of rounds that are over while their ranks use their grace, oldest first."""

    @property
    def address(self) -> str:
        """host:port of the spare."""
        return self._spare.address

    @property
    def pids(self) -> set[int]:
        return {store.pid for store in self._wanted() if store.pid}

    def _wanted(self) -> list[_Store]:
        current = [] if self._current is None else [self._current]
        return [self._spare, *current, *self._retired]

    def _bind(self) -> _Store:
        low_high = self._settings.ports
        ports = range(low_high[0], low_high[1] + 1) if low_high else None
        listener = listen(self._settings.host, ports)
        port = listener.getsockname()[1]
        host = self._settings.host
        return _Store(listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    def use(self, address: str) -> bool:
        """Serve a round whose store is at `address`; False where that is no spare store of ours.

        It is another node's then, or one that died before the master heard of its successor.
        """
        self.retire()
        if address != self._spare.address or self._spare.lost:
            return False
        self._current = self._spare
        if self._starters.forks_stores:
            self._ensure(self._current)
        elif self._current.starting is None:
            asyncio.get_running_loop().add_reader(
                self._current.listener, self._ensure, self._current
            )
        self._renew()
        return True

    def expected(self) -> None:
        """A rank imports torch: the store in use does so beside it, before it is asked."""
        if self._current is not None:
            self._ensure(self._current)

    def serve(self, address: str) -> None:
        """Nodes meet at our spare before a round does, if it is that."""
        if address == self._spare.address and not self._spare.lost:
            self._ensure(self._spare)

    def retire(self, grace: float = 0.0) -> None:
        """The round of the store in use is over; ranks, here and elsewhere, get `grace` seconds."""
        store, self._current = self._current, None
        if store is not None and grace > 0:
            later = asyncio.get_running_loop().call_later
            self._retired[store] = later(grace, self._end, store)
        elif store is not None:
            self._end(store)

    def give_time(self, grace: float) -> None:
        """Ranks of rounds that are over get `grace` seconds from now, if they had less."""
        loop = asyncio.get_running_loop()
        for store, timer in self._retired.items():
            timer.cancel()
            until = max(timer.when(), loop.time() + grace)
            self._retired[store] = loop.call_at(until, self._end, store)

    async def unused(self) -> None:
        """Wait until no rank of another node uses the store of a round that is over, or its time is."""
        said = False
        while any(connected(store.port, store.pid) for store in self._retired):
            if not said:
                said = True
                log.info("ranks of other nodes still use the store of this one: it stays")
            await asyncio.sleep(LOOK)

    def discard(self, address: str) -> None:
        """A round took this spare and ended before we heard of it: it is no fresh one any more."""
        if address and address == self._spare.address:
            self._end(self._spare)
            self._renew()

    def _renew(self) -> None:
        try:
            self._spare = self._bind()
        except OSError as error:
            if self._retired:  # the round to come is worth more than one that is over
                self._end(next(iter(self._retired)))
            else:
                log.error("no port for a store: %s; see --port-range", error)
            self._spare.lost = True
            asyncio.get_running_loop().call_later(PAUSE, self._renew_after, self._spare)
            return
        if self._starters.forks_stores:
            self._ensure(self._spare)  # a fork, in milliseconds; an exec would cost ranks a core
        self._changed(self._spare.address)

    def _ensure(self, store: _Store) -> None:
        if store.starting is None:
            asyncio.get_running_loop().remove_reader(store.listener)
            store.starting = asyncio.get_running_loop().create_task(self._start(store))

    async def _start(self, store: _Store) -> None:
        work = self._settings.workload
        base = dict(work.environ)
        spec = StartSpec(
            kind="store",
            target=self._settings.host,
            environ=base | resolver(base) | {env.MARK: mark(self._settings, 0)},
            cwd=work.cwd if os.path.isdir(work.cwd) else "/",
            python=work.python,
        )
        try:
            # The number stays ours, whoever closes the listener meanwhile.
            with socket.socket(fileno=os.dup(store.listener.fileno())) as own:
                _, store.pid = await self._starters.start(spec, {"listen": own.fileno()})
        except (ElasticError, OSError) as error:
            if store in self._wanted():
                log.error("a store cannot be started: %s", error)
                store.close()  # so that who waits in its queue is told
                self._died(store)
            return
        store.close()
        store.ended = children.watch(store.pid)
        store.ended.add_done_callback(lambda _: self._died(store))
        if store not in self._wanted():
            self._end(store)

    def _died(self, store: _Store) -> None:
        store.pid = 0
        self._forget(store)
        if store is self._current:
            self._current = None
            self._lost()
        elif store is self._spare:
            store.lost = True
            asyncio.get_running_loop().call_later(PAUSE, self._renew_after, store)

    def _renew_after(self, store: _Store) -> None:
        if store is self._spare:
            self._renew()

    def _forget(self, store: _Store) -> None:
        if store in self._retired:
            self._retired.pop(store).cancel()

    def _end(self, store: _Store) -> None:
        self._forget(store)
        if store.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(store.pid, signal.SIGKILL)
        else:
            store.close()

    def kill(self) -> None:
        """For good; who sweeps reaps them."""
        self.retire()
        spare, self._spare = self._spare, _Store(socket.socket(), "")
        for store in (spare, *self._retired):
            self._end(store)

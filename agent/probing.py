"""Probes this node when the master wants that, before its ranks run, alone or with others, and tells what came of
it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from elastic.agent.environment import resolver
from elastic.agent.probes.run import Prober, devices
from elastic.agent.probes.together import Testing
from elastic.agent.settings import AgentSettings
from elastic.proto import master_pb2 as pb

log = logging.getLogger(__name__)


class Probing:
    """One agent's."""

    def __init__(
        self,
        settings: AgentSettings,
        send: Callable[[pb.FromAgent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        cleared: Callable[[], Awaitable[None]],
        serve: Callable[[str], None],
    ) -> None:
        """cleared: returns once the ranks before are gone; serve: have a store of ours answer, if it is that."""
        self._settings = settings
        self._send = send
        self._spawn = spawn
        self._cleared = cleared
        self._serve = serve
        self._number = 0
        """Of the probe that was asked for last."""
        self._running: Prober | Testing | None = None
        self._told: pb.FromAgent | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pids(self) -> set[int]:
        """Processes of ours that probe."""
        return set() if self._running is None else self._running.pids

    def obey(self, order: pb.Probe) -> None:
        """Said again with each directive until it is answered; number 0: nobody wants to know, or not any more."""
        if not order.number:
            if self._told is None:
                self._number = 0
                self.cancel()
            return
        if order.number != self._number:
            self._number, self._told = order.number, None
            self.cancel()
            self._task = self._spawn(self._probe(order, self._task))
        elif self._told is not None:  # the answer was lost
            self._send(self._told)

    def cancel(self) -> None:
        """What runs of it is ended."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self, order: pb.Probe, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])  # its processes would disturb ours
        environ = dict(self._settings.workload.environ)
        if order.HasField("pairs"):
            for store in set(order.pairs.stores):
                self._serve(store)
            await self._cleared()
            self._told = await self._with_others(order, environ | resolver(environ))
        else:
            self._told = await self._alone(order, environ)
        self._send(self._told)

    async def _alone(self, order: pb.Probe, environ: dict[str, str]) -> pb.FromAgent:
        log.info("probing this node, %s", order.level)
        folder = self._settings.logs.run_dir or Path(environ.get("TMPDIR") or "/tmp")
        found = pb.Probed(number=order.number, level=order.level)
        mine = devices(environ)
        found.device, found.devices = "cuda" if mine[0].nvml else "cpu", len(mine)
        self._running = prober = Prober(
            order.level,
            devices=mine,
            folders=[folder],
            environ=environ,
            python=self._settings.workload.python,
        )
        try:
            verdict = await prober.probe(self._cleared())
        except OSError as error:  # no process can be started
            found.state, found.what = "unknown", str(error)
            return pb.FromAgent(probed=found)
        for fault in verdict.faults:
            said = ": ".join(filter(None, (fault.probe, fault.device, fault.what)))
            log.error("this node is faulty: %s", said)
        found.state, found.what, found.seconds = verdict.state, verdict.what, verdict.seconds
        return pb.FromAgent(probed=found)

    async def _with_others(self, order: pb.Probe, environ: dict[str, str]) -> pb.FromAgent:
        asked = order.pairs
        python = self._settings.workload.python
        self._running = testing = Testing(asked, devices(environ), environ, python)
        try:
            said = await testing.run()
        except OSError as error:  # no process can be started
            said = pb.Paired(state="unknown", what=str(error))
        said.number = order.number
        return pb.FromAgent(paired=said)

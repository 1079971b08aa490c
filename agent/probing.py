"""Probes this node when the master wants that, before its ranks run, and tells what came of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from elastic.agent.probes.run import Prober, devices
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
    ) -> None:
        """cleared: returns once the ranks before are gone."""
        self._settings = settings
        self._send = send
        self._spawn = spawn
        self._cleared = cleared
        self._number = 0
        """Of the probe that was asked for last."""
        self._prober: Prober | None = None
        self._told: pb.Probed | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pids(self) -> set[int]:
        """Processes of ours that probe."""
        return set() if self._prober is None else self._prober.pids

    def obey(self, order: pb.Probe) -> None:
        """Said again with each directive until it is answered; number 0: nobody wants to know."""
        if not order.number:
            return
        if order.number != self._number:
            self._number, self._told = order.number, None
            self.cancel()
            self._task = self._spawn(self._probe(order))
        elif self._told is not None:  # the answer was lost
            self._send(pb.FromAgent(probed=self._told))

    def cancel(self) -> None:
        """What runs of it is ended."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self, order: pb.Probe) -> None:
        await self._cleared()
        environ = dict(self._settings.workload.environ)
        folder = self._settings.logs.run_dir or Path(environ.get("TMPDIR") or "/tmp")
        log.info("probing this node, %s", order.level)
        self._prober = Prober(
            order.level, devices=devices(environ), folders=[folder], environ=environ
        )
        try:
            verdict = await self._prober.probe()
        except OSError as error:  # no process can be started
            self._tell(order, pb.Probed(state="unknown", what=str(error)))
            return
        for fault in verdict.faults:
            log.error("%s", " ".join(filter(None, (fault.probe, fault.device, fault.what))))
        self._tell(
            order, pb.Probed(state=verdict.state, what=verdict.what, seconds=verdict.seconds)
        )

    def _tell(self, order: pb.Probe, found: pb.Probed) -> None:
        found.number, found.level = order.number, order.level
        self._told = found
        self._send(pb.FromAgent(probed=found))

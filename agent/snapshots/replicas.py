"""This node's images for other nodes, and theirs for this one: what the courier is asked to do."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from elastic.agent.ports import listen
from elastic.agent.settings import AgentSettings
from elastic.agent.snapshots.side_process import SideProcess
from elastic.proto import courier
from elastic.proto.courier import Drop, Failed, Fetch, Fetched, Forget, Hold, Serve, Tls
from elastic.proto.moment import Moment

log = logging.getLogger(__name__)

RETRY = 2.0
"""Seconds until another node is asked again."""


@dataclass(slots=True, kw_only=True)
class _Task:
    """One image that is fetched, until it is there."""

    message: Fetch
    fd: int
    """Of the slot; the caller's."""
    complaint: str = ""
    again: asyncio.TimerHandle | None = None


class Replicas:
    """`changed` is called with a checkpoint of which a replica has come, or cannot."""

    def __init__(self, settings: AgentSettings, changed: Callable[[str], None]) -> None:
        self._settings = settings
        self._changed = changed
        self._side = SideProcess(
            settings, "elastic.checkpoint.keeper.courier", courier.ToAgent, self._heard, self._lost
        )
        self._listener: socket.socket | None = None
        self._secret = secrets.token_hex(16)
        self._slots: dict[str, tuple[str, int]] = {}
        """Name to checkpoint and descriptor, which is the caller's."""
        self._tasks: dict[int, _Task] = {}
        self._ids = 0
        self.unfit: set[tuple[str, Moment]] = set()
        """What could not be fetched, for good."""

    @property
    def pids(self) -> set[int]:
        return self._side.pids

    def kill(self) -> None:
        self._side.kill()

    @property
    def tls(self) -> Tls | None:
        """What other nodes' couriers and ours show one another."""
        security = self._settings.security
        if security.cert is None:
            return None
        return Tls(cert=str(security.cert), key=str(security.key), ca=str(security.ca))

    @property
    def base(self) -> str:
        """Where this node's images are served; empty while there are none."""
        if self._listener is None:
            return ""
        host = self._settings.host
        scheme = "http" if self.tls is None else "https"
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{self._listener.getsockname()[1]}/{self._secret}"

    # --- our images ---

    def hold(self, name: str, checkpoint: str, fd: int) -> None:
        """Serve what is in this slot until `drop`. A courier that is not there yet begins in a moment,
        for it is to know all slots before anybody hears where it listens."""
        self._slots[name] = checkpoint, fd
        if self._side.running:
            self._ask(Hold(name=name, checkpoint=checkpoint), fd)
        elif self._settings.host and self._settings.several_nodes:
            asyncio.get_running_loop().call_soon(self._again)

    def drop(self, name: str) -> None:
        """The slot's descriptor is about to be closed."""
        _, fd = self._slots.pop(name)
        for number in [n for n, task in self._tasks.items() if task.fd == fd]:
            self._forget(number)
        if self._side.running:
            self._ask(Drop(name=name))

    def _begin(self) -> None:
        """Start the courier, and tell it all: what it holds before it serves."""
        if self._listener is None:
            ports = self._settings.ports
            try:
                span = range(ports[0], ports[1] + 1) if ports else None
                self._listener = listen(self._settings.host, span)
            except OSError as error:
                log.error("no port to serve snapshots on: %s; see --port-range", error)
                return
        for name, (checkpoint, fd) in self._slots.items():
            self._ask(Hold(name=name, checkpoint=checkpoint), fd)
        self._ask(Serve(secret=self._secret, tls=self.tls), self._listener.fileno())
        for task in self._tasks.values():
            if task.again is None:
                self._ask(task.message, task.fd)

    def _ask(self, message: courier.ToCourier, *fds: int) -> None:
        try:
            self._side.ask(message, fds)
        except OSError as error:
            log.error("the courier cannot be asked: %s", error)

    # --- theirs ---

    def fetching(self, checkpoint: str) -> set[tuple[Moment, int]]:
        """Which images, by moment and rank, are on their way."""
        return {
            (Moment(task.message.round, task.message.step), task.message.rank)
            for task in self._tasks.values()
            if task.message.checkpoint == checkpoint
        }

    def fetch(
        self,
        checkpoint: str,
        moment: Moment,
        rank: int,
        base: str,
        fd: int,
        bandwidth: int | None,
    ) -> None:
        """Copy an image that `base` serves into a slot, whose descriptor stays the caller's."""
        self._ids += 1
        message = Fetch(
            id=self._ids,
            base=base,
            checkpoint=checkpoint,
            round=moment.round,
            step=moment.step,
            rank=rank,
            bandwidth=bandwidth,
        )
        self._tasks[message.id] = _Task(message=message, fd=fd)
        self._send(self._tasks[message.id])

    def only(self, checkpoint: str, wanted: set[tuple[Moment, int, str]]) -> None:
        """Of a checkpoint, give up what is fetched beyond these images of these bases, and forget what
        else could not be had: who wants it no more has heard of that."""
        for number, task in list(self._tasks.items()):
            message = task.message
            found = (Moment(message.round, message.step), message.rank, message.base)
            if message.checkpoint == checkpoint and found not in wanted:
                self._forget(number)
        moments = {moment for moment, _, _ in wanted}
        self.unfit -= {one for one in self.unfit if one[0] == checkpoint and one[1] not in moments}

    def _forget(self, number: int) -> None:
        task = self._tasks.pop(number)
        if task.again is not None:
            task.again.cancel()
        elif self._side.running:
            self._ask(Forget(id=number))

    def _send(self, task: _Task) -> None:
        task.again = None
        if self._side.running:
            self._ask(task.message, task.fd)
        else:
            self._begin()  # which asks for all that there is

    def _heard(self, answer: Fetched | Failed) -> None:
        task = self._tasks.get(answer.id)
        if task is None:
            return
        message = task.message
        if isinstance(answer, Failed) and not answer.gone:
            if answer.error != task.complaint:
                task.complaint = answer.error
                log.warning("the replica of rank %d is late: %s", message.rank, answer.error)
            task.again = asyncio.get_running_loop().call_later(RETRY, self._send, task)
            return
        del self._tasks[answer.id]
        if isinstance(answer, Failed):
            moment = Moment(message.round, message.step)
            log.warning(
                "step %d of rank %d has no replica: %s", moment.step, message.rank, answer.error
            )
            self.unfit.add((message.checkpoint, moment))
        self._changed(message.checkpoint)

    def _lost(self, young: bool) -> None:
        """The courier died: another one is told all."""
        if not young:
            self._again()
        else:
            asyncio.get_running_loop().call_later(RETRY, self._again)

    def _again(self) -> None:
        if not self._side.running and not self._side.over:
            self._begin()

"""What of this node's snapshots goes to storage: one moment at a time, by a process of its own.

A slot is claimed here before anybody hears that its moment is whole, so no rank can write over it
between the order and the reading of it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic.agent import boot
from elastic.agent.environment import mark
from elastic.agent.settings import AgentSettings
from elastic.agent.starter import memory_file
from elastic.proto import env, flusher, manifest, slot
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import CodecError

log = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds until storage is tried again."""
REMEMBERED = 8
"""Moments of a checkpoint whose files this node remembers."""

Key = tuple[int, int]
"""Round and step."""


@dataclass(slots=True)
class Written:
    """What this node has on storage of one moment."""

    world_size: int
    shards: dict[int, pb.Shard] = field(default_factory=dict[int, pb.Shard])
    committed: bool = False


@dataclass(slots=True, kw_only=True)
class _Task:
    """One file that the flusher writes, until it is done."""

    checkpoint: str
    moment: Key
    message: flusher.ToFlusher
    fd: int
    """Of a slot, with a claim on it, or of a manifest; ours."""
    rank: int | None = None
    world_size: int = 0
    complaint: str = ""
    """The last that was said of it."""
    again: asyncio.TimerHandle | None = None
    """When it is tried again."""


class Flushes:
    """`changed` is called with a checkpoint of which there is news for the master."""

    def __init__(self, settings: AgentSettings, changed: Callable[[str], None]) -> None:
        self._settings = settings
        self._changed = changed
        self.written: dict[str, dict[Key, Written]] = {}
        """By checkpoint."""
        self.damaged: set[tuple[str, Key, int]] = set()
        """Checkpoint, moment and rank of slots that do not hold what they were to."""
        self._tasks: dict[int, _Task] = {}
        self._ids = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._began = 0.0
        """When the process was started."""
        self._over = False

    @property
    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    def busy(self, checkpoint: str) -> bool:
        """A moment of it is being written."""
        return any(task.checkpoint == checkpoint for task in self._tasks.values())

    def write(
        self, checkpoint: str, job: str, moment: Key, world_size: int, slots: Mapping[int, int]
    ) -> None:
        """Write these ranks' shards; slots: their descriptors, which stay the caller's."""
        folder = Path(checkpoint, manifest.folder(moment[1]))
        for rank, fd in slots.items():
            claim = slot.claim(fd, exclusive=False)
            if claim is None:
                continue  # it is being written, so it holds the moment no more
            path = folder / manifest.file(rank, world_size, moment[0], job)
            message = flusher.Write(
                id=self._next(), path=str(path), round=moment[0], step=moment[1]
            )
            self._start(
                _Task(
                    checkpoint=checkpoint, moment=moment, message=message, fd=claim, rank=rank,
                    world_size=world_size,
                )
            )  # fmt: skip

    def commit(self, checkpoint: str, job: str, order: pb.Commit) -> None:
        """Write a manifest, unless that is done or on its way."""
        moment = (order.moment.round, order.moment.step)
        known = self.written.get(checkpoint, {}).get(moment)
        on_its_way = any(
            (task.checkpoint, task.moment, task.rank) == (checkpoint, moment, None)
            for task in self._tasks.values()
        )
        if on_its_way or (known is not None and known.committed):
            return
        world_size = len(order.shards)
        text = manifest.dumps(
            manifest.Manifest(
                job=job,
                sequence=0,  # the flusher looks which it is
                round=moment[0],
                step=moment[1],
                world_size=world_size,
                shards=tuple(
                    manifest.Shard(
                        rank=shard.rank,
                        file=manifest.file(shard.rank, world_size, moment[0], job),
                        bytes=shard.bytes,
                        digest=shard.digest,
                    )
                    for shard in order.shards
                ),
            )
        )
        path = Path(checkpoint, manifest.folder(moment[1]), manifest.NAME)
        message = flusher.Commit(id=self._next(), path=str(path))
        fd = memory_file(text.encode())
        self._start(_Task(checkpoint=checkpoint, moment=moment, message=message, fd=fd))

    def _next(self) -> int:
        self._ids += 1
        return self._ids

    # --- the process -------------------------------------------------------------------------

    def _start(self, task: _Task) -> None:
        self._tasks[task.message.id] = task
        self._send(task)

    def _send(self, task: _Task) -> None:
        """Ask for it, once: who is asked twice writes over what is on storage already."""
        if task.again is not None:
            task.again.cancel()
            task.again = None
        if self._over:
            return
        try:
            flusher.send(self._connection(), task.message, (task.fd,))
        except OSError as error:
            self._later(task, f"the flusher cannot be asked: {error}")

    def _connection(self) -> socket.socket:
        if self._end is None:
            end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.ExitStack() as undo, theirs:
                undo.callback(end.close)
                self._process = subprocess.Popen(
                    boot.command(
                        self._settings.workload.python,
                        "elastic.checkpoint.flusher",
                        str(theirs.fileno()),
                    ),
                    cwd="/",
                    env={**self._settings.workload.environ, env.MARK: mark(self._settings, 0)},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
                undo.pop_all()
            loop = asyncio.get_running_loop()
            self._end, self._began = end, loop.time()
            end.setblocking(False)
            loop.add_reader(end, self._readable, end)
        return self._end

    def _readable(self, end: socket.socket) -> None:
        try:
            received = flusher.receive(end, flusher.ToAgent)
        except BlockingIOError:
            return
        except (OSError, CodecError):
            received = None
        if received is None:
            self._lost(end)
            return
        message, _ = received
        if isinstance(message, flusher.Failed):
            if (task := self._tasks.get(message.id)) is not None:
                if message.damaged:
                    self._give_up(task, message.error)
                else:
                    self._later(task, message.error)
        elif isinstance(message, flusher.Done) and message.id in self._tasks:
            self._done(self._tasks.pop(message.id), message)

    def _lost(self, end: socket.socket) -> None:
        """It died; what it had to do is done by another, at once unless this one died young."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(end)
        end.close()
        self._end = None
        if self._over:
            return
        if self._process is not None:
            self._process.kill()
        self._process = None  # who reaps orphans reaps it; a disk that hangs may hold it for long
        log.warning("the flusher died and is started again")
        young = loop.time() - self._began < RETRY
        for task in list(self._tasks.values()):
            if young:
                self._later(task, "the flusher died")
            else:
                self._send(task)

    def _give_up(self, task: _Task, error: str) -> None:
        """Another try would find the same."""
        log.error("checkpoint %s: step %d: %s", task.checkpoint, task.moment[1], error)
        del self._tasks[task.message.id]
        os.close(task.fd)
        if task.rank is not None:
            self.damaged.add((task.checkpoint, task.moment, task.rank))
        self._changed(task.checkpoint)

    def _later(self, task: _Task, error: str) -> None:
        """Storage fails: say so, once, and try again."""
        if error != task.complaint:
            task.complaint = error
            log.error("checkpoint %s is not on storage yet: %s", task.checkpoint, error)
        if task.again is not None:
            task.again.cancel()
        task.again = asyncio.get_running_loop().call_later(RETRY, self._send, task)

    def _done(self, task: _Task, message: flusher.Done) -> None:
        os.close(task.fd)
        known = self.written.setdefault(task.checkpoint, {})
        written = known.setdefault(task.moment, Written(task.world_size))
        if task.rank is None:
            written.committed = True
            log.info("checkpoint %s: step %d is on storage", task.checkpoint, task.moment[1])
        else:
            written.shards[task.rank] = pb.Shard(
                rank=task.rank, bytes=message.bytes, digest=message.digest
            )
        newest = max((key for key in known if known[key].committed), default=None)
        for old in sorted(known)[:-REMEMBERED]:
            if newest is not None and old < newest:
                del known[old]
        self._changed(task.checkpoint)

    def kill(self) -> None:
        """End the process, at the end of this agent."""
        self._over = True
        if self._process is not None:
            self._process.kill()

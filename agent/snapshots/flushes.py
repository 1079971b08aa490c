"""What of this node's snapshots goes to storage: one moment of a checkpoint at a time, by a process of
its own, so that a storage that hangs delays no other checkpoint.

A slot is claimed here before anybody hears that its moment is whole, so no rank can write over it
between the order and the reading of it.
"""

import asyncio
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic.agent.settings import AgentSettings
from elastic.agent.snapshots.side_process import SideProcess
from elastic.proto import descriptors, flusher, keeper, manifest, slot
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import ProtocolMismatch, SlotError
from elastic.proto.terms import Terms

log = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds until storage is tried again."""
DEATHS = 3
"""Of flushers that have done nothing; then that counts as a failure of storage."""
SILENCE = 30.0
"""Seconds without a word of the flusher, after which storage is said to hang."""
IDLE = 60.0
"""Seconds without anything to do, after which the flusher is ended; it takes some 20 MB of memory."""
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
    value: float | None = None
    """What the script gave with it."""


@dataclass(slots=True, kw_only=True)
class _Task:
    """One thing that the flusher does, until it is done."""

    moment: Key
    message: flusher.ToFlusher
    fd: int | None = None
    """Of a slot, with a claim on it, or of a manifest; ours."""
    rank: int | None = None
    world_size: int = 0
    complaint: str = ""
    """Why it is not done yet."""
    again: asyncio.TimerHandle | None = None
    """When it is tried again."""


class Flushes:
    """Of one checkpoint. `changed` is called when there is news of it for the master."""

    def __init__(
        self, settings: AgentSettings, checkpoint: str, changed: Callable[[], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._changed = changed
        self.written: dict[Key, Written] = {}
        self.damaged: dict[tuple[Key, int], str] = {}
        """By moment and rank, how slots do not hold what they were to."""
        self.terms = Terms()
        """How it is kept, once its ranks have said so."""
        self._lost = keeper.Stalled()
        """What will never be on storage, and why, until something later is."""
        self._tries = 0
        """How many were in vain: each is told to those who wait."""
        self._said: set[str] = set()
        """Complaints that were logged since the last commit."""
        self._beside: set[str] = set()
        """Other jobs that save to the same checkpoint, as was said."""
        self._quiet: asyncio.TimerHandle | None = None
        """The flusher says nothing: it hangs, or has nothing to do."""
        self._tasks: dict[int, _Task] = {}
        self._looks: dict[int, asyncio.Future[flusher.Found | str]] = {}
        self._ids = 0
        self._deaths = 0
        """Of flushers, since one last said something."""
        self._side = SideProcess(
            settings, "elastic.checkpoint.storage.flusher", flusher.ToAgent, self._heard, self._died
        )

    @property
    def pids(self) -> set[int]:
        return self._side.pids

    @property
    def busy(self) -> bool:
        """A moment is being written."""
        return bool(self._tasks)

    @property
    def complaint(self) -> keeper.Stalled:
        """Why something is not on storage yet; empty where all goes well."""
        tasks = self._tasks.values()
        reason = next((task.complaint for task in tasks if task.complaint), "")
        return keeper.Stalled(reason=reason, tries=self._tries) if reason else self._lost

    def write(self, job: str, moment: Key, world_size: int, slots: Mapping[int, int]) -> bool:
        """Write these ranks' shards; slots: their descriptors, which stay the caller's. Whether there
        is any to be written: it may be on storage, its slot written over by now or known as damaged."""
        done = self.written.get(moment)
        for rank, fd in slots.items():
            if done is not None and rank in done.shards:
                continue
            if (moment, rank) in self.damaged:
                continue
            claim = slot.claim(fd, exclusive=False)
            if claim is None:
                continue
            if _moment(claim) != moment:
                os.close(claim)
                continue
            message = flusher.Write(
                id=self._next(),
                checkpoint=self._checkpoint,
                storage_options=self.terms.storage_options,
                job=job,
                round=moment[0],
                step=moment[1],
                file=manifest.file(rank, world_size, moment[0], job),
            )
            self._start(
                _Task(moment=moment, message=message, fd=claim, rank=rank, world_size=world_size)
            )
        return self.busy

    def commit(self, job: str, order: pb.Commit) -> None:
        """Write a manifest, unless that is done or on its way."""
        moment = (order.moment.round, order.moment.step)
        known = self.written.get(moment)
        on_its_way = any(
            task.moment == moment
            for task in self._tasks.values()
            if isinstance(task.message, flusher.Commit)
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
                value=None if known is None else known.value,
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
        message = flusher.Commit(
            id=self._next(),
            checkpoint=self._checkpoint,
            storage_options=self.terms.storage_options,
        )
        fd = descriptors.memory_file(text.encode())
        self._start(_Task(moment=moment, message=message, fd=fd))

    def _delete(self, moment: Key) -> None:
        """What is not to be kept, now that a later moment is committed, and what crashes have left."""
        terms = self.terms
        message = flusher.Delete(
            id=self._next(),
            checkpoint=self._checkpoint,
            storage_options=terms.storage_options,
            retention=terms.retention,
        )
        self._start(_Task(moment=moment, message=message))

    async def look(self, step: int) -> flusher.Found | str:
        """Whether a step is on storage; else why not. It waits for what is being written."""
        message = flusher.Look(
            id=self._next(),
            checkpoint=self._checkpoint,
            storage_options=self.terms.storage_options,
            step=step,
        )
        answer = self._looks[message.id] = asyncio.get_running_loop().create_future()
        try:
            self._side.ask(message)
            found: flusher.Found | str = await answer
            return found
        except OSError as error:
            return f"the flusher cannot be asked: {error}"
        finally:
            del self._looks[message.id]

    def _next(self) -> int:
        self._ids += 1
        return self._ids

    # --- the process -------------------------------------------------------------------------

    def _start(self, task: _Task) -> None:
        if not self._tasks:
            self._hush()
        self._tasks[task.message.id] = task
        self._send(task)

    def _send(self, task: _Task) -> None:
        """Ask for it, once: who is asked twice writes over what is on storage already."""
        if task.again is not None:
            task.again.cancel()
            task.again = None
        if self._side.over:
            return
        try:
            fds = () if task.fd is None else (task.fd,)
            self._side.ask(task.message, fds)
            if self._quiet is None:
                self._listen()
        except OSError as error:
            self._later(task, f"the flusher cannot be asked: {error}")

    def _listen(self) -> None:
        """The flusher has had its say: from here on its silence counts."""
        self._hush()
        if self._side.over:
            return
        later = asyncio.get_running_loop().call_later
        if any(task.again is None for task in self._tasks.values()):
            self._quiet = later(SILENCE, self._hangs)
        elif not self._tasks:
            self._quiet = later(IDLE, self._rest)

    def _hush(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def _hangs(self) -> None:
        self._quiet = asyncio.get_running_loop().call_later(SILENCE, self._hangs)
        for task in list(self._tasks.values()):
            if task.again is None:
                self._complain(
                    task, f"it does not answer for {SILENCE:g} s: is it mounted, is it up?"
                )

    def _rest(self) -> None:
        self._quiet = None
        if not self._looks:
            self._side.rest()

    def _heard(self, message: flusher.ToAgent) -> None:
        if isinstance(message, flusher.Found | flusher.Failed) and message.id in self._looks:
            found = message.error if isinstance(message, flusher.Failed) else message
            self._looks[message.id].set_result(found)
            self._listen()
            return
        self._deaths = 0
        task = self._tasks.get(message.id)
        if task is None:
            return
        if isinstance(message, flusher.Progress):
            self._well(task)
        elif isinstance(message, flusher.Done):
            self._done(task, message)
        elif isinstance(message, flusher.Failed):
            if isinstance(task.message, flusher.Delete):
                log.warning("checkpoint %s keeps old steps: %s", self._checkpoint, message.error)
                self._end_of(task)
                self._changed()
            elif message.damaged:
                self._give_up(task, message.error)
            else:
                self._later(task, message.error)
        self._listen()

    def _died(self, young: bool) -> None:
        """What it had to do is done by another, at once unless this one died young."""
        for look in self._looks.values():
            if not look.done():
                look.set_result("the flusher died")
        self._deaths += 1
        for task in list(self._tasks.values()):
            if not young:
                self._send(task)
            elif self._deaths < DEATHS:
                self._wait(task)
            else:
                self._later(task, "the flusher dies, again and again")

    def _give_up(self, task: _Task, error: str) -> None:
        """Another try would find the same."""
        log.error("checkpoint %s: step %d: %s", self._checkpoint, task.moment[1], error)
        self._end_of(task)
        if task.rank is not None:
            self.damaged[task.moment, task.rank] = f"rank {task.rank}: {error}"
            why = f"step {task.moment[1]} will not be: {error}"
            self._lost = keeper.Stalled(reason=why, lost=task.moment)
        self._changed()

    def _later(self, task: _Task, error: str) -> None:
        """Storage fails: try again."""
        self._wait(task)
        self._complain(task, error)

    def _wait(self, task: _Task) -> None:
        if task.again is not None:
            task.again.cancel()
        task.again = asyncio.get_running_loop().call_later(RETRY, self._send, task)

    def _complain(self, task: _Task, error: str) -> None:
        """Said once, whatever number of files it is true of, until something is committed."""
        if error not in self._said:
            self._said.add(error)
            log.error(
                "checkpoint %s is not on storage yet, and tried again until it is: %s",
                self._checkpoint, error,
            )  # fmt: skip
        self._tries += 1
        task.complaint = error
        self._changed()

    def _well(self, task: _Task) -> None:
        """It goes on."""
        if task.complaint:
            task.complaint = ""
            self._changed()

    def _end_of(self, task: _Task) -> None:
        del self._tasks[task.message.id]
        if task.fd is not None:
            os.close(task.fd)

    def put(self, moment: Key, world_size: int, shard: pb.Shard, value: float | None) -> None:
        """A rank has written its own."""
        written = self.written.setdefault(moment, Written(world_size))
        written.shards[shard.rank] = shard
        if shard.rank == min(written.shards):
            written.value = value

    def _done(self, task: _Task, message: flusher.Done) -> None:
        self._end_of(task)
        if isinstance(task.message, flusher.Delete):
            self._changed()
            return
        known = self.written
        written = known.setdefault(task.moment, Written(task.world_size))
        if isinstance(task.message, flusher.Commit):
            written.committed = True
            self._lost = keeper.Stalled()
            self._said.clear()
            self._warn_of(message.beside)
            then = "is on storage" if message.committed else "came late: a newer one is on storage"
            log.info("checkpoint %s: step %d %s", self._checkpoint, task.moment[1], then)
            self._delete(task.moment)
        elif task.rank is not None:
            shard = pb.Shard(rank=task.rank, bytes=message.bytes, digest=message.digest)
            self.put(task.moment, task.world_size, shard, message.value)
            written.committed |= message.committed
        newest = max((key for key in known if known[key].committed), default=None)
        if newest is not None:
            self.forget(newest)
        self._changed()

    def _warn_of(self, job: str) -> None:
        """Once."""
        if job and job not in self._beside:
            self._beside.add(job)
            log.warning(
                "checkpoint %s: another job (%s) saves here too, and each takes the place of the other's "
                "steps: give each a path of its own", self._checkpoint, job[:8],
            )  # fmt: skip

    def forget(self, committed: Key) -> None:
        """What is older than that is needed no more, but for the last few."""
        for old in sorted(self.written)[:-REMEMBERED]:
            if old < committed:
                del self.written[old]

    def kill(self) -> None:
        """End the process, at the end of this agent."""
        self._side.kill()
        self._hush()


def _moment(fd: int) -> Key | None:
    """What a claimed slot holds."""
    try:
        stamp = slot.read(memoryview(mmap.mmap(fd, os.fstat(fd).st_size))).stamp
    except (SlotError, ProtocolMismatch):
        return None
    return stamp.round, stamp.step

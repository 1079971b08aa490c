"""This node's snapshots: slots that ranks write, kept over the deaths of ranks and agent, told of to
the master, and shown to the ranks of the next round."""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastic.agent import memory
from elastic.agent.flushes import Flushes
from elastic.agent.settings import AgentSettings
from elastic.agent.starter import memory_file
from elastic.agent.vault import Vault
from elastic.proto import codec, keeper, slot
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import LinkError, ProtocolMismatch, SlotError
from elastic.proto.terms import Terms

log = logging.getLogger(__name__)

PERSIST_TIMEOUT = 600.0
"""Seconds that the end of a job waits for its newest snapshot to be on storage."""

SLOTS = 4
"""Of each rank: the newest whole snapshot, one that is on its way to be whole, one that is written,
and one that is flushed."""


_TERMS = "terms"
"""In the vault, in the place of a local rank: how a checkpoint is kept."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One memfd, mapped to be read; its name in the vault says whose it is."""

    name: str
    fd: int
    view: memoryview

    @classmethod
    def of(cls, name: str, fd: int) -> "_Slot":
        size = os.fstat(fd).st_size
        return cls(name=name, fd=fd, view=memoryview(mmap.mmap(fd, size)))

    @property
    def snapshot(self) -> slot.Snapshot | None:
        """What it holds, whole; its chunks are not verified."""
        with contextlib.suppress(SlotError, ProtocolMismatch):
            return slot.read(self.view)
        return None


@dataclass(slots=True)
class _Checkpoint:
    """One checkpoint of this node."""

    slots: dict[int, list[_Slot]] = field(default_factory=dict[int, list[_Slot]])
    """By local rank."""
    clients: list["_Client"] = field(default_factory=list["_Client"])
    """The ranks of this round that have opened it."""
    whole: pb.Moment | None = None
    committed: pb.Moment | None = None
    pending: bool = False
    """Something of it is on its way to storage, here or on another node."""
    answer: pb.Restore | None = None
    flush: list[pb.Flush] = field(default_factory=list[pb.Flush])
    """What the master wants on storage, the oldest first."""


@dataclass(slots=True, kw_only=True)
class _Client:
    """A rank's checkpointer."""

    end: socket.socket
    round: int
    said: keeper.Open | None = None
    asks: keeper.Load | None = None
    answered: bool = False
    told: str = ""
    """Why nothing goes to storage, as it knows."""


class Snapshots:
    """`say` takes what the master is to hear; it may be lost, since `statements` says all again."""

    def __init__(
        self,
        settings: AgentSettings,
        vault: Vault,
        job: Callable[[], str],
        say: Callable[[pb.Snapshots], None],
    ) -> None:
        """job: the job's own id, once a master has told it."""
        self._job = job
        self._vault = vault
        self._say = say
        self._flushes = Flushes(settings, self._flushed)
        self._news = asyncio.Event()
        """The master has said something."""
        self._checkpoints: dict[str, _Checkpoint] = {}
        self._counter = 0
        for name, fd in vault.kept.items():  # of agents before us
            number, local, checkpoint = name.split("/", 2)
            if local == _TERMS:
                self._flushes.terms[checkpoint] = codec.loads(Terms, _text(fd))
                continue
            self._counter = max(self._counter, int(number))
            self._of(checkpoint).slots.setdefault(int(local), []).append(_Slot.of(name, fd))

    @property
    def pids(self) -> set[int]:
        return self._flushes.pids

    def kill(self) -> None:
        """At the end of this agent; what is held stays."""
        self._flushes.kill()

    def _of(self, checkpoint: str) -> _Checkpoint:
        return self._checkpoints.setdefault(checkpoint, _Checkpoint())

    # --- ranks -------------------------------------------------------------------------------

    def open(self, end: socket.socket, round_: int) -> None:
        """A rank of that round has made a checkpointer, and this is our end of its socket."""
        end.setblocking(False)
        client = _Client(end=end, round=round_)
        asyncio.get_running_loop().add_reader(end, self._readable, client)

    def _close(self, client: _Client) -> None:
        asyncio.get_running_loop().remove_reader(client.end)
        client.end.close()
        if client.said is not None:
            clients = self._of(client.said.checkpoint).clients
            if client in clients:
                clients.remove(client)

    def _readable(self, client: _Client) -> None:
        try:
            while client.end.fileno() >= 0:
                try:
                    message = keeper.receive_from_rank(client.end)
                except ConnectionResetError:
                    continue  # it died with something unread; what it said before is still here
                if message is None:
                    self._close(client)
                    return
                self._take(client, message)
        except BlockingIOError:
            return
        except (LinkError, ProtocolMismatch, OSError) as error:
            log.warning("a checkpointer is cut off: %s", error)
            self._close(client)

    def _take(self, client: _Client, message: keeper.ToKeeper) -> None:
        if isinstance(message, keeper.Open):
            keeper.check(message)
            client.said = message
            known = self._of(message.checkpoint)
            for old in [c for c in known.clients if c.round < client.round]:
                self._close(old)  # a process that its rank left may have the other end still
            known.clients.append(client)
            self._keep_terms(message.checkpoint, message.terms)
            self._stalled(message.checkpoint, known)
            return
        if client.said is None:
            raise LinkError("a checkpointer says nothing of itself first")
        known = self._of(client.said.checkpoint)
        match message:
            case keeper.Need() if not 0 < message.bytes < 1 << 50:
                raise LinkError(f"a slot of {message.bytes} bytes is none")
            case keeper.Need():
                self._give(client, client.said, known, message.bytes)
            case keeper.Held():
                self._held(client.said, known)
            case keeper.Load():
                client.asks, client.answered = message, False
                if known.answer is not None and known.answer.round == client.round:
                    self._answer(known, known.answer)
                elif len(self._asking(known)) == client.said.local_world_size:
                    self._tell(client.said.checkpoint)

    def _keep_terms(self, checkpoint: str, terms: Terms) -> None:
        """Know them, and have the next agent know them: it may flush before a rank opens anything."""
        before = self._flushes.terms.get(checkpoint, Terms())
        self._flushes.terms[checkpoint] = terms
        if before != terms:
            name = f"0/{_TERMS}/{checkpoint}"
            if name in self._vault.kept:
                self._vault.drop(name)
            self._vault.keep(name, memory_file(codec.dumps(terms).encode()))

    def _stalled(self, checkpoint: str, known: _Checkpoint) -> None:
        """Tell the ranks whether storage fails, as far as they do not know."""
        complaint = self._flushes.complaint(checkpoint)
        for client in list(known.clients):
            if client.told != complaint:
                client.told = complaint
                self._push(client, keeper.Stalled(reason=complaint))

    def _give(self, client: _Client, said: keeper.Open, known: _Checkpoint, size: int) -> None:
        """Slots of that size: what fits of those it has, and new ones. What is too small goes, but
        for the newest whole snapshot, which stays until there is a newer one."""
        own = known.slots.setdefault(said.local_rank, [])
        fit = [s for s in own if len(s.view) >= size]
        if len(fit) < SLOTS:
            self._drop(
                own, [s for s in own if s not in fit and not self._needed(s, own, said, known)]
            )
            missing = SLOTS - len(fit)
            reckoned = memory.reckon(
                slot_bytes=size,
                ranks=said.local_world_size,
                wanted=missing,
                available=memory.available(),
            )
            if reckoned.reason:
                log.warning("checkpoint %s: %s", said.checkpoint, reckoned.reason)
            for _ in range(reckoned.slots):
                fit.append(self._make(said, size))
                own.append(fit[-1])
            if len(fit) < memory.FEWEST:
                self._push(client, keeper.Refused(reason=reckoned.reason))
                return
        self._push(client, keeper.Slots(count=len(fit)), tuple(s.fd for s in fit))

    def _make(self, said: keeper.Open, size: int) -> _Slot:
        self._counter += 1
        name = f"{self._counter}/{said.local_rank}/{said.checkpoint}"
        fd = slot.create(size)
        self._vault.keep(name, fd)
        return _Slot.of(name, fd)

    def _drop(self, own: list[_Slot], gone: list[_Slot]) -> None:
        for one in gone:
            own.remove(one)
            self._vault.drop(one.name)

    def _needed(self, one: _Slot, own: list[_Slot], said: keeper.Open, known: _Checkpoint) -> bool:
        """It holds the newest whole moment, what was loaded, or what is still to go to storage."""
        snapshot = one.snapshot
        if snapshot is None:
            return False
        at = _key(_at(snapshot))
        whole = [_key(_at(s)) for s in _snapshots(own) if s.all_units]
        loaded = None if known.answer is None else _key(known.answer.moment)
        written = self._flushes.written.get(said.checkpoint, {}).get(at)
        unwritten = written is None or snapshot.stamp.rank not in written.shards
        return (
            at == max(whole, default=None) or at == loaded or (snapshot.stamp.persist and unwritten)
        )

    def _held(self, said: keeper.Open, known: _Checkpoint) -> None:
        """Once all ranks of this node hold a moment, the master hears of it."""
        newest: dict[int, pb.Moment] = {}
        for local, own in known.slots.items():
            for snapshot in _snapshots(own):
                at = _at(snapshot)
                if local not in newest or _key(at) > _key(newest[local]):
                    newest[local] = at
        mine = newest.get(said.local_rank)
        locals_ = range(said.local_world_size)
        if mine is not None and all(_key(newest.get(i)) >= _key(mine) for i in locals_):
            self._tell(said.checkpoint)

    def _push(self, client: _Client, message: keeper.ToRank, fds: tuple[int, ...] = ()) -> None:
        try:
            keeper.send(client.end, message, fds)
        except OSError as error:
            log.warning("a checkpointer is cut off: %s", error)
            self._close(client)

    # --- the master --------------------------------------------------------------------------

    def statements(self) -> list[pb.Snapshots]:
        """All that this node has to say."""
        return [self._statement(checkpoint) for checkpoint in self._checkpoints]

    def _tell(self, checkpoint: str) -> None:
        self._say(self._statement(checkpoint))

    def _statement(self, checkpoint: str) -> pb.Snapshots:
        known = self._checkpoints[checkpoint]
        told = pb.Snapshots(checkpoint=checkpoint, answer=known.answer)
        asking = self._asking(known)
        if asking and all(len(asking) == c.said.local_world_size for c in asking if c.said):
            told.asks = asking[0].round
            wanted = asking[0].asks.step if asking[0].asks else None
            if wanted is not None:
                told.wanted = wanted
            for client in asking:
                if client.asks is not None and client.asks.stored_step:
                    ours = client.asks.stored_job == self._job()  # another's is older than memory
                    told.stored.round = client.asks.stored_round if ours else 0
                    told.stored.step = client.asks.stored_step
        holdings: dict[tuple[int, int], pb.Holding] = {}
        for own in known.slots.values():
            for snapshot in _snapshots(own):
                at = _at(snapshot)
                if (checkpoint, _key(at), snapshot.stamp.rank) in self._flushes.damaged:
                    continue
                holding = holdings.setdefault(_key(at), pb.Holding(moment=at))
                holding.world_size = snapshot.stamp.world_size
                holding.ranks.append(snapshot.stamp.rank)
                holding.units.extend(set(snapshot.units) - set(holding.units))
                holding.all_units = max(holding.all_units, snapshot.all_units)
                holding.persist |= snapshot.stamp.persist
        for moment, written in self._flushes.written.get(checkpoint, {}).items():
            at = pb.Moment(round=moment[0], step=moment[1])
            holding = holdings.setdefault(moment, pb.Holding(moment=at))
            holding.world_size = holding.world_size or written.world_size
            holding.durable.extend(written.shards.values())
            holding.committed = written.committed
            holding.persist = True
        told.holdings.extend(holdings.values())
        return told

    def _asking(self, known: _Checkpoint) -> list[_Client]:
        return [client for client in known.clients if client.asks is not None]

    def obey(self, order: pb.SnapshotOrders) -> None:
        """What the master says of one checkpoint. A slot that is to be flushed is claimed before its
        rank hears of anything that would let it go."""
        known = self._of(order.checkpoint)
        known.pending = order.pending
        self._news.set()
        known.flush = list(order.flush)
        self._flush(order.checkpoint, known)
        for commit in order.commits:
            self._flushes.commit(order.checkpoint, self._job(), commit)
        if order.HasField("whole") and _key(order.whole) > _key(known.whole):
            known.whole = order.whole
            for own in known.slots.values():
                for one in own:
                    _mark(one, order)
            for client in list(known.clients):
                self._push(client, keeper.Whole(round=order.whole.round, step=order.whole.step))
        if order.HasField("committed") and _key(order.committed) > _key(known.committed):
            known.committed = order.committed
            for client in list(known.clients):
                step = order.committed.step
                self._push(client, keeper.Committed(round=order.committed.round, step=step))
        if order.HasField("restore"):
            known.answer = order.restore
            self._answer(known, order.restore)

    async def persisted(self, timeout: float) -> None:
        """Wait until nothing is on its way to storage any more, on this node or another: what is only
        in memory ends with the nodes. And until what is not to be kept there is deleted."""
        try:
            async with asyncio.timeout(timeout):
                while any(
                    known.pending or self._flushes.busy(name)
                    for name, known in self._checkpoints.items()
                ):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            late = [name for name, known in self._checkpoints.items() if known.pending]
            for name in late:
                log.error("after %g s the newest snapshot of %s is not on storage", timeout, name)

    def _flush(self, checkpoint: str, known: _Checkpoint) -> None:
        """One moment at a time, the oldest that is here: each pins a slot of every rank."""
        if self._flushes.busy(checkpoint):
            return
        for order in sorted(known.flush, key=lambda order: _key(order.moment)):
            here: dict[int, int] = {}
            world_size = 0
            for own in known.slots.values():
                for one in own:
                    found = one.snapshot
                    if found is None or _at(found) != order.moment:
                        continue
                    if found.stamp.rank in order.ranks:
                        here[found.stamp.rank] = one.fd
                        world_size = found.stamp.world_size
            at = _key(order.moment)
            if here and self._flushes.write(checkpoint, self._job(), at, world_size, here):
                return

    def _flushed(self, checkpoint: str) -> None:
        """The flusher is done with something, or cannot do it."""
        known = self._of(checkpoint)
        self._news.set()
        self._stalled(checkpoint, known)
        done = self._flushes.written.get(checkpoint, {})
        known.flush = [
            order
            for order in known.flush
            if not set(order.ranks)
            <= set(done[_key(order.moment)].shards if _key(order.moment) in done else ())
        ]
        self._tell(checkpoint)
        self._flush(checkpoint, known)

    def _answer(self, known: _Checkpoint, answer: pb.Restore) -> None:
        """Show those who ask what they are to load, and the images of it that are here."""
        here = [
            one
            for own in known.slots.values()
            for one in own
            if (snapshot := one.snapshot) is not None and _at(snapshot) == answer.moment
        ]
        images = here[: keeper.MOST_FDS] if answer.from_memory else []
        restore = keeper.Restore(
            round=answer.moment.round,
            step=answer.moment.step,
            from_memory=answer.from_memory,
            images=len(images),
        )
        for client in self._asking(known):
            if client.round == answer.round and not client.answered:
                client.answered = True
                self._push(client, restore, tuple(one.fd for one in images))


def _text(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _mark(one: _Slot, order: pb.SnapshotOrders) -> None:
    """Note that what it holds is whole, if it still holds it."""
    claim = slot.claim(one.fd, exclusive=False)
    if claim is None:
        return
    try:
        snapshot = one.snapshot
        if snapshot is not None and _at(snapshot) == order.whole:
            slot.mark_whole(one.view, order.all_units)
    finally:
        os.close(claim)


def _snapshots(own: list[_Slot]) -> Iterator[slot.Snapshot]:
    for one in own:
        snapshot = one.snapshot
        if snapshot is not None:
            yield snapshot


def _at(snapshot: slot.Snapshot) -> pb.Moment:
    return pb.Moment(round=snapshot.stamp.round, step=snapshot.stamp.step)


def _key(moment: pb.Moment | None) -> tuple[int, int]:
    """In the order of time; nothing is older than all."""
    return (-1, -1) if moment is None else (moment.round, moment.step)

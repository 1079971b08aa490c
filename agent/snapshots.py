"""This node's snapshots: slots that ranks write, kept over the deaths of ranks and agent, told of to
the master, and shown to the ranks of the next round."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic.agent import memory
from elastic.agent.flushes import Flushes
from elastic.agent.leaving import Leaving
from elastic.agent.replicas import Replicas
from elastic.agent.settings import AgentSettings
from elastic.agent.shelf import Shelf, Slot, Slots
from elastic.agent.starter import memory_file
from elastic.agent.vault import Kept
from elastic.proto import codec, descriptors, keeper, slot
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import LinkError, ProtocolMismatch
from elastic.proto.moment import Moment
from elastic.proto.terms import Terms

log = logging.getLogger(__name__)

PERSIST_TIMEOUT = 600.0
"""Seconds that the end of a job waits for its newest snapshot to be on storage."""


@dataclass(slots=True)
class _Checkpoint:
    """One checkpoint of this node."""

    slots: Slots
    clients: list["_Client"] = field(default_factory=list["_Client"])
    """The ranks of this round that have opened it."""
    whole: pb.Moment | None = None
    all_units: int = 0
    """Of it."""
    committed: pb.Moment | None = None
    pending: bool = False
    """Something of it is on its way to storage, here or on another node."""
    answer: pb.Restore | None = None
    flush: list[pb.Flush] = field(default_factory=list[pb.Flush])
    """What the master wants on storage, the oldest first."""
    keep: frozenset[Moment] = frozenset()
    """What no rank may write over, beside the newest that is whole."""
    fetch: dict[tuple[Moment, int], pb.Fetch] = field(
        default_factory=dict[tuple[Moment, int], pb.Fetch]
    )
    """The replicas that the master wants here, by moment and rank."""
    reckoned: tuple[int, memory.Reckoning] | None = None
    """How many slots of that many bytes each rank of this node has."""
    leaving: Leaving = field(default_factory=Leaving)


@dataclass(slots=True, kw_only=True)
class _Client:
    """A rank's checkpointer."""

    end: socket.socket
    round: int
    said: keeper.Open | None = None
    asks: keeper.Load | None = None
    answered: bool = False
    told: tuple[keeper.ToRank, ...] = ()
    """What is newest, as far as it was told."""
    unsent: tuple[keeper.ToRank, list[int]] | None = None
    """An answer that its socket has no room for yet, with descriptors that are ours."""
    closed: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Snapshots:
    """`say` takes what the master is to hear; it may be lost, since `statements` and `stands` say all
    again."""

    def __init__(
        self,
        settings: AgentSettings,
        vault: Kept,
        job: Callable[[], str],
        say: Callable[[pb.Snapshots | pb.Stand], None],
    ) -> None:
        """job: the job's own id, once a master has told it."""
        self._job = job
        self._vault = vault
        self._say = say
        self._flushes = Flushes(settings, self._flushed)
        self._news = asyncio.Event()
        """The master has said something."""
        self._replicas = Replicas(settings, self._replicated)
        self._shelf = Shelf(vault, self._replicas)
        self._checkpoints = {
            name: _Checkpoint(self._shelf.of(name)) for name in self._shelf.checkpoints()
        }
        for checkpoint, terms in self._shelf.notes():  # of agents before us
            self._flushes.terms[checkpoint] = codec.loads(Terms, terms)

    @property
    def pids(self) -> set[int]:
        return self._flushes.pids | self._replicas.pids

    def kill(self) -> None:
        """At the end of this agent; what is held stays."""
        self._flushes.kill()
        self._replicas.kill()

    def _of(self, checkpoint: str) -> _Checkpoint:
        if checkpoint not in self._checkpoints:
            self._checkpoints[checkpoint] = _Checkpoint(self._shelf.of(checkpoint))
        return self._checkpoints[checkpoint]

    # --- ranks -------------------------------------------------------------------------------

    def open(self, end: socket.socket, round_: int) -> "asyncio.Future[None]":
        """A rank of that round has made a checkpointer, and this is our end of its socket; done when
        that has closed it."""
        end.setblocking(False)
        client = _Client(end=end, round=round_)
        asyncio.get_running_loop().add_reader(end, self._readable, client)
        return client.closed

    def _close(self, client: _Client) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(client.end)
        loop.remove_writer(client.end)
        client.end.close()
        if client.unsent is not None:
            descriptors.close(client.unsent[1])
        if not client.closed.done():
            client.closed.set_result(None)
        if client.said is not None:
            known = self._of(client.said.checkpoint)
            if client in known.clients:
                known.clients.remove(client)
                self._mark_whole(known, known.slots.own.get(client.said.local_rank, []))

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
            if client.said is not None:
                raise LinkError("a checkpointer says twice what it is")
            client.said = message
            known = self._of(message.checkpoint)
            for old in [c for c in known.clients if c.round < client.round]:
                self._close(old)  # a process that its rank left may have the other end still
            if not known.clients:
                known.reckoned = None  # there may be other nodes and ranks than in the last round
            known.clients.append(client)
            if known.leaving.round != client.round:
                known.leaving = Leaving(client.round)
            self._keep_terms(message.checkpoint, message.terms)
            self._inform(client, known)
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
                self._flush(client.said.checkpoint, known)  # it was not free yet, if it was ordered
            case keeper.Saved():
                if client.round == known.leaving.round:
                    self._saved(client.said, known, message)
            case keeper.Load():
                client.asks, client.answered = message, False
                if known.answer is not None and known.answer.round == client.round:
                    self._answer(known, known.answer)
                elif len(self._asking(known)) == client.said.local_world_size:
                    self._tell(client.said.checkpoint)

    def _keep_terms(self, checkpoint: str, terms: Terms) -> None:
        """How it is kept on storage; who comes after this agent is to know, too."""
        if self._flushes.terms.get(checkpoint, Terms()) != terms:
            self._shelf.note(checkpoint, codec.dumps(terms).encode())
        self._flushes.terms[checkpoint] = terms

    def _give(self, client: _Client, said: keeper.Open, known: _Checkpoint, size: int) -> None:
        """Slots of that size: what fits of those it has, and new ones. What is too small goes, but
        for the newest whole snapshot, which stays until there is a newer one."""
        own = known.slots.own.get(said.local_rank, [])
        if known.reckoned is None or known.reckoned[0] < size:
            known.reckoned = size, self._reckon(said, known, size)
        size, reckoned = known.reckoned
        fit = [one for one in own if len(one.view) >= size]
        if len(fit) < reckoned.slots:
            for one in [one for one in own if one not in fit]:
                if not self._needed(one, own, said, known):
                    self._shelf.drop(one)
        try:
            while len(fit) < reckoned.slots:
                fit.append(self._shelf.make(said.checkpoint, "own", said.local_rank, size))
        except OSError as error:
            self._push(client, keeper.Refused(reason=f"no slot can be made: {error}"))
            return
        if len(fit) < memory.FEWEST:
            self._push(client, keeper.Refused(reason=reckoned.reason))
        else:
            self._push(client, keeper.Slots(count=len(fit)), tuple(one.fd for one in fit))

    def _reckon(self, said: keeper.Open, known: _Checkpoint, size: int) -> memory.Reckoning:
        """The same for all ranks of this node. What other slots have been promised is taken off; what
        this checkpoint has is its own to use again."""
        ranks = said.local_world_size
        reckoned = memory.reckon(
            slot_bytes=size,
            ranks=ranks,
            available=memory.available()
            - self._shelf.untouched
            + sum(len(one.view) for one in known.slots),
            replicas=said.replicate and said.world_size > ranks,
        )
        if reckoned.reason:
            log.warning("checkpoint %s: %s", said.checkpoint, reckoned.reason)
        return reckoned

    def _needed(self, one: Slot, own: list[Slot], said: keeper.Open, known: _Checkpoint) -> bool:
        """It holds the newest whole moment, what was loaded, or what is still to go to storage."""
        at = one.moment
        whole = [s.moment for s in own if s.snapshot is not None and s.snapshot.all_units]
        loaded = None if known.answer is None else _moment(known.answer.moment)
        return at is not None and (
            at == max((m for m in whole if m is not None), default=None)
            or at == loaded
            or at in known.keep
            or self._unwritten(said.checkpoint, one)
        )

    def _unwritten(self, checkpoint: str, one: Slot) -> bool:
        """What it holds is still to go to storage."""
        snapshot, at = one.snapshot, one.moment
        if snapshot is None or at is None or not snapshot.stamp.persist:
            return False
        written = self._flushes.written.get(checkpoint, {}).get(at)
        return written is None or snapshot.stamp.rank not in written.shards

    def _held(self, said: keeper.Open, known: _Checkpoint) -> None:
        """Once all ranks of this node hold a moment, the master hears of it."""
        newest = {
            local: max((at for one in own if (at := one.moment) is not None), default=_NEVER)
            for local, own in known.slots.own.items()
        }
        mine = newest.get(said.local_rank, _NEVER)
        if all(newest.get(local, _NEVER) >= mine for local in range(said.local_world_size)):
            self._tell(said.checkpoint)

    # --- the end of a round that is planned (master/leaving.py) ----------------------------------

    def leave(self, order: pb.Leave) -> None:
        """The master says at which step the ranks of a round are to leave."""
        known = self._of(order.checkpoint)
        if order.round < known.leaving.round or order.order <= known.leaving.order.order:
            return
        if order.round != known.leaving.round:
            known.leaving = Leaving(order.round)
        known.leaving.order = order
        for client in list(known.clients):
            self._inform(client, known)
        self._tell_stand(order.checkpoint, known)

    def release(self, number: int) -> None:
        """The ranks of that round have their signal: who has a handler for it goes on to obey that."""
        for known in self._checkpoints.values():
            if known.leaving.round == number:
                known.leaving.order = pb.Leave(order=known.leaving.order.order)
                for client in list(known.clients):
                    self._inform(client, known)

    def stands(self) -> list[pb.Stand]:
        """All that this node has to say of it."""
        return [
            known.leaving.stand(checkpoint, self._local_ranks(known))
            for checkpoint, known in self._checkpoints.items()
            if known.leaving.order.step
        ]

    def _saved(self, said: keeper.Open, known: _Checkpoint, saved: keeper.Saved) -> None:
        leaving = known.leaving
        leaving.hear(said.local_rank, saved)
        late = not saved.waits and saved.step >= leaving.order.step
        if leaving.order.step and (late or len(leaving.waiting) == said.local_world_size):
            self._tell_stand(said.checkpoint, known)

    def _tell_stand(self, checkpoint: str, known: _Checkpoint) -> None:
        self._say(known.leaving.stand(checkpoint, self._local_ranks(known)))

    def _local_ranks(self, known: _Checkpoint) -> int:
        ours = (c.said for c in known.clients if c.round == known.leaving.round)
        return max((said.local_world_size for said in ours if said is not None), default=0)

    def _push(self, client: _Client, message: keeper.ToRank, fds: tuple[int, ...] = ()) -> None:
        """An answer; it waits where what was said unasked has not been read yet."""
        try:
            if client.unsent is not None:
                raise BlockingIOError("it asks and does not read")
            try:
                keeper.send(client.end, message, fds)
            except BlockingIOError:
                client.unsent = message, [os.dup(fd) for fd in fds]
                asyncio.get_running_loop().add_writer(client.end, self._writable, client)
        except (BrokenPipeError, ConnectionResetError):
            return  # it is gone: what it said last is still to be read, and then its end
        except OSError as error:
            log.warning("a checkpointer is cut off: %s", error)
            self._close(client)

    def _inform(self, client: _Client, known: _Checkpoint) -> None:
        """Tell a rank what is newest now, and mark its slots: it must hear what is kept before it sees
        that something is newer. A rank that does not read hears it later, once, however much there
        was in between."""
        newest: tuple[keeper.ToRank, ...] = ()
        if known.whole is not None or known.keep:
            at, keep = _moment(known.whole), tuple(sorted(known.keep))
            newest += (keeper.Whole(round=at.round, step=at.step, keep=keep),)
        if known.committed is not None:
            at = _moment(known.committed)
            newest += (keeper.Committed(round=at.round, step=at.step),)
        if client.round == known.leaving.round and known.leaving.order.order:
            order = known.leaving.order
            newest += (keeper.Leave(order=order.order, step=order.step),)
        complaint = "" if client.said is None else self._flushes.complaint(client.said.checkpoint)
        if complaint or any(isinstance(message, keeper.Stalled) for message in client.told):
            newest += (keeper.Stalled(reason=complaint),)
        try:
            for message in newest:
                if message not in client.told:
                    keeper.send(client.end, message)
        except BlockingIOError:
            asyncio.get_running_loop().add_writer(client.end, self._writable, client)
            return
        except OSError as error:
            log.warning("a checkpointer is cut off: %s", error)
            self._close(client)
            return
        client.told = newest
        if client.said is not None:
            self._mark_whole(known, known.slots.own.get(client.said.local_rank, []))

    def _writable(self, client: _Client) -> None:
        """It has read something."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(client.end)
        if client.unsent is not None:
            message, fds = client.unsent
            client.unsent = None
            self._push(client, message, tuple(fds))
            descriptors.close(fds)
        if client.said is not None and client.end.fileno() >= 0 and client.unsent is None:
            self._inform(client, self._of(client.said.checkpoint))

    def _mark_whole(self, known: _Checkpoint, slots: Iterable[Slot]) -> None:
        """Note in slots that hold the newest whole moment that they do."""
        for one in slots:
            if known.whole is not None:
                _mark(one, _moment(known.whole), known.all_units)

    # --- the master --------------------------------------------------------------------------

    def statements(self) -> list[pb.Snapshots]:
        """All that this node has to say."""
        return [self._statement(checkpoint) for checkpoint in self._checkpoints]

    def _tell(self, checkpoint: str) -> None:
        self._say(self._statement(checkpoint))

    def _statement(self, checkpoint: str) -> pb.Snapshots:
        known = self._checkpoints[checkpoint]
        told = pb.Snapshots(
            checkpoint=checkpoint,
            answer=None if known.answer is None else _without_sources(known.answer),
            base=self._replicas.base,
            replicas=known.reckoned is not None and known.reckoned[1].replicas,
            unfit=[_pb(at) for name, at in self._replicas.unfit if name == checkpoint],
        )
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
        holdings: dict[Moment, pb.Holding] = {}
        for one in known.slots:
            snapshot, at = one.snapshot, one.moment
            if snapshot is None or at is None:
                continue
            stamp = snapshot.stamp
            if (checkpoint, at, stamp.rank) in self._flushes.damaged:
                continue
            holding = holdings.setdefault(at, pb.Holding(moment=_pb(at)))
            holding.world_size = stamp.world_size
            holding.ranks.append(stamp.rank)
            if not any(node.first_rank == stamp.node.start for node in holding.nodes):
                holding.nodes.add(first_rank=stamp.node.start, ranks=len(stamp.node))
            holding.units.extend(set(snapshot.units) - set(holding.units))
            holding.all_units = max(holding.all_units, snapshot.all_units)
            holding.slot_bytes = max(holding.slot_bytes, len(one.view))
            holding.persist |= stamp.persist
        for key, written in self._flushes.written.get(checkpoint, {}).items():
            at = Moment(*key)
            holding = holdings.setdefault(at, pb.Holding(moment=_pb(at)))
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
        keep = frozenset(map(_moment, order.keep)) or known.keep  # a new master may not know yet
        whole = order.HasField("whole") and _moment(order.whole) > _moment(known.whole)
        if whole:
            known.whole, known.all_units = order.whole, order.all_units
            ranks = {client.said.local_rank for client in known.clients if client.said is not None}
            self._mark_whole(known, (one for slots in known.slots.copy.values() for one in slots))
            for local in known.slots.own.keys() - ranks:
                self._mark_whole(known, known.slots.own[local])
        if order.HasField("committed") and _moment(order.committed) > _moment(known.committed):
            known.committed = order.committed
        if whole or keep != known.keep:
            known.keep = keep
            self._forget_spent(order.checkpoint, known)
        for client in list(known.clients):
            self._inform(client, known)
        if order.HasField("restore"):
            known.answer = order.restore
            self._answer(known, order.restore)
        self._fetch(order.checkpoint, known, order.fetch)

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

    async def look(self, asked: pb.Look) -> pb.Found:
        """Whether a step is on storage."""
        found = await self._flushes.look(asked.checkpoint, asked.step)
        if isinstance(found, str):
            return pb.Found(request=asked.request, error=found[:1000])
        ours = found.job == self._job()  # another's is older than memory
        moment = pb.Moment(round=found.round if ours else 0, step=asked.step)
        return pb.Found(request=asked.request, moment=moment)

    def _flush(self, checkpoint: str, known: _Checkpoint) -> None:
        """One moment at a time, the oldest that is here: each pins a slot of every rank."""
        if self._flushes.busy(checkpoint):
            return
        for order in sorted(known.flush, key=lambda order: _moment(order.moment)):
            at = _moment(order.moment)
            here: dict[int, int] = {}
            world_size = 0
            for one in known.slots:
                found = one.snapshot
                if found is not None and one.moment == at and found.stamp.rank in order.ranks:
                    here[found.stamp.rank] = one.fd
                    world_size = found.stamp.world_size
            if here and self._flushes.write(checkpoint, self._job(), at, world_size, here):
                return

    def _flushed(self, checkpoint: str) -> None:
        """The flusher is done with something, or cannot do it."""
        known = self._of(checkpoint)
        self._news.set()
        for client in list(known.clients):
            self._inform(client, known)
        done = self._flushes.written.get(checkpoint, {})
        known.flush = [
            order
            for order in known.flush
            if not set(order.ranks)
            <= set(done[_moment(order.moment)].shards if _moment(order.moment) in done else ())
        ]
        self._tell(checkpoint)
        self._flush(checkpoint, known)

    # --- replicas ----------------------------------------------------------------------------

    def _fetch(self, checkpoint: str, known: _Checkpoint, orders: Iterable[pb.Fetch]) -> None:
        """Have the images that the master names copied here, and no others."""
        known.fetch = {(_moment(order.moment), order.rank): order for order in orders}
        wanted = {(*key, order.base) for key, order in known.fetch.items()}
        self._replicas.only(checkpoint, wanted)
        under_way = self._replicas.fetching(checkpoint)
        here = {(s.moment, s.snapshot.stamp.rank) for s in known.slots if s.snapshot is not None}
        opened = [client.said for client in known.clients if client.said is not None]
        for (moment, rank), order in known.fetch.items():
            if (moment, rank) in under_way | here or (checkpoint, moment) in self._replicas.unfit:
                continue
            try:
                one = self._room(checkpoint, known, rank, order.slot_bytes)
            except OSError as error:
                log.warning("checkpoint %s: no memory for a replica: %s", checkpoint, error)
                self._replicas.unfit.add((checkpoint, moment))
                self._tell(checkpoint)
                return
            if one is not None:
                limit = opened[0].bandwidth if opened else None
                self._replicas.fetch(checkpoint, moment, rank, order.base, one.fd, limit)

    def _room(self, checkpoint: str, known: _Checkpoint, rank: int, size: int) -> Slot | None:
        """A slot for a replica of that rank; None while all that it may have are needed. Raises
        OSError."""
        slots = known.slots.copy.get(rank, [])
        free = [
            one for one in slots if one.moment is None or one.moment not in self._lasting(known)
        ]
        for one in free:
            if len(one.view) >= size:
                return one
            self._shelf.drop(one)
        if len(known.slots.copy.get(rank, [])) >= memory.COPIES:
            return None
        if (
            size > memory.available() - self._shelf.untouched
        ):  # the other node's may be larger than ours
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._shelf.make(checkpoint, "copy", rank, size)

    def _forget_spent(self, checkpoint: str, known: _Checkpoint) -> None:
        """Give back slots that this node has no more to do with, once what replaces them is there:
        replicas of ranks that it keeps none of now, and what ranks held beyond those of this round."""
        lasting = self._lasting(known)
        ranks = {rank for _, rank in known.fetch}
        spent = [
            slots for rank, slots in known.slots.copy.items() if rank not in ranks and known.keep
        ]
        for client in known.clients:
            if client.said is not None and client.round <= _moment(known.whole).round:
                here = client.said.local_world_size
                spent += [slots for local, slots in known.slots.own.items() if local >= here]
                break
        for one in [one for slots in spent for one in slots]:
            if one.moment not in lasting and not self._unwritten(checkpoint, one):
                self._shelf.drop(one)

    def _lasting(self, known: _Checkpoint) -> set[Moment]:
        """The moments whose replicas stay: also what was loaded, until its round has replicas."""
        if known.answer is None or max(known.keep, default=_NEVER).round >= known.answer.round:
            return set(known.keep)
        return {*known.keep, _moment(known.answer.moment)}

    def _replicated(self, checkpoint: str) -> None:
        """A replica has come, or cannot."""
        known = self._of(checkpoint)
        for one in known.slots:
            snapshot, at = one.snapshot, one.moment
            if snapshot is not None and at is not None and not snapshot.all_units:
                order = known.fetch.get((at, snapshot.stamp.rank))
                if order is not None:
                    _mark(one, at, order.all_units)
        self._tell(checkpoint)

    # --- restore -----------------------------------------------------------------------------

    def _answer(self, known: _Checkpoint, answer: pb.Restore) -> None:
        """Show those who ask what they are to load: the images of it that are here, and where others
        are."""
        here = [one for one in known.slots if one.moment == _moment(answer.moment)]
        images = here[: keeper.MOST_FDS - 1] if answer.from_memory else []
        elsewhere = bool(answer.sources)
        restore = keeper.Restore(
            round=answer.moment.round,
            step=answer.moment.step,
            from_memory=answer.from_memory,
            images=len(images),
            elsewhere=elsewhere,
        )
        fds = [one.fd for one in images]
        sources = keeper.Sources(
            sources=tuple(
                keeper.Source(base=s.base, ranks=tuple(s.ranks), needed=s.needed)
                for s in answer.sources
            ),
            tls=self._replicas.tls,
        )
        with contextlib.ExitStack() as undo:
            if elsewhere:
                fds.append(memory_file(codec.dumps(sources).encode()))
                undo.callback(os.close, fds[-1])
            for client in self._asking(known):
                if client.round == answer.round and not client.answered:
                    client.answered = True
                    self._push(client, restore, tuple(fds))


def _mark(one: Slot, moment: Moment, all_units: int) -> None:
    """Note that the moment is whole, if the slot still holds it."""
    claim = slot.claim(one.fd, exclusive=False)
    if claim is None:
        return
    try:
        if one.moment == moment:
            slot.mark_whole(one.view, all_units)
    finally:
        os.close(claim)


def _without_sources(answer: pb.Restore) -> pb.Restore:
    return pb.Restore(
        round=answer.round,
        moment=answer.moment if answer.HasField("moment") else None,
        from_memory=answer.from_memory,
    )


_NEVER = Moment(-1, -1)
"""Older than all."""


def _moment(message: pb.Moment | None) -> Moment:
    return _NEVER if message is None else Moment(message.round, message.step)


def _pb(at: Moment) -> pb.Moment:
    return pb.Moment(round=at.round, step=at.step)

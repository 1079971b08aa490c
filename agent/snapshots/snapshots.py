"""This node's snapshots: slots that ranks write, kept over the deaths of ranks and agent, told of to
the master, and shown to the ranks of the next round."""

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator

from elastic.agent.settings import AgentSettings
from elastic.agent.snapshots import statement, uneven
from elastic.agent.snapshots.allotment import Allotment
from elastic.agent.snapshots.checkpoint import NEVER, Checkpoint, moment_of
from elastic.agent.snapshots.clients import Client
from elastic.agent.snapshots.flushes import Flushes
from elastic.agent.snapshots.leaving import Leaving
from elastic.agent.snapshots.loads import Loads
from elastic.agent.snapshots.replicas import Replicas
from elastic.agent.snapshots.shelf import Shelf, Slot
from elastic.agent.snapshots.vault import Kept
from elastic.proto import codec, keeper, slot
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import LinkError
from elastic.proto.moment import Moment, merged
from elastic.proto.slot import Belief
from elastic.proto.terms import Terms

log = logging.getLogger(__name__)

PERSIST_TIMEOUT = 600.0
"""Seconds that the end of a job waits for its newest snapshot to be on storage."""


class Snapshots:
    """`say` takes what the master is to hear; it may be lost, since `statements` and `stands` say all
    again."""

    def __init__(
        self,
        settings: AgentSettings,
        vault: Kept,
        job: Callable[[], str],
        say: Callable[[pb.Snapshots | pb.Stand], None],
        dropped: Callable[[], None] = lambda: None,
    ) -> None:
        """job: the job's own id, once a master has told it; dropped: called when a slot is no more."""
        self._job = job
        self._vault = vault
        self._say = say
        self._settings = settings
        self._news = asyncio.Event()
        """The master has said something."""
        self._replicas = Replicas(settings, self._replicated)
        self._shelf = Shelf(vault, self._replicas, dropped)
        self._allotment = Allotment(self._shelf)
        self._checkpoints: dict[str, Checkpoint] = {}
        for name in self._shelf.checkpoints():  # of agents before us
            self._of(name)
        for name, terms in self._shelf.notes():
            self._of(name).flushes.terms = codec.loads(Terms, terms)

    def touched(self) -> dict[int, list[int]]:
        """Slots of this node's ranks that have all their memory, by local rank."""
        return self._shelf.touched()

    @property
    def pids(self) -> set[int]:
        ours = (known.flushes.pids for known in self._checkpoints.values())
        return self._replicas.pids.union(*ours)

    def kill(self) -> None:
        """At the end of this agent; what is held stays."""
        for known in self._checkpoints.values():
            known.flushes.kill()
        self._replicas.kill()

    def _of(self, checkpoint: str) -> Checkpoint:
        if checkpoint not in self._checkpoints:
            flushed = functools.partial(self._flushed, checkpoint)
            self._checkpoints[checkpoint] = Checkpoint(
                name=checkpoint,
                slots=self._shelf.of(checkpoint),
                flushes=Flushes(self._settings, checkpoint, flushed),
            )
        return self._checkpoints[checkpoint]

    # --- ranks -------------------------------------------------------------------------------

    def open(self, end: socket.socket, round_: int) -> "asyncio.Future[None]":
        """A rank of that round has made a checkpointer, and this is our end of its socket; done when
        that has closed it."""
        return Client(end, round_, hear=self._take, roomy=self._inform, gone=self._gone).closed

    def _gone(self, client: Client) -> None:
        if client.said is None:
            return
        known = self._of(client.said.checkpoint)
        if client in known.clients:
            known.clients.remove(client)
            self._mark_whole(known, known.slots.own.get(client.said.local_rank, []))

    def _take(self, client: Client, message: keeper.ToKeeper) -> None:
        if isinstance(message, keeper.Open):
            keeper.check(message)
            if client.said is not None:
                raise LinkError("a checkpointer says twice what it is")
            client.said = message
            known = self._of(message.checkpoint)
            for old in [c for c in known.clients if c.round < client.round]:
                old.close()  # a process that its rank left may have the other end still
            if not known.clients:
                known.refused.clear()
                known.reckoned = None  # there may be other nodes and ranks than in the last round
            known.clients.append(client)
            if known.leaving.round != client.round:
                known.leaving = Leaving(client.round)
            if known.loads.round != client.round:
                known.loads = Loads(client.round, read_only=True)
            known.loads.read_only &= message.read_only
            if not message.read_only:
                self._keep_terms(known, message.terms)
            self._inform(client)
            return
        if client.said is None:
            raise LinkError("a checkpointer says nothing of itself first")
        known = self._of(client.said.checkpoint)
        match message:
            case keeper.Need() if not 0 < message.bytes < 1 << 50:
                raise LinkError(f"a slot of {message.bytes} bytes is none")
            case keeper.Need():
                self._give(client, client.said, known, message)
            case keeper.Held():
                self._held(client.said, known)
                self._flush(client.said.checkpoint, known)  # it was not free yet, if it was ordered
            case keeper.Written():
                shard = pb.Shard(rank=client.said.rank, bytes=message.bytes, digest=message.digest)
                at = Moment(client.round, message.step)
                known.flushes.put(at, client.said.world_size, shard, message.value)
                known.has(at, client.said.rank)
                known.straight.append(_straight(client.said, at, message))
                self._look_for_holes(known, at.round)
                self._tell(known.name)
            case keeper.Failed():
                at = Moment(client.round, message.step)
                if known.fail(at, client.said.rank, message.reason):
                    self._inform_all(known)
                    self._tell(known.name)
            case keeper.Skipped():
                if known.skip(Moment(client.round, message.step), client.said.rank):
                    self._inform_all(known)
                    self._tell(known.name)
            case keeper.Shed():
                self._allotment.shed(known, client.said)
                self._tell(known.name)
            case keeper.Saved():
                if client.round == known.leaving.round:
                    self._saved(client.said, known, message)
            case keeper.Load():
                known.loads.ask(client, client.said, message)
                self._tell(known.name)
            case keeper.Looked():
                known.loads.hear(client, message, self._job())
                self._tell(known.name)
            case keeper.Damaged():
                known.loads.give_up(message)
                self._tell(known.name)
            case keeper.Doubted() if not all(
                0 <= n < 1 << 31 for n in (message.after, *message.ranks)
            ):
                raise LinkError("a doubt names steps or ranks that there are not")
            case keeper.Doubted():
                known.loads.doubt(message)
                self._tell(known.name)
                client.answer(keeper.Noted(question=message.question))

    def _keep_terms(self, known: Checkpoint, terms: Terms) -> None:
        """How it is kept on storage; who comes after this agent is to know, too."""
        if known.flushes.terms != terms:
            self._shelf.note(known.name, codec.dumps(terms).encode())
        known.flushes.terms = terms

    def _give(
        self, client: Client, said: keeper.Open, known: Checkpoint, need: keeper.Need
    ) -> None:
        """Show a rank the slots that it has."""
        for other in self._checkpoints.values():
            if other is not known and not other.clients:
                self._allotment.forget_unused(other)
        try:
            slots, refused = self._allotment.own(known, said, need.bytes)
        except OSError as error:
            slots, refused = [], f"no slot can be made: {error}"
        if refused:
            client.answer(keeper.Refused(reason=refused, question=need.question))
        else:
            answer = keeper.Slots(count=len(slots), question=need.question)
            client.answer(answer, tuple(one.fd for one in slots))

    def _held(self, said: keeper.Open, known: Checkpoint) -> None:
        """Once all ranks of this node hold a moment, or have written it themselves, the master hears."""

        def newest(local: int) -> Moment:
            rank = said.rank - said.local_rank + local
            held = (one.moment or NEVER for one in known.slots.own.get(local, ()))
            written = known.flushes.written.items()
            return max([*held, *(Moment(*at) for at, one in written if rank in one.shards), NEVER])

        for one in known.slots.own.get(said.local_rank, ()):
            known.has(one.moment or NEVER, said.rank)
        mine = newest(said.local_rank)
        if all(newest(local) >= mine for local in range(said.local_world_size)):
            self._look_for_holes(known, mine.round)
            self._tell(said.checkpoint)

    def _look_for_holes(self, known: Checkpoint, round_: int) -> None:
        if known.find_holes(round_):
            self._inform_all(known)

    # --- the end of a round that is planned (master/leaving.py) ----------------------------------

    def leave(self, order: pb.Leave) -> None:
        """The master says at which step the ranks of a round are to leave."""
        known = self._of(order.checkpoint)
        if order.round < known.leaving.round or order.order <= known.leaving.order.order:
            return
        if order.round != known.leaving.round:
            known.leaving = Leaving(order.round)
        known.leaving.order = order
        self._inform_all(known)
        self._tell_stand(order.checkpoint, known)

    def release(self, number: int) -> None:
        """The ranks of that round have their signal: who has a handler for it goes on to obey that."""
        for known in self._checkpoints.values():
            if known.leaving.round == number:
                known.leaving.order = pb.Leave(order=known.leaving.order.order)
                self._inform_all(known)

    def stands(self) -> list[pb.Stand]:
        """All that this node has to say of it."""
        return [
            known.leaving.stand(known.name, known.leaving_ranks)
            for known in self._checkpoints.values()
            if known.leaving.order.step
        ]

    def _saved(self, said: keeper.Open, known: Checkpoint, saved: keeper.Saved) -> None:
        leaving = known.leaving
        leaving.hear(said.local_rank, saved)
        late = not saved.waits and saved.step >= leaving.order.step
        if leaving.order.step and (late or len(leaving.waiting) == said.local_world_size):
            self._tell_stand(said.checkpoint, known)

    def _tell_stand(self, checkpoint: str, known: Checkpoint) -> None:
        self._say(known.leaving.stand(checkpoint, known.leaving_ranks))

    def _inform(self, client: Client) -> None:
        """Tell a rank what is newest now, and mark its slots: it must hear what is kept before it sees
        that something is newer. A rank that does not read hears it later, once, however much there
        was in between."""
        if client.said is None:
            return
        known = self._of(client.said.checkpoint)
        newest: tuple[keeper.ToRank, ...] = ()
        if known.whole is not None or known.keep:
            at, keep = moment_of(known.whole), tuple(sorted(known.keep))
            newest += (keeper.Whole(round=at.round, step=at.step, keep=keep),)
        if known.committed is not None:
            at = moment_of(known.committed)
            newest += (keeper.Committed(round=at.round, step=at.step),)
        if client.round == known.leaving.round and known.leaving.order.order:
            order = known.leaving.order
            newest += (keeper.Leave(order=order.order, step=order.step),)
        newest += known.lost_of(client.round)
        if spans := merged([*known.left_out, *known.skipped_elsewhere]):
            newest += (keeper.LeftOut(spans=spans),)
        complaint = known.flushes.complaint
        if complaint.reason or client.was_told(keeper.Stalled):
            newest += (complaint,)
        if client.tell(newest):
            self._mark_whole(known, known.slots.own.get(client.said.local_rank, []))

    def _inform_all(self, known: Checkpoint) -> None:
        for client in list(known.clients):  # who is cut off is gone from there
            self._inform(client)

    def _mark_whole(self, known: Checkpoint, slots: Iterable[Slot]) -> None:
        """Note in slots that hold the newest whole moment that they do."""
        for one in slots:
            if known.whole is not None:
                _mark(one, moment_of(known.whole), known.all_units)

    # --- the master --------------------------------------------------------------------------

    def statements(self) -> list[pb.Snapshots]:
        """All that this node has to say."""
        return [self._statement(known) for known in self._checkpoints.values()]

    def _tell(self, checkpoint: str) -> None:
        self._say(self._statement(self._checkpoints[checkpoint]))

    def _statement(self, known: Checkpoint) -> pb.Snapshots:
        return statement.of(known, self._replicas)

    def obey(self, order: pb.SnapshotOrders) -> None:
        """What the master says of one checkpoint. A slot that is to be flushed is claimed before its
        rank hears of anything that would let it go."""
        known = self._of(order.checkpoint)
        known.pending = order.pending
        self._news.set()
        known.flush = list(order.flush)
        _mark_due(known)
        self._flush(order.checkpoint, known)
        for commit in order.commits:
            known.flushes.commit(self._job(), commit)
        whole, kept = known.learn(order)
        if whole:
            ranks = {client.said.local_rank for client in known.clients if client.said is not None}
            self._mark_whole(known, (one for slots in known.slots.copy.values() for one in slots))
            for local in known.slots.own.keys() - ranks:
                self._mark_whole(known, known.slots.own[local])
        if whole or kept:
            self._allotment.forget_spent(known)
        self._inform_all(known)
        if order.HasField("restore"):
            known.answer = order.restore
            here = [one for one in known.slots if one.moment == moment_of(order.restore.moment)]
            known.loads.answer(known.clients, order.restore, here, self._replicas.tls)
        if order.HasField("look"):
            known.loads.look(known.clients, order.look)
        self._fetch(order.checkpoint, known, order.fetch)

    def unheard(self) -> None:
        """No master hears us any more, so none will say that what is on its way has come."""
        for known in self._checkpoints.values():
            known.pending = False
        self._news.set()

    async def persisted(self, timeout: float, way_out: str = "") -> None:
        """Wait until nothing is on its way to storage any more, on this node or another: what is only
        in memory ends with the nodes. And until what is not to be kept there is deleted.

        way_out: how whoever reads that storage fails ends it, for the end of that line."""
        told: set[tuple[str, str]] = set()
        try:
            async with asyncio.timeout(timeout):
                while any(
                    known.pending or known.flushes.busy for known in self._checkpoints.values()
                ):
                    self._say_waits(told, timeout, way_out)
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            log.error("what is still on its way to storage after %g s is given up", timeout)

    def say_lost(self) -> None:
        """Where training ends with this node: the steps that no storage has."""
        for known in self._checkpoints.values():
            newest, stored = known.newest, known.stored
            if newest > stored and newest.step:
                log.error(
                    "checkpoint %s: step %d was in memory alone and is lost%s; %s", known.name,
                    newest.step, f": {why}" if (why := known.flushes.complaint.reason) else "",
                    f"step {stored.step} is on storage" if stored.step > 0 else "no step is on storage",
                )  # fmt: skip

    def _say_waits(self, told: set[tuple[str, str]], timeout: float, way_out: str) -> None:
        """That no training goes on any more, and this is what the end waits for; each reason once."""
        for known in self._checkpoints.values():
            reason = known.flushes.complaint.reason
            if reason and known.flushes.busy and (known.name, reason) not in told:
                told.add((known.name, reason))
                log.error(
                    "training is over; checkpoint %s: step %d waits for its storage, %g s at most: %s%s",
                    known.name, known.newest.step, timeout, reason, way_out,
                )  # fmt: skip

    async def look(self, asked: pb.Look) -> pb.Found:
        """Whether a step is on storage."""
        found = await self._of(asked.checkpoint).flushes.look(asked.step)
        if isinstance(found, str):
            return pb.Found(request=asked.request, error=found[:1000])
        ours = found.job == self._job()  # another's is older than memory
        moment = pb.Moment(round=found.round if ours else 0, step=asked.step)
        return pb.Found(request=asked.request, moment=moment)

    def _flush(self, checkpoint: str, known: Checkpoint) -> None:
        """One moment at a time, the oldest that is here: each pins a slot of every rank."""
        if known.flushes.busy:
            return
        for order in sorted(known.flush, key=lambda order: moment_of(order.moment)):
            at = moment_of(order.moment)
            here: dict[int, int] = {}
            world_size = 0
            for one, found in known.slots.held():
                if found.moment == at and found.stamp.rank in order.ranks:
                    here[found.stamp.rank] = one.fd
                    world_size = found.stamp.world_size
            if here and known.flushes.write(self._job(), at, world_size, here):
                return

    def _flushed(self, checkpoint: str) -> None:
        """The flusher is done with something, or cannot do it."""
        known = self._of(checkpoint)
        self._news.set()
        self._inform_all(known)
        done = known.flushes.written
        known.flush = [
            order
            for order in known.flush
            if not set(order.ranks)
            <= set(done[moment_of(order.moment)].shards if moment_of(order.moment) in done else ())
        ]
        self._tell(checkpoint)
        self._flush(checkpoint, known)

    # --- replicas ----------------------------------------------------------------------------

    def _fetch(self, checkpoint: str, known: Checkpoint, orders: Iterable[pb.Fetch]) -> None:
        """Have the images that the master names copied here, and no others."""
        known.fetch = {(moment_of(order.moment), order.rank): order for order in orders}
        wanted = {(*key, order.base) for key, order in known.fetch.items()}
        self._replicas.only(checkpoint, wanted)
        under_way = self._replicas.fetching(checkpoint)
        here = {(found.moment, found.stamp.rank) for _, found in known.slots.held()}
        opened = [client.said for client in known.clients if client.said is not None]
        for (moment, rank), order in known.fetch.items():
            if (moment, rank) in under_way | here or (checkpoint, moment) in self._replicas.unfit:
                continue
            try:
                one = self._allotment.copy(known, rank, order.slot_bytes)
            except OSError as error:
                log.warning("checkpoint %s: no memory for a replica: %s", checkpoint, error)
                self._replicas.unfit.add((checkpoint, moment))
                self._tell(checkpoint)
                return
            if one is not None:
                limit = opened[0].bandwidth if opened else None
                self._replicas.fetch(checkpoint, moment, rank, order.base, one.fd, limit)

    def _replicated(self, checkpoint: str) -> None:
        """A replica has come, or cannot."""
        known = self._of(checkpoint)
        for one, found in known.slots.held():
            order = known.fetch.get((found.moment, found.stamp.rank))
            if order is not None and not found.all_units:
                _mark(one, found.moment, order.all_units)
        self._tell(checkpoint)


def _straight(said: keeper.Open, at: Moment, message: keeper.Written) -> uneven.Share:
    first = said.rank - said.local_rank
    return uneven.Share(
        moment=at, rank=said.rank, node=range(first, first + said.local_world_size),
        beliefs=[Belief(*belief) for belief in message.beliefs],
    )  # fmt: skip


def _mark_due(known: Checkpoint) -> None:
    """Note in slots that they are to go to storage, before their ranks hear of anything newer: what takes the
    place of a step that was due is due on the rank alone that has written over that."""
    wanted = {(moment_of(order.moment), rank) for order in known.flush for rank in order.ranks}
    for one, found in known.slots.held() if wanted else ():
        if (found.moment, found.stamp.rank) in wanted and not found.stamp.persist:
            with _claimed(one, found.moment) as still:
                if still:
                    slot.mark_persist(one.view)


def _mark(one: Slot, moment: Moment, all_units: int) -> None:
    """Note that the moment is whole, if the slot still holds it."""
    with _claimed(one, moment) as still:
        if still:
            slot.mark_whole(one.view, all_units)


@contextlib.contextmanager
def _claimed(one: Slot, moment: Moment) -> Iterator[bool]:
    """Whether the slot still holds that, as it does for as long as this lasts."""
    claim = slot.claim(one.fd, exclusive=False)
    if claim is None:
        yield False
        return
    try:
        yield one.moment == moment
    finally:
        os.close(claim)

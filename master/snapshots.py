"""The shell around `checkpoints.py`: what nodes say of their snapshots in, orders to all of them out."""

import asyncio
import logging
import time
from collections.abc import Mapping

from elastic.master import checkpoints as core
from elastic.master import events as ev
from elastic.master import holdings as held
from elastic.master import messages
from elastic.master.checkpoints import Checkpoint, Orders
from elastic.master.directive import places
from elastic.master.events import Incarnation, NodeId
from elastic.master.gathering import BATCH, LONGEST_PAUSE, PAUSE
from elastic.master.holdings import Member, Said
from elastic.master.launcher import Saved
from elastic.master.session import Session
from elastic.master.shell import Shell
from elastic.master.state import Rollback
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import NotFound
from elastic.proto.moment import Moment

log = logging.getLogger(__name__)

MOST_CHECKPOINTS = 64
"""Of one job."""
LOOK_TIMEOUT = 30.0
"""Seconds that a node has to look on storage; it may be writing."""


class Snapshots:
    """Nothing of it is journaled: who attaches says again what it holds."""

    def __init__(self, shell: Shell, sessions: Mapping[NodeId, Session]) -> None:
        self._shell = shell
        self._sessions = sessions
        self._checkpoints: dict[str, Checkpoint] = {}
        self._told: dict[str, pb.SnapshotOrders] = {}
        """The orders that all have been told."""
        self._news: dict[str, set[NodeId]] = {}
        """Checkpoints of which something was heard since, and from whom: who says something is told
        what it has not been told yet."""
        self._syncing: list[Session] = []
        """Who waits until it is decided on all that was heard."""
        self._timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0
        """When it may be decided again, in the loop's time: that costs O(nodes)."""
        self._looking: dict[int, asyncio.Future[pb.Found]] = {}
        """By request, who waits for what a node finds on storage."""
        self._looks = 0
        self._without: tuple[Rollback | None, tuple[ev.Damage, ...]] = (None, ())
        """What `_checkpoints` is without."""
        self._last: dict[str, Moment] = {}
        """In whose save ranks wait, and which goes to storage since who leaves alone has a part of it."""

    def hear(self, session: Session, message: pb.Snapshots) -> None:
        """A node says what it holds of one checkpoint."""
        name = message.checkpoint[: messages.MAX_TEXT]
        if name not in self._checkpoints and len(self._checkpoints) >= MOST_CHECKPOINTS:
            log.warning("more than %d checkpoints: %s is left out", MOST_CHECKPOINTS, name)
            return
        told = self._sound(name, messages.said(message, session.node_id, session.incarnation))
        self._checkpoints[name] = core.hear(self._checkpoints.get(name, Checkpoint()), told)
        self._soon(name).add(session.node_id)
        for damaged in messages.damaged(message, name):
            self._shell.fold(damaged)
        for doubted in messages.doubted(message, name):
            self._shell.fold(doubted)
        current = self._shell.job.round
        if current is not None and not current.saves:
            used = told.asks == current.number and not told.read_only
            if used or any(moment.round == current.number for moment in told.holdings):
                self._shell.fold(ev.Saving(current.number))

    def _soon(self, name: str) -> set[NodeId]:
        """Decide in a moment, with what else comes until then: all nodes say something each step."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            due = max(loop.time() + BATCH, self._not_before)
            self._timer = loop.call_at(due, self._decide_all)
        return self._news.setdefault(name, set())

    def _decide_all(self) -> None:
        self._timer = None
        news, self._news = self._news, {}
        began = time.monotonic()
        for name, spoke in news.items():
            self._decide(name, spoke)
        took = time.monotonic() - began
        self._not_before = asyncio.get_running_loop().time() + min(PAUSE * took, LONGEST_PAUSE)
        syncing, self._syncing = self._syncing, []
        for session in syncing:
            session.push(pb.ToAgent(synced=pb.Synced()))

    def sync(self, session: Session) -> None:
        """Answer once the orders that follow from what it has said are out."""
        self._syncing.append(session)
        if self._timer is None:
            self._decide_all()

    def _sound(self, name: str, said: Said) -> Said:
        """Without what somebody went back behind, and what is damaged."""
        back = self._shell.job.rollback
        kept = {checkpoint: Moment(*at) for checkpoint, *at in back.moments} if back else {}
        damaged = self._damaged(name)
        bad = {(Moment(one.round, one.step), one.from_memory) for one in damaged if not one.later}
        if back and name in kept:
            at = kept[name]
            said = held.void(said, back.before, at, damaged=(at, False) in bad)
        for one in damaged:
            if one.later:
                said = held.trusted(said, one.round, one.step - 1)
        return held.sound(said, bad) if bad else said

    def _damaged(self, name: str) -> list[ev.Damage]:
        return [one for one in self._shell.job.damaged if one.checkpoint == name]

    async def find(self, step: int) -> tuple[tuple[str, int, int], ...]:
        """That step of every checkpoint that is saved to, on storage: name, round and step. Raises `NotFound`."""
        job = self._shell.job
        head = self._sessions.get(job.round.seats[0].node_id) if job.round is not None else None
        saved = self._saved_to
        if head is None or not saved:
            raise NotFound("no ranks save to a checkpoint now, so there is none to go back to")
        found: list[tuple[str, int, int]] = []
        for name in sorted(saved):
            self._looks += 1
            look = pb.Look(request=self._looks, checkpoint=name, step=step)
            answer = self._looking[look.request] = asyncio.get_running_loop().create_future()
            try:
                head.push(pb.ToAgent(look=look))
                async with asyncio.timeout(LOOK_TIMEOUT):
                    told = await answer
            except TimeoutError:
                raise NotFound(
                    f"storage does not answer: is step {step} of {name} there?"
                ) from None
            finally:
                del self._looking[look.request]
            if not told.HasField("moment"):
                raise NotFound(f"nothing is restarted: {told.error}")
            found.append((name, told.moment.round, told.moment.step))
        return tuple(found)

    @property
    def _saved_to(self) -> dict[str, Checkpoint]:
        """Those that are not only loaded from."""
        return {name: one for name, one in self._checkpoints.items() if not one.read_only}

    def found(self, message: pb.Found) -> None:
        """A node has looked on storage."""
        look = self._looking.get(message.request)
        if look is not None and not look.done():
            look.set_result(message)

    def newest_of(self, number: int) -> tuple[str, int] | None:
        """The checkpoint of which that round has saved most, and the step beyond what is known of it;
        None where nobody has spoken of one that is saved to."""
        steps = {
            name: max((m.step for m in {*state.images, *state.due} if m.round == number), default=0)
            for name, state in self._saved_to.items()
        }
        if not steps:
            return None
        step, name = max((step, name) for name, step in steps.items())
        return name, step + 1

    @property
    def saved(self) -> Saved:
        """Of the checkpoint that is the furthest."""
        found = [
            Saved(
                memory=None if state.whole is None else state.whole.moment.step,
                storage=None if state.known in (None, held.NOTHING) else state.known.step,
            )
            for state in self._saved_to.values()
        ]
        return max(found, key=lambda one: (one.memory or 0, one.storage or 0), default=Saved())

    def safe(self, name: str, moment: Moment) -> bool:
        """It is on storage, or whole and stays so when those have left that drain. Where it is whole and
        would not, have it written; what ranks have written themselves is due anyway."""
        state = self._checkpoints[name]
        if (state.known or held.NOTHING) >= moment:
            return True
        if state.whole is None or state.whole.moment != moment:
            return False
        going = {node.node_id for node in self._shell.job.nodes.values() if node.draining}
        if held.survives(held.of(state.said, moment), state.whole.units, going):
            return True
        if self._last.get(name) != moment:
            self._last[name] = moment
            self._soon(name)
        return False

    def lost(self, name: str, moment: Moment) -> bool:
        """It is never whole; what is saved next may be."""
        return core.is_lost(self._checkpoints[name], moment)

    def review(self) -> None:
        """A round or the job has begun or ended, somebody went back, or something is damaged."""
        without = self._shell.job.rollback, self._shell.job.damaged
        if without != self._without:
            self._without = without
            for name, state in list(self._checkpoints.items()):
                self._checkpoints[name] = Checkpoint(read_only=state.read_only)
                for said in state.said.values():
                    said = self._sound(name, said)
                    self._checkpoints[name] = core.hear(self._checkpoints[name], said)
        for name in self._checkpoints:
            self._decide(name, self._news.pop(name, set()))

    def _decide(self, name: str, spoke: set[NodeId]) -> None:
        job = self._shell.job
        placed = places(job.round if job.result is None else None)
        number = job.last_round if placed else 0
        labels = {} if job.round is None else {s.node_id: s.labels for s in job.round.seats}
        members = [
            Member(
                node_id,
                range(place.first_rank, place.first_rank + place.local_world_size),
                labels[node_id],
            )
            for node_id, place in placed.items()
        ]
        state = self._checkpoints[name]
        last = state.whole is not None and state.whole.moment == self._last.get(name)
        state, orders = core.decide(state, number, members, ending=last or not placed)
        self._checkpoints[name] = state
        if orders.reason:
            log.info("checkpoint %s: %s", name, orders.reason)
        self._tell(name, orders, spoke)

    def _tell(self, name: str, orders: Orders, spoke: set[NodeId]) -> None:
        """Everybody what has changed for all; each its own part, if that has changed."""
        order = messages.snapshot_orders(name, orders)
        changed = order != self._told.get(name)
        self._told[name] = order
        busy = spoke | set(orders.flush) | {commit.node_id for commit in orders.commits}
        busy |= set(orders.copying.copies if orders.copying is not None else ())
        busy |= {orders.look[0]} if orders.look is not None else set()
        for node_id in self._checkpoints[name].said if changed else busy:
            told = self._sessions.get(node_id)
            if told is None:
                continue
            mine = pb.SnapshotOrders()
            mine.CopyFrom(order)
            messages.own_part(node_id, orders, self._checkpoints[name].said, mine)
            if mine.HasField("look"):
                messages.name_damaged(self._damaged(name), mine.look)
            if mine != told.snapshots.get(name):
                told.snapshots[name] = mine
                told.push(pb.ToAgent(snapshots=mine))

    @property
    def pending(self) -> bool:
        """Something is on its way to storage."""
        return any(order.pending for order in self._told.values())

    def gone(self, node_id: NodeId, incarnation: Incarnation) -> None:
        """Its stream ended: what it holds cannot be counted on until it is back, and others may wait
        for what only it could write."""
        for name, state in list(self._checkpoints.items()):
            self._checkpoints[name] = core.forget(state, node_id, incarnation)
            if self._checkpoints[name] is not state:
                self._soon(name)

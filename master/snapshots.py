"""The shell around `checkpoints.py`: what nodes say of their snapshots in, orders to all of them out."""

import logging
from collections.abc import Mapping

from elastic.master import checkpoints as core
from elastic.master import messages
from elastic.master.checkpoints import Checkpoint, Orders
from elastic.master.directive import places
from elastic.master.events import Incarnation, NodeId
from elastic.master.holdings import Member
from elastic.master.session import Session
from elastic.master.shell import Shell
from elastic.proto import master_pb2 as pb

log = logging.getLogger(__name__)

MOST_CHECKPOINTS = 64
"""Of one job."""


class Snapshots:
    """Nothing of it is journaled: who attaches says again what it holds."""

    def __init__(self, shell: Shell, sessions: Mapping[NodeId, Session]) -> None:
        self._shell = shell
        self._sessions = sessions
        self._checkpoints: dict[str, Checkpoint] = {}
        self._told: dict[str, pb.SnapshotOrders] = {}
        """The orders that all have been told."""

    def hear(self, session: Session, message: pb.Snapshots) -> None:
        """A node says what it holds of one checkpoint."""
        name = message.checkpoint[: messages.MAX_TEXT]
        if name not in self._checkpoints and len(self._checkpoints) >= MOST_CHECKPOINTS:
            log.warning("more than %d checkpoints: %s is left out", MOST_CHECKPOINTS, name)
            return
        told = messages.said(message, session.node_id, session.incarnation)
        self._checkpoints[name] = core.hear(self._checkpoints.get(name, Checkpoint()), told)
        self._decide(name, session)

    def review(self) -> None:
        """A round or the job has begun or ended."""
        for name in self._checkpoints:
            self._decide(name)

    def _decide(self, name: str, session: Session | None = None) -> None:
        """session: one that is told in any case, if it has not been told the same."""
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
        state, orders = core.decide(self._checkpoints[name], number, members, ending=not placed)
        self._checkpoints[name] = state
        if orders.reason:
            log.info("checkpoint %s: %s", name, orders.reason)
        self._tell(name, orders, session)

    def _tell(self, name: str, orders: Orders, session: Session | None) -> None:
        """Everybody what has changed for all; each its own part, if that has changed."""
        order = messages.snapshot_orders(name, orders)
        changed = order != self._told.get(name)
        self._told[name] = order
        busy = set(orders.flush) | {commit.node_id for commit in orders.commits}
        busy |= set(orders.copying.copies if orders.copying is not None else ())
        if session is not None:
            busy.add(session.node_id)
        for node_id in self._checkpoints[name].said if changed else busy:
            told = self._sessions.get(node_id)
            if told is None:
                continue
            mine = pb.SnapshotOrders()
            mine.CopyFrom(order)
            messages.own_part(node_id, orders, self._checkpoints[name].said, mine)
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
                self._decide(name)

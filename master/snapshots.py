"""The shell around `checkpoints.py`: what nodes say of their snapshots in, orders to all of them out."""

import logging
from collections.abc import Mapping

from elastic.master import checkpoints as core
from elastic.master import messages
from elastic.master.checkpoints import Checkpoint
from elastic.master.events import Incarnation, NodeId
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
        state = core.hear(self._checkpoints.get(name, Checkpoint()), told)
        current = self._shell.job.round
        standing = current is not None and current.standing
        number = current.number if current is not None and standing else 0
        members = [s.node_id for s in current.seats] if current is not None and standing else []
        state, orders = core.decide(state, number, members)
        self._checkpoints[name] = state
        if orders.reason:
            log.info("checkpoint %s: %s", name, orders.reason)
        order = messages.snapshot_orders(name, orders)
        if order != self._told.get(name):
            self._told[name] = order
            for node_id in state.said:
                if node_id in self._sessions:
                    self._sessions[node_id].push(pb.ToAgent(snapshots=order))
        elif name not in session.snapshots:
            session.push(pb.ToAgent(snapshots=order))
        session.snapshots.add(name)

    def gone(self, node_id: NodeId, incarnation: Incarnation) -> None:
        """Its stream ended: what it holds cannot be counted on until it is back."""
        for name, state in self._checkpoints.items():
            self._checkpoints[name] = core.forget(state, node_id, incarnation)

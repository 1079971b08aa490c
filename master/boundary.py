"""The shell around `leaving.py`: orders to leave out, answers in, until all ranks wait in one save."""

from collections.abc import Iterable, Mapping

from elastic.master import events as ev
from elastic.master import leaving as core
from elastic.master import messages
from elastic.master.events import NodeId
from elastic.master.leaving import Leaving, Stand
from elastic.master.session import Session
from elastic.master.shell import Shell
from elastic.master.snapshots import Snapshots
from elastic.master.state import Round
from elastic.proto import master_pb2 as pb
from elastic.proto.moment import Moment


class Boundary:
    """Nothing of it is journaled: another master gives orders of its own, which all answer."""

    def __init__(
        self, shell: Shell, sessions: Mapping[NodeId, Session], snapshots: Snapshots
    ) -> None:
        self._shell = shell
        self._sessions = sessions
        self._snapshots = snapshots
        self._order = 0
        """The number of the last order."""
        self._round = 0
        """Of which it is."""
        self._checkpoint = ""
        """In whose saves ranks are to wait."""
        self._leaving: Leaving | None = None
        """None: nobody is to leave."""

    def _standing(self) -> Round | None:
        """The round whose ranks can be told; those of one that is over are being stopped, and who of
        them waits goes on waiting."""
        job = self._shell.job
        return job.round if job.result is None and job.round and job.round.standing else None

    def review(self) -> None:
        """A change is planned, or withdrawn, or the round is over."""
        current = self._standing()
        if current is None or current.number != self._round:
            self._leaving = None
        if current is None:
            return
        self._round = current.number
        if current.change is None and self._leaving is not None:
            self._leaving = None
            self._next_order()
            self._tell(current)
        elif current.change is not None and current.saves and self._leaving is None:
            found = self._snapshots.newest_of(current.number)
            if found is not None:
                self._checkpoint, next_ = found
                self._leaving = core.begin(self._next_order(), next_)
                self._tell(current)

    def _next_order(self) -> int:
        """A number that no master before has used."""
        self._order = max(self._order + 1, self._shell.job.epoch << 32)
        return self._order

    def _tell(self, current: Round) -> None:
        for seat in current.seats:
            if (session := self._sessions.get(seat.node_id)) is not None:
                self._push(session, self._checkpoint)

    def _push(self, session: Session, checkpoint: str) -> None:
        leaving = self._leaving if checkpoint == self._checkpoint else None
        order = pb.Leave(
            checkpoint=checkpoint,
            round=self._round,
            order=self._order,
            step=leaving.step if leaving else 0,
        )
        session.push(pb.ToAgent(leave=order))

    def hear(self, session: Session, message: pb.Stand) -> None:
        """A node says where its ranks are."""
        current = self._standing()
        about = (message.checkpoint, message.round)
        if self._leaving is None or current is None or about != (self._checkpoint, self._round):
            return
        stand = Stand(
            order=message.order,
            next=message.next,
            waits=message.waits,
            lost=message.lost[: messages.MAX_TEXT],
        )
        self._give(current, core.hear(self._leaving, session.node_id, stand))
        self.look()

    def _give(self, current: Round, leaving: Leaving) -> None:
        """Tell all, where that is another order."""
        self._leaving = leaving
        if leaving.order != self._order:
            self._order = leaving.order
            self._tell(current)

    def attached(self, session: Session, stands: Iterable[pb.Stand]) -> None:
        """A stream begins. stands: by what the node leaves, as it knows; a master before may have said
        so, and what this one said may be lost."""
        self.review()  # a master that has just begun knows of no checkpoint
        names = {stand.checkpoint for stand in stands}
        if self._leaving is not None:
            self._leaving = core.forget(self._leaving, session.node_id)
            names.add(self._checkpoint)
        current = self._standing()
        if current is not None and names:
            self._round = current.number
            self._order = self._order or self._next_order()
            for name in names:
                self._push(session, name)

    def look(self) -> None:
        """Whether all ranks wait in one save, and nothing of it ends with a node that leaves; or one of
        them cannot keep it, so that there is nothing to wait for."""
        current = self._standing()
        if self._leaving is None or current is None:
            return
        step = core.met(self._leaving, len(current.seats))
        if not step:
            return
        moment, lost = Moment(current.number, step), core.lost(self._leaving)
        if lost or self._snapshots.safe(self._checkpoint, moment):
            self._shell.fold(ev.Met(current.number, step, lost))
        elif self._snapshots.lost(self._checkpoint, moment):
            self._give(current, core.further(self._leaving, step))

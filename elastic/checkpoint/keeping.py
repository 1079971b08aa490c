"""A rank's connection to the keeper of its slots."""

import select
import socket
from time import monotonic

from elastic import session
from elastic.proto import keeper
from elastic.proto.errors import CheckpointError, LinkError
from elastic.proto.moment import Moment


class Keeping:
    """Blocking, one question at a time; what the keeper says unasked is taken in between."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.whole: Moment | None = None
        """The newest that is known to be in every rank's memory."""
        self.keep: frozenset[Moment] = frozenset()
        """What must not be written over, whatever is newer."""
        self.committed: Moment | None = None
        """The newest that is known to be on storage."""
        self.stalled = ""
        """Why nothing goes to storage now; empty where it does."""
        self._leave = keeper.Leave()
        """The last that was heard."""

    def tell(self, message: keeper.ToKeeper) -> None:
        try:
            keeper.send(self._end, message)
        except OSError as error:
            raise CheckpointError("the keeper of this rank's snapshots is gone") from error

    def ask(self, message: keeper.ToKeeper, timeout: float) -> tuple[keeper.ToRank, list[int]]:
        """The answer, with its descriptors. Raises `CheckpointError`, also where it is a refusal."""
        self.tell(message)
        deadline = monotonic() + timeout
        while True:
            found = self._receive(deadline - monotonic())
            if found is None:
                raise CheckpointError(
                    f"the keeper of this rank's snapshots is silent for {timeout:g} s"
                )
            answer, fds = found
            if isinstance(answer, keeper.Refused):
                raise CheckpointError(answer.reason)
            unasked = keeper.Whole | keeper.Committed | keeper.Stalled | keeper.Leave
            if not isinstance(answer, unasked):
                return answer, fds

    def wait(self, timeout: float) -> bool:
        """Wait for the keeper to say something unasked, such as `Whole`; whether it did."""
        return self._receive(timeout) is not None

    def drain(self) -> None:
        """Take in what it has said."""
        while self._receive(0.0) is not None:
            pass

    def stay(self, step: int) -> None:
        """The end of the save of `step`: where ranks are to leave, wait for the end of this process, or
        to be told to go on."""
        self.drain()
        while True:
            leave = self._leave
            waits = 0 < leave.step <= step
            self.tell(keeper.Saved(step=step, waits=leave.order if waits else 0))
            if not waits:
                return
            with session.in_phase("leave"):
                while self._leave is leave:
                    self.wait(3600.0)

    def _receive(self, timeout: float) -> tuple[keeper.ToRank, list[int]] | None:
        if not select.select([self._end], [], [], max(0.0, timeout))[0]:
            return None
        try:
            found = keeper.receive_from_keeper(self._end)
        except (OSError, LinkError) as error:
            raise CheckpointError("the keeper of this rank's snapshots is gone") from error
        if found is None:
            raise CheckpointError("the keeper of this rank's snapshots is gone")
        if isinstance(found[0], keeper.Committed):
            self.committed = Moment(found[0].round, found[0].step)
        elif isinstance(found[0], keeper.Whole):
            self.whole = Moment(found[0].round, found[0].step)
            self.keep = frozenset(Moment(*moment) for moment in found[0].keep)
        elif isinstance(found[0], keeper.Stalled):
            self.stalled = found[0].reason
        elif isinstance(found[0], keeper.Leave):
            self._leave = found[0]
        return found

    def close(self) -> None:
        self._end.close()

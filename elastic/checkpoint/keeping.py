"""A rank's connection to the keeper of its slots."""

import os
import select
import socket
import weakref
from time import monotonic

from elastic.proto import descriptors, keeper
from elastic.proto.errors import CheckpointError, LinkError
from elastic.proto.moment import Moment


class Keeping:
    """Blocking, one question at a time; what the keeper says unasked is taken in between."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.whole: Moment | None = None
        """The newest that is known to be in every rank's memory."""
        _open.add(self)
        self.keep: frozenset[Moment] = frozenset()
        """What must not be written over, whatever is newer."""
        self.committed: Moment | None = None
        """The newest that is known to be on storage."""
        self.stalled = ""
        """Why nothing goes to storage now; empty where it does."""

    def tell(self, message: keeper.ToKeeper) -> None:
        try:
            keeper.send(self._end, message)
        except OSError as error:
            raise CheckpointError(
                "the keeper of this rank's snapshots (its agent, or elastic-keeper) is gone"
            ) from error

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
            if isinstance(answer, keeper.Whole | keeper.Committed | keeper.Stalled):
                continue
            expected = (
                answer.count
                if isinstance(answer, keeper.Slots)
                else answer.images + answer.elsewhere
            )
            if len(fds) != expected:  # the kernel drops what finds no room in our table
                descriptors.close(fds)
                raise CheckpointError("too many open files in this rank: ulimit -n")
            return answer, fds

    def wait(self, timeout: float) -> bool:
        """Wait for the keeper to say something unasked, such as `Whole`; whether it did."""
        return self._receive(timeout) is not None

    def drain(self) -> None:
        """Take in what it has said."""
        while self._receive(0.0) is not None:
            pass

    def _receive(self, timeout: float) -> tuple[keeper.ToRank, list[int]] | None:
        if not select.select([self._end], [], [], max(0.0, timeout))[0]:
            return None
        try:
            found = keeper.receive_from_keeper(self._end)
        except (OSError, LinkError) as error:
            raise CheckpointError(
                "the keeper of this rank's snapshots (its agent, or elastic-keeper) is gone"
            ) from error
        if found is None:
            raise CheckpointError(
                "the keeper of this rank's snapshots (its agent, or elastic-keeper) is gone"
            )
        if isinstance(found[0], keeper.Committed):
            self.committed = Moment(found[0].round, found[0].step)
        elif isinstance(found[0], keeper.Whole):
            self.whole = Moment(found[0].round, found[0].step)
            self.keep = frozenset(Moment(*moment) for moment in found[0].keep)
        elif isinstance(found[0], keeper.Stalled):
            self.stalled = found[0].reason
        return found

    def close(self) -> None:
        self._end.close()


_open: weakref.WeakSet[Keeping] = weakref.WeakSet()


def _forget() -> None:
    """A process that a rank forks, such as a DataLoader's worker, would hide the rank's end."""
    for keeping in list(_open):
        keeping.close()


os.register_at_fork(after_in_child=_forget)

"""A rank's connection to the keeper of its slots."""

import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import replace
from threading import Condition, Lock
from time import monotonic

from elastic import session
from elastic.proto import descriptors, keeper
from elastic.proto.errors import CheckpointError, LinkError
from elastic.proto.moment import Moment, Span
from elastic.proto.phases import LEAVING

GONE = "the keeper of this rank's snapshots (its agent, or elastic-keeper) is gone"
MOST_LOST = 64
"""Moments that are never whole, the newest, that are remembered."""
SLICE = 0.1
"""Seconds until who reads looks whether another thread has taken in what it waits for."""
FORKED = "a Checkpointer belongs to the rank that made it, not to a process that it forked"


class Keeping:
    """For several threads: whoever waits for something reads, for all, while nobody else does."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._gone = GONE
        """What is said where the other end is not there."""
        self._changed = Condition()
        self._reading = False
        self._asking = Lock()
        self._question = 0
        """The number of the last."""
        self._answer: tuple[keeper.Answer, list[int]] | None = None
        """To that one."""
        self.said = 0
        """How many times it has said something unasked, such as `Whole`."""
        self.whole: Moment | None = None
        """The newest that is known to be in every rank's memory."""
        self.keep: frozenset[Moment] = frozenset()
        """What must not be written over, whatever is newer."""
        self.committed: Moment | None = None
        """The newest that is known to be on storage."""
        self.stalled = keeper.Stalled()
        """Why something is not on storage; empty where all goes well."""
        self.lost: dict[Moment, keeper.Lost] = {}
        """The moments of this round that are never whole, though they were to be."""
        self._left_out: tuple[Span, ...] = ()
        self._leave = keeper.Leave()
        """The last that was heard."""
        _open.add(self)

    def tell(self, message: keeper.ToKeeper) -> None:
        try:
            keeper.send(self._end, message)
        except OSError as error:
            raise CheckpointError(self._gone) from error

    def ask(self, message: keeper.Question, timeout: float) -> tuple[keeper.Answer, list[int]]:
        """The answer, with its descriptors. Raises `CheckpointError`."""
        deadline = monotonic() + timeout
        with self._asking:  # one question at a time
            self._question += 1
            self.tell(replace(message, question=self._question))
            with self._changed:
                while self._answer is None:
                    if not self._receive(deadline) and self._answer is None:
                        self._question += 1  # its answer is nobody's from here on
                        raise CheckpointError(
                            f"the keeper of this rank's snapshots is silent for {timeout:g} s"
                        )
                answer, fds = self._answer
                self._answer = None
        expected = 0
        if isinstance(answer, keeper.Slots):
            expected = answer.count
        elif isinstance(answer, keeper.Restore):
            expected = answer.images + answer.elsewhere
        if len(fds) != expected:  # the kernel drops what finds no room in our table
            descriptors.close(fds)
            raise CheckpointError("too many open files in this rank: ulimit -n")
        return answer, fds

    def wait(self, said: int, timeout: float) -> bool:
        """Wait until `self.said` is no longer `said`; whether it is."""
        deadline = monotonic() + timeout
        with self._changed:
            while self.said == said:
                if not self._receive(deadline):
                    break
            return self.said != said

    def left_out(self, moment: Moment) -> bool:
        """Whether some rank is known to have left it out."""
        return any(span.has(moment) for span in self._left_out)

    def drain(self) -> None:
        """Take in what it has said."""
        with self._changed:
            self._pull()

    def stay(self, step: int, keep: Callable[[], str]) -> None:
        """The end of the save of `step`: where ranks are to leave, wait for the end of this process, or
        to be told to go on. keep: has that step kept, before it waits for there; else says why not."""
        self.drain()
        while True:
            leave = self._leave
            if not 0 < leave.step <= step:
                self.tell(keeper.Saved(step=step))
                return
            self.tell(keeper.Saved(step=step, waits=leave.order, lost=keep()))
            with session.in_phase(LEAVING):
                said = self.said
                while self._leave is leave:
                    self.wait(said, 3600.0)
                    said = self.said

    def _receive(self, deadline: float) -> bool:
        """Wait for something to be said, or for another thread to take it in, or a while; False where the
        time is over. Call it with `_changed`, which is free meanwhile."""
        left = max(0.0, deadline - monotonic())
        if self._reading:
            return self._changed.wait(left)
        self._reading = True
        self._changed.release()
        try:
            found = bool(descriptors.ready([self._end.fileno()], min(left, SLICE)))
        except (OSError, ValueError) as error:
            raise CheckpointError(self._gone) from error
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        self._pull()
        return found or monotonic() < deadline

    def _pull(self) -> None:
        """Take in what is there. With `_changed`, so that nothing is on its way when it returns."""
        try:
            while descriptors.ready([self._end.fileno()], 0):
                found = keeper.receive_from_keeper(self._end)
                if found is None:
                    raise CheckpointError(self._gone)
                self._take(*found)
                self._changed.notify_all()
        except (OSError, LinkError, ValueError) as error:
            raise CheckpointError(self._gone) from error

    def _take(self, message: keeper.ToRank, fds: list[int]) -> None:
        if isinstance(message, keeper.Committed):
            self.committed = Moment(message.round, message.step)
        elif isinstance(message, keeper.Whole):
            self.whole = Moment(message.round, message.step)
            self.keep = frozenset(Moment(*moment) for moment in message.keep)
        elif isinstance(message, keeper.Stalled):
            self.stalled = message
        elif isinstance(message, keeper.Lost):
            lost = {**self.lost, Moment(message.round, message.step): message}
            self.lost = dict(sorted(lost.items())[-MOST_LOST:])
        elif isinstance(message, keeper.LeftOut):
            self._left_out = tuple(Span(*span) for span in message.spans)
        elif isinstance(message, keeper.Leave):
            self._leave = message
        if not isinstance(message, keeper.Answer):
            self.said += 1
        elif message.question == self._question:
            self._answer = message, fds
        else:
            descriptors.close(fds)

    @property
    def open(self) -> bool:
        return self._end.fileno() >= 0

    def close(self, why: str = "this Checkpointer is closed") -> None:
        self._end.close()
        self._gone = why


_open: weakref.WeakSet[Keeping] = weakref.WeakSet()


def _leave() -> None:
    """In a fork: the keeper is to see the end of its rank, not that of a loader's worker."""
    for keeping in _open:
        keeping.close(FORKED)


os.register_at_fork(after_in_child=_leave)

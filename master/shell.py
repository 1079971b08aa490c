"""The shell around the pure core: clock, journal, timers. Folds events, hands effects out."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from elastic.master import account, notices
from elastic.master import events as ev
from elastic.master.events import Effect, Event
from elastic.master.job import Job, handle, replay
from elastic.master.journal import Entry, Journal
from elastic.master.notices import Notice
from elastic.master.policy import Policy
from elastic.proto.errors import JournalError
from elastic.proto.job_folder import MASTER, MasterNote

log = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds until the journal is tried again."""
STALL = 1.0
"""Seconds by which a timer may be late before this process counts as having stood still."""
LONGEST_GAP = 3600.0
"""Seconds of wall clock that a master's absence adds to job time at most."""


class Shell:
    """Owns a job's state. Single threaded: every call comes from the event loop."""

    def __init__(
        self,
        journal: Journal,
        policy: Policy,
        launch: str,
        notify: Callable[[Notice], None] | None = None,
        *,
        job_uid: str = "",
        least_epoch: int = 0,
        least_round: int = 0,
    ) -> None:
        """notify: gets what somebody is to be told of, once the journal has it.

        job_uid: of a new job; empty: it makes one up. least_epoch, least_round: no lower ones are taken.
        """
        self._policy = policy
        self._job_uid = job_uid or uuid4().hex
        self._least = least_epoch, least_round
        self.job = Job()
        self._journal = journal
        self._launch = launch
        self._notify = notify
        self._act: Callable[[Effect], None] = lambda effect: None
        self._backlog: list[Event] = []
        self._complained = False
        self.reason = ""
        """The last one decided, in words."""
        self._timer: asyncio.TimerHandle | None = None
        self._origin = time.monotonic()
        self.noted = asyncio.Event()

    async def begin(
        self, act: Callable[[Effect], None], last: MasterNote | None, told_to_end: asyncio.Event
    ) -> None:
        """Replay the journal and take the next epoch; from now on `act` gets every effect.

        last: what the master before wrote of itself. Raises JournalError where the journal knows
        less, and where it cannot be written; after a life of the same launcher, whose ranks
        train, this waits until it can, or until it is told to end.
        """
        job, wall, job_time, entries = self._journal.load()
        job = replay(job, ((entry.event, entry.job) for entry in entries), self._policy)
        if last is not None and _older(job, last):
            raise JournalError(
                f"the journal {self._journal.path} has lost what was written to it: it ends in "
                f"epoch {job.epoch}, {MASTER} beside it says {last.epoch}; put back a good copy, or "
                "move both away to begin the job anew"
            )
        if entries:
            wall, job_time = entries[-1].wall, entries[-1].job
        gap = min(max(0.0, time.time() - wall), LONGEST_GAP) if wall else 0.0
        self._origin = time.monotonic() - (job_time + gap)
        self.job, self._act = job, act
        self.fold(ev.MasterStarted(self._job_uid, self._launch, self._policy, *self._least))
        while self.stuck:
            if last is None or last.launch != self._launch or told_to_end.is_set():
                raise JournalError(f"the journal {self._journal.path} cannot be written")
            await pause(told_to_end)

    @property
    def policy(self) -> Policy:
        """What holds now: the range of nodes may have changed since this master began."""
        return self.job.policy or self._policy

    @property
    def stuck(self) -> bool:
        """The journal cannot be written, so nothing is decided."""
        return bool(self._backlog)

    def now(self) -> float:
        """Job time: seconds since the job began, continued over a master's death."""
        return time.monotonic() - self._origin

    def fold(self, event: Event) -> None:
        """Take an event in; its effects leave only once the journal has it."""
        self._catch_up()
        self._fold(event)

    async def changed(self, timeout: float) -> None:
        """Until something was decided, or so many seconds are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.noted.wait()

    def _catch_up(self) -> bool:
        """With the time in which this process stood still, and heard nobody; whether it did."""
        timer = self._timer
        if timer is None or asyncio.get_running_loop().time() <= timer.when() + STALL:
            return False
        timer.cancel()
        self._timer = None
        self._fold(ev.Stalled())
        self._fold(ev.Tick())
        return True

    def _fold(self, event: Event) -> None:
        if self._backlog:
            self._backlog.append(event)
            return
        now = self.now()
        policy = self._policy if isinstance(event, ev.MasterStarted) else self.policy
        decision = handle(self.job, event, now, policy)
        if decision.state is not self.job and not self._write(event, decision.state, now):
            return
        broke = decision.state.ledger.restarts != self.job.ledger.restarts
        over = decision.state.result is not None  # which launchers say
        # Who is not there is missed on the console, where a job that waits for it says nothing else.
        broke = broke or any(notices.kept_out(self.job, decision.state))
        level = logging.WARNING if broke and not over else logging.INFO
        before, self.job = self.job, decision.state
        for effect in decision.effects:
            if isinstance(effect, ev.WakeAt):
                self._wake(effect.time)
            else:
                self._act(effect)
        # Nobody waits for what is told of it, which takes a moment where thousands of ranks failed.
        ending = account.of_step(before, event, self.job, now, self.policy)
        why = None if ending is None else account.document(ending)
        if self._notify is not None:
            for notice in notices.of(before, event, self.job, why):
                self._notify(notice)
        self._note(event, decision.reason, now, level, why)

    def _write(self, event: Event, after: Job, now: float) -> bool:
        before = self.job
        fence = (
            after.last_round != before.last_round
            or after.epoch != before.epoch
            or after.result != before.result
        )
        try:
            entry = Entry(wall=time.time(), job=now, event=event)
            self._journal.append(entry, fence=fence)
            self._journal.compact(after, entry.wall, now)
        except JournalError as error:
            if not self._complained:
                log.error("%s; ranks go on, nothing is decided until it can be written", error)
            self._complained = True
            self._backlog.append(event)
            asyncio.get_running_loop().call_later(RETRY, self._retry)
            return False
        self._complained = False
        return True

    def _retry(self) -> None:
        """What was said meanwhile comes first, before time takes anything from anybody."""
        said = [event for event in self._backlog if not isinstance(event, ev.Tick | ev.Stalled)]
        waiting, self._backlog = [ev.Stalled(), *said, ev.Tick()], []
        for index, event in enumerate(waiting):
            self.fold(event)
            if self._backlog:
                self._backlog.extend(waiting[index + 1 :])
                return

    def _note(
        self, event: Event, reason: str, now: float, level: int, why: Mapping[str, Any] | None
    ) -> None:
        """Say a reason when it changes, and why a round ended, which its events tell only until a snapshot is made."""
        if not reason or (reason == self.reason and why is None):
            return
        detail = json.dumps(why or {})
        self.reason = reason
        log.log(level, "%s", reason)
        kind = type(event).__name__
        try:
            self._journal.note(wall=time.time(), job=now, kind=kind, reason=reason, detail=detail)
        except JournalError as error:
            log.error("%s", error)
        self.noted.set()
        self.noted = asyncio.Event()

    def _wake(self, at: float) -> None:
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, at - self.now()) + 0.001
        if self._timer is not None:
            if loop.time() < self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._tick)

    def _tick(self) -> None:
        if not self._catch_up():
            self._timer = None
            self._fold(ev.Tick())


async def pause(told_to_end: asyncio.Event) -> None:
    """Until the journal is tried again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RETRY):
            await told_to_end.wait()


def _older(job: Job, last: MasterNote) -> bool:
    """The journal does not know of a master that wrote to it."""
    return job.epoch < last.epoch or (job.epoch == last.epoch and job.uid != last.job_uid)

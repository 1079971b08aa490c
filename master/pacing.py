"""The shell around `stragglers.py`: ranks' times come in with heartbeats, verdicts go out.

Nothing of it but a verdict's beginning and end is journaled: another master begins anew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite, nan
from statistics import median_low

from elastic.master import events as ev
from elastic.master import robust
from elastic.master import stragglers as core
from elastic.master.events import NodeId
from elastic.master.intervals import Report, Seat, Times
from elastic.master.session import Session
from elastic.master.shell import Shell
from elastic.master.state import Round
from elastic.proto import master_pb2 as pb

BEATS = 2
"""Heartbeats in an interval, at least."""
RANKS_A_SECOND = 4000
"""That are judged: for more of them an interval is longer, so that this takes a twentieth of a core at most."""
AWAITED = 2
"""Intervals that are waited for at once; of the oldest, some rank will tell nothing any more."""


class Pacing:
    """Of the round that stands."""

    def __init__(self, shell: Shell, sessions: Mapping[NodeId, Session]) -> None:
        self._shell = shell
        self._sessions = sessions
        self._round, self._world = 0, 0
        """Its number, and how many ranks it has."""
        self._length = 0
        """Of an interval, in steps; 0: it is not known how long they take."""
        self._waiting: dict[int, dict[int, pb.Pace]] = {}
        """What ranks have told of intervals that are not judged yet, by their ends."""
        self._judged = 0
        """The end of the last that was."""
        self._seats: dict[int, Seat] = {}
        """As ranks have told it first. Who has no optimizer tells nothing, and is not compared."""
        self._in_part = 0
        """Intervals of which not all ranks have told."""
        self._on_devices = False
        """Ranks tell what steps take there; who does not, of an interval, tells nothing of it."""
        self._state = core.State()
        self._told: dict[tuple[str, tuple[int, ...], tuple[str, ...]], ev.Straggling] = {}
        """Verdicts that stand."""

    def heard(self, session: Session, beat: pb.Heartbeat, every: float) -> None:
        """A node of the round gives a sign of life; every: seconds between two of them."""
        job = self._shell.job
        current = job.round
        if job.result is not None or current is None or not current.standing:
            return
        if beat.round != current.number:
            return
        if current.number != self._round:
            self._round, self._length = current.number, 0
            self._waiting, self._judged, self._in_part = {}, 0, 0  # its ranks are others
            self._world = sum(seat.ranks for seat in current.seats)
            self._seats, self._state, self._on_devices = {}, core.State(), False
            self._told = {one.about: one for one in current.stragglers}
        if self._world < 2:
            return
        seconds = max(
            self._shell.policy.straggler_interval, BEATS * every, self._world / RANKS_A_SECOND
        )
        longest = max((rank.interval for rank in beat.ranks), default=0.0)
        if not self._length and longest:
            self._set_length(current, longest, seconds)
        self._tell(session)
        for rank in beat.ranks:
            if rank.HasField("pace") and 0 <= rank.rank < self._world:
                self._take(rank.rank, rank.pace)
        self._judge(current, seconds)

    def _set_length(self, current: Round, step: float, seconds: float) -> None:
        """Of an interval, for steps of so many seconds; what is known of a step stays."""
        self._length = max(1, round(seconds / step))
        self._waiting, self._judged = {}, 0
        for seat in current.seats:
            if (session := self._sessions.get(seat.node_id)) is not None:
                self._tell(session)

    def _tell(self, session: Session) -> None:
        wanted = (self._round, self._length)
        if self._length and session.measures != wanted:
            session.measures = wanted
            order = pb.Measure(round=self._round, steps=self._length)
            session.push(pb.ToAgent(measure=order))

    def _take(self, rank: int, pace: pb.Pace) -> None:
        fits = self._length and pace.end % self._length == 0 and pace.end > self._judged
        told = [pace.compute, pace.waiting, pace.least]
        if pace.HasField("device"):
            device = pace.device
            told += [device.compute, device.backward, device.waiting, device.least]
        if fits and all(0 <= one < 1e9 for one in told):
            self._waiting.setdefault(pace.end, {})[rank] = pace

    def _judge(self, current: Round, seconds: float) -> None:
        """Intervals that all ranks have told of, or that some will tell nothing of any more."""
        while self._waiting:
            end = min(self._waiting)
            whole = len(self._waiting[end]) == self._world
            if not whole and len(self._waiting) <= AWAITED:
                return
            told = self._waiting.pop(end)
            self._judged = end
            if (whole or self._in_part >= core.SETTLING) and told.keys() - self._seats.keys():
                self._seats = _seats(current, told) | self._seats
            self._in_part += not whole
            if current.change is not None:
                continue  # who is about to leave waits for others in its save
            if self._seats:
                self._decide(current, end, told)
            # Of intervals that end more often than nodes tell of one, no two nodes may ever tell of the same.
            step = median_low([pace.compute + pace.waiting for pace in told.values()])
            if step and not self._length / 2 <= seconds / step <= self._length * 2:
                self._set_length(current, step, seconds)

    def _decide(self, current: Round, end: int, told: Mapping[int, pb.Pace]) -> None:
        """Of the interval that ended with step `end`."""
        self._on_devices |= any(pace.HasField("device") for pace in told.values())
        report = Report(
            round=current.number,
            step=current.step or end,
            seats=self._seats,
            times={
                rank: _times_on_device(pace) if self._on_devices else _times(pace)
                for rank, pace in told.items()
                if rank in self._seats and (pace.HasField("device") or not self._on_devices)
            },
        )
        decision = core.decide(self._state, report, self._shell.now(), core.Policy())
        self._state = decision.state
        self._say(current, decision.verdicts)

    def _say(self, current: Round, verdicts: Iterable[core.Verdict]) -> None:
        """What is new of them."""
        found = {one.about: one for one in (_event(current.number, v) for v in verdicts)}
        known = self._told
        if self._state.intervals > core.SETTLING + robust.LEAST:  # else what stood may well stand
            self._told = found
            for one in known.values():
                if one.about not in found:
                    why = f"no longer: {one.reason}"
                    self._shell.fold(replace(one, over=True, reason=why))
        else:
            self._told = known | found
        for one in found.values():
            before = known.get(one.about)
            if before is None or (one.pays and not before.pays):
                self._shell.fold(one)


def _seats(current: Round, told: Mapping[int, pb.Pace]) -> dict[int, Seat]:
    """All ranks do the same work and are one group, but for those of a pipeline: each is compared with those of its
    stage, and its transfers are not looked at, since stages wait for one another's compute."""
    nodes = [seat.node_id for seat in current.seats for _ in range(seat.ranks)]
    return {
        rank: Seat(node=nodes[rank], peers=str(pace.stage), group=str(pace.stage))
        for rank, pace in told.items()
    }


def _times(pace: pb.Pace) -> Times:
    return Times(
        compute=pace.compute, waiting=pace.waiting, least=nan if pace.stage else pace.least
    )


def _times_on_device(pace: pb.Pace) -> Times:
    device = pace.device
    return Times(
        compute=device.compute,
        waiting=device.waiting,
        least=nan if pace.stage else device.least,
        backward=device.backward,
        starved=device.starved,
    )


def _event(number: int, verdict: core.Verdict) -> ev.Straggling:
    """Ranks of slow transfers may be all of thousands; they are not named."""
    named = verdict.kind in ("rank", "node")
    return ev.Straggling(
        round=number,
        kind=verdict.kind,
        ranks=verdict.ranks if named else (),
        nodes=tuple(map(NodeId, verdict.nodes)),
        share=verdict.share if isfinite(verdict.share) else 0.0,
        pays=verdict.pays,
        reason=str(verdict),
    )

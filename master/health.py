"""The shell around `hangs.py`: heartbeats and looks in; orders to look, and verdicts, out.

Nothing of it but the verdict is journaled: another master learns the round's rhythm anew.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from elastic.master import culprits, messages, reading
from elastic.master import events as ev
from elastic.master import hangs as core
from elastic.master.events import NodeId
from elastic.master.seen import ENOUGH, Seen
from elastic.master.session import Session
from elastic.master.shell import Shell
from elastic.master.state import Round
from elastic.proto import job_folder
from elastic.proto import master_pb2 as pb

log = logging.getLogger(__name__)

LEARN_EVERY = 1.0
"""Seconds."""
STUCK = 1.0
"""Seconds between looks whether the journal can be written again."""
KEPT = ENOUGH + 1
"""Looks at a rank: what else is to stand still does so for longer."""
AGAIN = 1.2
"""Agents hear of another patience once it is so many times the one before, or so small a part of it."""


class Health:
    """Of the round that stands."""

    def __init__(
        self, shell: Shell, sessions: Mapping[NodeId, Session], folder: Path | None
    ) -> None:
        """folder: the job's, for what people read of a hang; None: it is not written."""
        self._folder = folder
        self._shell = shell
        self._sessions = sessions
        self._state = core.State()
        self._stepped = False
        """Some rank of the round had its first step."""
        self._ticked: dict[NodeId, float] = {}
        """Of nodes with a quiet rank: when that had its last step, in job time."""
        self._oldest: float | None = None
        """Of these times, as the last decision knew them."""
        self._longest, self._learned = 0.0, 0.0
        """The longest interval since the round's rhythm was last learned of, and when that was."""
        self._phases: dict[int, core.InPhase] = {}
        """By rank, what its script says it does."""
        self._begun: set[NodeId] = set()
        """Nodes with ranks of the round."""
        self._awaited: set[NodeId] = set()
        """Nodes that have not answered the last look."""
        self._seen: dict[int, tuple[Seen, ...]] = {}
        """By rank, the newest looks at it, oldest first."""
        self._recorded: dict[NodeId, tuple[str, ...]] = {}
        """What the kernels of nodes have told of their hardware since it is looked at ranks."""
        self._newest: dict[int, tuple[Seen, ...]] = {}
        """The same of ranks that the last look has seen, or a late answer since then."""
        self._quiet = 0.0
        """What agents were told last."""
        self._timer: asyncio.TimerHandle | None = None
        self._told: tuple[int, tuple[int, ...]] = (0, ())
        """The round and the culprits that were told of last."""

    def _standing(self) -> Round | None:
        """The round that is watched."""
        job = self._shell.job
        watched = job.result is None and job.round is not None and job.round.standing
        return job.round if watched and self._shell.policy.hang_action != "ignore" else None

    def review(self) -> None:
        """Another round may stand."""
        current = self._standing()
        if current is None:
            self._sleep()
        elif current.number != self._state.round:
            world = sum(seat.ranks for seat in current.seats)
            self._state = core.begin(self._state, current.number, self._shell.now(), world)
            self._stepped, self._longest = False, 0.0
            self._ticked, self._phases, self._quiet = {}, {}, 0.0
            self._seen, self._recorded, self._newest = {}, {}, {}
            self._awaited, self._begun = set(), set()
            self._decide(current)

    def heard(self, session: Session, beat: pb.Heartbeat) -> None:
        """A node of the round gives a sign of life."""
        current = self._standing()
        if current is None or beat.round != self._state.round:
            return
        now = self._shell.now()
        if beat.ranks:
            self._begun.add(session.node_id)
        self._learn(max((rank.interval for rank in beat.ranks), default=0.0), now)
        quiet = max((rank.quiet for rank in beat.ranks), default=0.0)
        self._stepped = self._stepped or any(rank.ticks for rank in beat.ranks)
        was = self._ticked.pop(session.node_id, None)
        if self._quiet and quiet >= self._quiet:
            self._ticked[session.node_id] = now - quiet
        for rank in beat.ranks:
            before = self._phases.get(rank.rank)
            self._state, after = core.in_phase(self._state, before, rank.phase, rank.ticks, now)
            if after is not None:
                self._phases[rank.rank] = after
            elif before is not None:
                del self._phases[rank.rank]
        self._tell(current, session)
        if self._is_news(was, self._ticked.get(session.node_id)):
            self._decide(current)

    def _is_news(self, was: float | None, ticked: float | None) -> bool:
        """Whether something may be due sooner, or no more, since a node is quiet as it tells now, and was as it told
        before: thousands become so within a second, and one decision takes in what all of them told."""
        if was is None:
            return ticked is not None and (self._oldest is None or ticked < self._oldest)
        return ticked is None and not self._ticked

    def _learn(self, interval: float, now: float) -> None:
        """Of all nodes together, so that thousands teach no more than one does."""
        self._longest = max(self._longest, interval)
        if self._longest and now >= self._learned + LEARN_EVERY:
            self._state = core.learned(self._state, self._longest)
            self._longest, self._learned = 0.0, now

    def examined(self, session: Session, message: pb.Examined) -> None:
        """A node has looked at its ranks."""
        current = self._standing()
        if current is None or message.round != self._state.round:
            return
        suspicion, awaited = self._state.suspicion, session.node_id in self._awaited
        if suspicion is None or not core.tells(suspicion, message.number, awaited=awaited):
            return
        for look in messages.looks(session.node_id, message.looks, self._shell.now()):
            if 0 <= look.rank < self._state.world:
                looks = (*self._seen.get(look.rank, ()), look)[-KEPT:]
                self._seen[look.rank] = self._newest[look.rank] = looks
        lines = messages.kernel_log(message.kernel_log)
        if reading.of_hardware(lines) is not None:
            self._recorded[session.node_id] = lines
        if message.number < suspicion.number:
            return  # it has the last look before it
        self._awaited.discard(session.node_id)
        if not self._awaited:
            self._decide(current)

    def _tell(self, current: Round, session: Session) -> None:
        """From which quiet on the agents are to say so at once."""
        quiet = core.suspects_at(self._state, self._shell.policy)
        sessions = [session]
        if not self._quiet / AGAIN <= quiet <= self._quiet * AGAIN:
            self._quiet = quiet
            found = (self._sessions.get(seat.node_id) for seat in current.seats)
            sessions = [one for one in found if one is not None]
        elif session.watches == current.number:
            return
        order = pb.ToAgent(watch=pb.Watch(round=current.number, quiet=self._quiet))
        for one in sessions:
            one.watches = current.number
            one.push(order)

    def _decide(self, current: Round) -> None:
        if self._shell.stuck:  # nobody is heard meanwhile, so nothing is known of this time
            self._state = replace(self._state, suspicion=None)
            self._ticked, self._oldest = {}, None
            self._wake_in(STUCK)
            return
        now = self._shell.now()
        self._ticked = {
            node_id: at
            for node_id, at in self._ticked.items()
            if node_id in self._sessions and node_id not in current.finished
        }
        self._oldest = min(self._ticked.values(), default=None)
        before = self._state.suspicion
        told = before is not None and not self._awaited
        facts = core.Facts(
            ticked=now if self._oldest is None and self._stepped else self._oldest,
            stepping=self._stepped and not self._ticked,
            phases=self._phases,
            seen=self._newest,
            answered=not self._awaited,
            begun=self._stepped or self._seated(current) <= self._begun,
            ended=core.ended(current.seats, self._newest, current.finished) if told else {},
        )
        decision = core.decide(self._state, facts, now, self._shell.policy)
        self._state = decision.state
        if decision.state.suspicion is None:
            self._told = (0, ())
        if decision.reason and not isinstance(decision.order, core.Verdict):
            log.info("round %d: %s", current.number, decision.reason)
        self._sleep()
        if decision.wake is not None:
            self._wake_in(max(0.0, decision.wake - now) + 0.001)
        if isinstance(decision.order, core.Examine):
            if before is None:
                self._seen, self._recorded = {}, {}
            self._examine(current, decision.order)
        elif isinstance(decision.order, core.Verdict):
            self._hung(current, decision.order)

    def _examine(self, current: Round, order: core.Examine) -> None:
        """Have all nodes look that can hear of it and have ranks that run."""
        self._newest = {}
        self._awaited = self._seated(current)
        examine = pb.Examine(round=current.number, number=order.number, close=order.close)
        told = pb.ToAgent(examine=examine)
        for node_id in self._awaited:
            self._sessions[node_id].push(told)

    def _seated(self, current: Round) -> set[NodeId]:
        """Nodes that have ranks to run, and are there."""
        seated = {seat.node_id for seat in current.seats} - current.finished
        return seated & self._sessions.keys()

    def _hung(self, current: Round, verdict: core.Verdict) -> None:
        found = verdict.found
        nodes = found.nodes or tuple(self._recorded)[:1]
        recorded = self._recorded.get(nodes[0], ()) if nodes else ()
        hung = ev.Hung(
            round=current.number,
            ranks=found.ranks,
            nodes=nodes,
            place=next(iter(found.places), ""),
            machine=found.machine or not self._recorded.keys().isdisjoint(nodes),
            reason=f"{found.reason}; {verdict.stood}",
            seconds=verdict.seconds,
            kernel_log=recorded,
            soft=found.soft,
        )
        if self._told != (current.number, found.ranks):  # else nothing is done about it
            self._told = (current.number, found.ranks)
            self._shell.fold(hung)
            self._write(current.number, culprits.account(found, verdict.seen))

    def _write(self, number: int, text: str) -> None:
        if self._folder is None:
            return
        try:
            (self._folder / job_folder.hang(number)).write_text(text, errors="backslashreplace")
        except OSError as error:
            log.error("what ranks did in the hang of round %d is not kept: %s", number, error)

    def _wake_in(self, seconds: float) -> None:
        self._sleep()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if (current := self._standing()) is not None:
            self._decide(current)

    def _sleep(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

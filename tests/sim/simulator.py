"""The real core of the master, fake nodes, and a number for a clock.

Everything is an entry in one queue, so a run is a function of its faults and its seed. What the
shell and the server do (journal, timer, knocks, directives that are pushed when they change) is
done here in the fewest lines that are faithful to them.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.master import events as ev
from elastic.master.directive import Directive, directive, places
from elastic.master.events import Event, Failed, Incarnation, KnockAnswer, NodeId, RankFailure
from elastic.master.job import Job, Round, handle
from elastic.master.nodes import NodeState
from elastic.master.policy import Policy
from elastic.proto import codec
from tests.master.legal import check
from tests.sim.faults import Fault, Faults
from tests.sim.nodes import AGENT_START, LATENCY, FakeNode

SILENCE = 2.5
"""Seconds until a stream on which nothing comes is ended."""
STEP = 1.0
KNOCK_EVERY = 1.0
FOLLOW = 0.02
"""Seconds until ranks notice that a peer is gone."""


@dataclass
class Session:
    node: FakeNode
    number: int
    incarnation: Incarnation
    told: Directive | None = None


@dataclass
class Simulation:
    policy: Policy
    nodes: Sequence[str] = ()
    faults: Faults = field(default_factory=Faults)
    steps: int = 20
    """After so many the script is done."""
    save_every: int = 1
    slots: int = 1
    plain: bool = False
    """The script imports torch, and nodes that wait can do that ahead."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.now = 0.0
        self.job = Job()
        self.master_up = False
        self.journal: list[tuple[float, str]] = []
        self.reasons: list[tuple[float, str]] = []
        self.rounds: dict[int, Round] = {}
        self.step = 0
        self.saved = 0
        self.fleet: dict[str, FakeNode] = {}
        self.sessions: dict[NodeId, Session] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._ports = itertools.count(1)
        self._streams = itertools.count(1)
        self._random = random.Random(self.seed)
        self._used: set[str] = set()
        self._wake: float | None = None
        self._knocking: set[tuple[NodeId, Incarnation]] = set()
        self._training = 0
        self._folded = 0
        self.begin_master()
        for index, name in enumerate(self.nodes):
            self.after(0.1 + 0.001 * index, self.add_node, name)
        for fault in self.faults.all:
            self.at(fault.at, self._strike, fault)

    # --- clock -------------------------------------------------------------------------------

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def run(self, until: float = 1000.0) -> "Simulation":
        """Play until nothing is left to happen, or for so long."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call, args = heapq.heappop(self._queue)
            call(*args)
        return self

    def next_port(self) -> int:
        return next(self._ports)

    # --- master ------------------------------------------------------------------------------

    def begin_master(self) -> None:
        """Replay the journal and take the next epoch."""
        job = Job()
        for time, text in self.journal:
            job = handle(job, codec.loads(Event, text), time, self.policy).state
        assert job == self.job, "the journal tells another story"
        self.master_up, self._wake = True, None
        self.fold(ev.MasterStarted("job"))

    def fold(self, event: Event) -> None:
        if not self.master_up:
            return
        decision = handle(self.job, event, self.now, self.policy)
        self._folded += 1
        formed = decision.state.last_round != self.job.last_round
        if len(self.fleet) < 20 or formed or self._folded % 20 == 0:
            check(self.job, event, decision, self.now, self.policy, self._used)
        if decision.state is not self.job:
            self.journal.append((self.now, codec.dumps(event)))
        self.job = decision.state
        if decision.reason and (not self.reasons or self.reasons[-1][1] != decision.reason):
            self.reasons.append((self.now, decision.reason))
        if self.job.round is not None:
            self.rounds[self.job.round.number] = self.job.round
        for effect in decision.effects:
            self._act(effect)

    def _act(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Tell):
            self._tell(effect.node_ids)
        elif isinstance(effect, ev.Knock):
            node = self.job.nodes.get(effect.node_id)
            if node is not None and (node.node_id, node.incarnation) not in self._knocking:
                self._knocking.add((node.node_id, node.incarnation))
                self._knock(effect.node_id, node.incarnation, self.job.epoch)
        elif isinstance(effect, ev.WakeAt) and not self._wakes_before(effect.time):
            self._wake = effect.time
            self.at(effect.time, self._tick, effect.time)

    def _wakes_before(self, time: float) -> bool:
        return self._wake is not None and self.now < self._wake <= time

    def _tick(self, time: float) -> None:
        if self._wake == time:
            self._wake = None
            self.fold(ev.Tick())

    def _tell(self, node_ids: frozenset[NodeId] | None) -> None:
        seated = places(self.job.round)
        for node_id in tuple(self.sessions) if node_ids is None else node_ids:
            session = self.sessions.get(node_id)
            if session is None or (node_id not in self.job.nodes and self.job.result is None):
                continue
            order = directive(self.job, node_id, seated)
            if order != session.told:
                session.told = order
                self.after(LATENCY, self._deliver, session, order)

    def _deliver(self, session: Session, order: Directive) -> None:
        node = session.node
        if node.stream != session.number or not node.alive(session.incarnation):
            return
        if node.reachable():
            node.hear(order)
        else:
            self.at(node.cut_off_until, self._deliver, session, order)

    def _knock(self, node_id: NodeId, incarnation: Incarnation, epoch: int) -> None:
        fake = self.fleet[node_id]
        answer, takes = KnockAnswer.RESTARTING, LATENCY
        if not fake.reachable():
            answer, takes = KnockAnswer.SILENT, 1.0
        elif not fake.guardian_up:
            answer = KnockAnswer.GONE
        elif fake.leaving:
            answer, takes = KnockAnswer.SILENT, 1.0
        elif fake.alive(incarnation):
            answer = KnockAnswer.ALIVE
        self.after(takes, self._answered, node_id, incarnation, answer, epoch)

    def _answered(
        self, node_id: NodeId, incarnation: Incarnation, answer: KnockAnswer, epoch: int
    ) -> None:
        if epoch != self.job.epoch or not self.master_up:
            return
        self.fold(ev.Knocked(((node_id, incarnation, answer),)))
        node = self.job.nodes.get(node_id)
        over = node is None or node.incarnation != incarnation
        if over or (node is not None and node.state is not NodeState.UNREACHABLE):
            self._knocking.discard((node_id, incarnation))
        else:
            self.after(KNOCK_EVERY, self._knock, node_id, incarnation, epoch)

    # --- streams -----------------------------------------------------------------------------

    def open_stream(self, node: FakeNode) -> int:
        number = next(self._streams)
        session = Session(node, number, node.incarnation)
        self.after(LATENCY, self._opened, session, node.hello(), self.job.epoch)
        return number

    def _opened(self, session: Session, hello: ev.Attachment, epoch: int) -> None:
        if not self.master_up or epoch != self.job.epoch:
            session.node.stream_ended(session.number)
            return
        old = self.sessions.get(hello.node_id)
        self.sessions[hello.node_id] = session
        if old is not None:
            old.node.stream_ended(old.number)
        self.fold(ev.Attached((hello,)))
        if not session.node.alive(session.incarnation):  # it died on the way here
            self.after(LATENCY, self._noticed, session.node, session.number)

    def stream_broke(self, node: FakeNode, *, after: float) -> None:
        """The master notices after a while."""
        self.after(after, self._noticed, node, node.stream)

    def _noticed(self, node: FakeNode, stream: int) -> None:
        session = self.sessions.get(node.node_id)
        if session is not None and session.number == stream:
            del self.sessions[node.node_id]
            self.fold(ev.Detached(((node.node_id, session.incarnation),)))
        node.stream_ended(stream)

    def to_master(self, node: FakeNode, event: Event) -> None:
        if node.stream:
            self.after(LATENCY, self._arrive, node, node.stream, event)

    def _arrive(self, node: FakeNode, stream: int, event: Event) -> None:
        session = self.sessions.get(node.node_id)
        if session is None or session.number != stream or not node.host_up:
            return
        if node.reachable():
            self.fold(event)
        else:  # a short cut only delays
            self.at(node.cut_off_until, self._arrive, node, stream, event)

    # --- training ----------------------------------------------------------------------------

    def _world(self, number: int) -> list[FakeNode]:
        current = self.rounds.get(number)
        return [self.fleet[s.node_id] for s in current.seats] if current is not None else []

    def train(self, number: int) -> None:
        """The round's ranks begin, once they are all there."""
        world = self._world(number)
        if number > self._training and all(n.ranks == number and n.ready for n in world):
            self._training = number
            self.step = self.saved
            if self.step < self.steps:
                self.after(STEP, self._stepped, number)
            else:
                self._finish(number)

    def _stepped(self, number: int) -> None:
        world = self._world(number)
        if not all(n.host_up and n.ranks == number and n.ready for n in world):
            return  # it hangs, or was stopped
        self.step += 1
        if self.step % self.save_every == 0:
            self.saved = self.step
        head = world[0]
        if head.stream:
            told = ev.Progressed(number, self.step, plain=self.plain)
            self.after(LATENCY, self._beat, head, head.stream, told)
        if self.plain:
            for node in world:
                node.prepare()
        if self.step < self.steps:
            self.after(STEP, self._stepped, number)
        else:
            self._finish(number)

    def _finish(self, number: int) -> None:
        for node in self._world(number):
            self.after(self._random.uniform(0, 0.3), self._done, node, number)

    def _beat(self, node: FakeNode, stream: int, event: ev.Progressed) -> None:
        current = self.job.round
        if current is None or not current.standing or current.number != event.round:
            return
        if not current.stepped or event.step > self.job.ledger.step:
            self._arrive(node, stream, event)

    def _done(self, node: FakeNode, number: int) -> None:
        if node.host_up and node.agent_up and node.ranks == number and node.ready:
            node.finish()

    def peers_fail(self, node: FakeNode, number: int) -> None:
        """Those that are in a collective with it, a moment later."""
        for peer in self._world(number):
            if peer is not node and peer.host_up:
                self.after(self._random.uniform(FOLLOW / 2, FOLLOW), peer.follow, number)

    # --- faults ------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        node = self.fleet.get(name)
        if node is None:
            node = self.fleet[name] = FakeNode(self, NodeId(name), slots=self.slots)
        if not node.agent_up and self.job.result is None:
            node.host_up = node.guardian_up = True
            node.start_agent()

    def _strike(self, fault: Fault) -> None:
        if fault.kind in ("add_node", "restart_master", "drain_job", "restart_job", "drain"):
            getattr(self, f"_{fault.kind}")(fault)
        elif (node := self.fleet.get(fault.node)) is not None and node.host_up and node.agent_up:
            getattr(self, f"_{fault.kind}")(node, fault)

    def _kill_rank(self, node: FakeNode, fault: Fault) -> None:
        node.fail(RankFailure(rank=node.first_rank(), local_rank=0, exit_code=-9))

    def _script_error(self, node: FakeNode, fault: Fault) -> None:
        node.fail(
            RankFailure(
                rank=node.first_rank(),
                local_rank=0,
                exit_code=1,
                error_type=fault.detail,
                message=f"bad at {fault.at}",
                frame="train.py:7",
            )
        )

    def _kill_store(self, node: FakeNode, fault: Fault) -> None:
        if node.store_in_use and node.ranks:
            node.store_in_use = ""
            failure = RankFailure(rank=0, local_rank=0, exit_code=1, what=Failed.STORE)
            node.tell(ev.NodePhase.FAILED, node.ranks, *node.report.failures, failure)

    def _kill_agent(self, node: FakeNode, fault: Fault) -> None:
        if node.leaving:  # its guardian was told to end, too
            self.launcher_died(node)
            return
        self._end(node)
        self.stream_broke(node, after=LATENCY)
        self.after(AGENT_START, node.start_agent)

    def _kill_launcher(self, node: FakeNode, fault: Fault) -> None:
        self.launcher_died(node)

    def launcher_died(self, node: FakeNode) -> None:
        node.guardian_up = False
        self._end(node)
        self.stream_broke(node, after=LATENCY)

    def _lose_node(self, node: FakeNode, fault: Fault) -> None:
        node.host_up = node.guardian_up = False
        node.die()
        self.stream_broke(node, after=SILENCE)

    def _leave(self, node: FakeNode, fault: Fault) -> None:
        if not node.leaving:
            node.leave(fault.seconds)

    def _end(self, node: FakeNode) -> None:
        """Its agent, ranks and store end; who needs one of them notices."""
        number, needed = node.ranks, node.ready or node.store_in_use
        node.die()
        if needed:
            self.peers_fail(node, number)

    def _partition(self, node: FakeNode, fault: Fault) -> None:
        node.cut_off_until = max(node.cut_off_until, self.now + fault.seconds)
        if fault.seconds > SILENCE:
            self.stream_broke(node, after=SILENCE)

    def _restart_master(self, fault: Fault) -> None:
        if not self.master_up or self.job.result is not None:
            return
        self.master_up = False
        self._knocking.clear()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            self.after(LATENCY, session.node.stream_ended, session.number)
        self.after(fault.seconds, self.begin_master)

    def _add_node(self, fault: Fault) -> None:
        self.add_node(fault.node)

    def _drain(self, fault: Fault) -> None:
        self.fold(ev.DrainAsked(NodeId(fault.node), "maintenance"))

    def _drain_job(self, fault: Fault) -> None:
        self.fold(ev.DrainAsked(None, "maintenance"))

    def _restart_job(self, fault: Fault) -> None:
        self.fold(ev.RestartAsked("by hand"))

    # --- what came of it ---------------------------------------------------------------------

    @property
    def restarts(self) -> dict[str, int]:
        return dict(self.job.ledger.restarts)

    @property
    def exit_code(self) -> int | None:
        return self.job.result.exit_code if self.job.result else None

    def seats(self, number: int | None = None) -> str:
        """Node ids of a round by place, with blanks between; of the last one by default."""
        current = self.rounds.get(self.job.last_round if number is None else number)
        return " ".join(s.node_id for s in current.seats) if current else ""

    def downtimes(self) -> list[float | None]:
        return [i.downtime for i in self.job.ledger.interruptions]

    def here(self) -> int:
        """Nodes that could take part now."""
        return sum(
            n.state is NodeState.ATTACHED and not n.draining for n in self.job.nodes.values()
        )

"""Fake nodes: they do what they are told, as the real agent does, and nothing else."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic.master import events as ev
from elastic.master.directive import Directive
from elastic.master.events import Incarnation, NodeId, NodePhase, RankFailure

if TYPE_CHECKING:
    from tests.sim.simulator import Simulation

LATENCY = 0.002
"""Seconds from agent to master, or back."""
ATTACH_EVERY = 0.4
"""Seconds between two attempts to attach."""
AGENT_START = 0.6
RANK_START = 0.5
STOP = 0.05
STORE_START = 0.1
STANDBY_START = 3.0


@dataclass
class FakeNode:
    """A host with a guardian; `incarnation` is the life of its agent."""

    sim: "Simulation"
    node_id: NodeId
    slots: int = 1
    labels: tuple[tuple[str, str], ...] = ()
    incarnation: Incarnation = field(default=Incarnation(0))
    host_up: bool = True
    guardian_up: bool = True
    agent_up: bool = False
    leaving: bool = False
    """Its launcher was told to end, and its ranks use their grace."""
    cut_off_until: float = 0.0
    stream: int = 0
    """Number of the open stream; 0: none."""
    order: Directive | None = None
    busy: bool = False
    report: ev.Report = field(default_factory=ev.Report)
    ranks: int = 0
    """The round that its ranks run; 0: it has none."""
    ready: bool = False
    """Its ranks are up."""
    store_in_use: str = ""
    spare: str = ""
    preparing: bool = False

    # --- life --------------------------------------------------------------------------------

    def start_agent(self) -> None:
        if not (self.host_up and self.guardian_up) or self.agent_up:
            return
        self.incarnation = Incarnation(self.incarnation + 1)
        self.agent_up, self.leaving, self.busy, self.stream = True, False, False, 0
        self.order, self.report = None, ev.Report()
        self.ranks, self.ready, self.store_in_use = 0, False, ""
        self.preparing = False
        self._make_spare()
        self.attach()

    def die(self) -> None:
        """The agent, its ranks and its stores are gone."""
        self.agent_up, self.ranks, self.ready, self.store_in_use = False, 0, False, ""
        self.order = None

    def leave(self, grace: float) -> None:
        """SIGTERM: it says so if it can, does not come back, and is gone once its ranks are."""
        self.say(ev.Left(self.node_id, self.incarnation, "SIGTERM"))
        self.leaving, self.ready = True, False
        self.sim.after(max(grace, 2 * LATENCY), self._gone, self.incarnation)

    def _gone(self, life: int) -> None:
        if self.alive(life):
            self.sim.launcher_died(self)

    def alive(self, incarnation: int) -> bool:
        return self.host_up and self.agent_up and self.incarnation == incarnation

    def reachable(self) -> bool:
        return self.host_up and self.sim.now >= self.cut_off_until

    # --- stream ------------------------------------------------------------------------------

    def attach(self) -> None:
        life = self.incarnation
        if not self.alive(life) or self.stream or self.leaving:
            return
        if self.sim.master_up and self.reachable():
            self.stream = self.sim.open_stream(self)
        else:
            self.sim.after(ATTACH_EVERY, self.attach_again, life)

    def attach_again(self, life: int) -> None:
        if self.alive(life):
            self.attach()

    def hello(self) -> ev.Attachment:
        return ev.Attachment(
            node_id=self.node_id,
            incarnation=self.incarnation,
            slots=self.slots,
            labels=self.labels,
            store=self.spare,
            report=self.report,
        )

    def stream_ended(self, stream: int) -> None:
        if stream and self.stream == stream and self.agent_up:
            self.stream = 0
            self.sim.after(ATTACH_EVERY, self.attach_again, self.incarnation)

    def say(self, event: ev.Event) -> None:
        self.sim.to_master(self, event)

    def tell(self, phase: NodePhase, round_: int, *failures: RankFailure) -> None:
        self.report = ev.Report(round=round_, phase=phase, failures=failures)
        self.say(ev.Reported(self.node_id, self.incarnation, self.report))

    # --- directives --------------------------------------------------------------------------

    def hear(self, order: Directive) -> None:
        if self.order is None or order.round >= self.order.round:
            self.order = order
            self.obey()

    def obey(self) -> None:
        order = self.order
        if order is None or self.busy or not self.agent_up or self.leaving:
            return
        if self.ranks and (order.kind != "run" or order.round != self.ranks):
            self._later(STOP, self._stopped)
            return
        if order.kind == "exit":
            self.guardian_up = False
            self.die()
            self.sim.stream_broke(self, after=LATENCY)
        elif order.kind == "wait":
            self.store_in_use = ""
            self.report = ev.Report(round=order.round)
            if self.spare and order.store == self.spare:  # a round took it that we never ran
                self.spare = ""
                self.sim.after(STORE_START, self._renew, self.incarnation)
            if order.prepare:
                self.prepare()
        elif not self.ranks and order.round > self.report.round:
            self.ranks, self.ready = order.round, False
            self.store_in_use = ""
            if order.store == self.spare:
                self.store_in_use, self.spare = self.spare, ""
                self.sim.after(STORE_START, self._renew, self.incarnation)
            self.report = ev.Report(round=order.round, phase=NodePhase.RUNNING)
            self._later(RANK_START, self._started)

    def _later(self, seconds: float, then: object) -> None:
        self.busy = True
        self.sim.after(seconds, self._now, self.incarnation, then)

    def _now(self, life: int, then: object) -> None:
        if self.alive(life):
            self.busy = False
            assert callable(then)
            then()
            self.obey()

    def _stopped(self) -> None:
        self.ranks, self.ready = 0, False

    def _started(self) -> None:
        if self.ranks and self.report.phase is NodePhase.RUNNING and not self.leaving:
            self.ready = True
            self.sim.train(self.ranks)

    def _make_spare(self) -> None:
        self.spare = f"{self.node_id}:{self.sim.next_port()}"

    def _renew(self, life: int) -> None:
        if self.alive(life):
            self._make_spare()
            self.say(ev.StoreReady(self.node_id, self.incarnation, self.spare))

    def prepare(self) -> None:
        """Build a standby, once in a life."""
        if not self.preparing:
            self.preparing = True
            self.sim.after(STANDBY_START, self._prepared, self.incarnation)

    def _prepared(self, life: int) -> None:
        if self.alive(life):
            self.say(ev.Prepared(self.node_id, self.incarnation))

    # --- ranks -------------------------------------------------------------------------------

    def fail(self, *failures: RankFailure) -> None:
        """Ranks of the round end badly; peers in its collectives fail a moment later."""
        if not self.ranks or self.leaving or self.report.phase is NodePhase.FINISHED:
            return
        self.ready = False
        self.tell(NodePhase.FAILED, self.ranks, *self.report.failures, *failures)
        self.sim.peers_fail(self, self.ranks)

    def follow(self, round_: int) -> None:
        """A peer of its ranks is gone."""
        if self.agent_up and self.ranks == round_ and self.ready:
            self.ready = False
            closed = RankFailure(
                rank=self.first_rank(),
                local_rank=0,
                exit_code=1,
                error_type="RuntimeError",
                message="Connection closed by peer",
            )
            self.tell(NodePhase.FAILED, round_, *self.report.failures, closed)

    def first_rank(self) -> int:
        return self.order.place.first_rank if self.order is not None else 0

    def finish(self) -> None:
        self.ready = False
        self.tell(NodePhase.FINISHED, self.ranks)

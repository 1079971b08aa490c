"""Short ways to say what happened, and a master that is nothing but its core."""

import itertools
from dataclasses import dataclass, field
from typing import Any

from elastic.master import events as ev
from elastic.master.directive import Directive, directive, places
from elastic.master.events import Event, Incarnation, KnockAnswer, NodeId, NodePhase, RankFailure
from elastic.master.job import Decision, Job, handle
from elastic.master.observe import resized
from elastic.master.policy import Policy
from tests.master.legal import check

_ports = itertools.count(1)


def attachment(node: str, incarnation: int = 1, **more: Any) -> ev.Attachment:
    more.setdefault("slots", 1)
    more.setdefault("store", f"{node}:{next(_ports)}")
    return ev.Attachment(node_id=NodeId(node), incarnation=Incarnation(incarnation), **more)


def attached(node: str, incarnation: int = 1, **more: Any) -> ev.Attached:
    return ev.Attached((attachment(node, incarnation, **more),))


def detached(node: str, incarnation: int = 1) -> ev.Detached:
    return ev.Detached(((NodeId(node), Incarnation(incarnation)),))


def knocked(node: str, answer: KnockAnswer, incarnation: int = 1) -> ev.Knocked:
    return ev.Knocked(((NodeId(node), Incarnation(incarnation), answer),))


def left(node: str, incarnation: int = 1) -> ev.Left:
    return ev.Left(NodeId(node), Incarnation(incarnation), "SIGTERM")


def store(node: str, address: str, incarnation: int = 1) -> ev.StoreReady:
    return ev.StoreReady(NodeId(node), Incarnation(incarnation), address)


def unit(round_: int, ranks: int, node: str = "a", incarnation: int = 1) -> ev.UnitDeclared:
    return ev.UnitDeclared(round_, ranks, NodeId(node), Incarnation(incarnation))


def drain(node: str | None) -> ev.DrainAsked:
    return ev.DrainAsked(None if node is None else NodeId(node), "maintenance")


def failure(rank: int = 0, exit_code: int = 1, **more: Any) -> RankFailure:
    return RankFailure(rank=rank, local_rank=0, exit_code=exit_code, **more)


def report(node: str, round_: int, phase: NodePhase, *failures: RankFailure) -> ev.Reported:
    told = ev.Report(round=round_, phase=phase, failures=failures)
    return ev.Reported(NodeId(node), Incarnation(1), told)


def failed(node: str, round_: int, *failures: RankFailure) -> ev.Reported:
    return report(node, round_, NodePhase.FAILED, *failures)


def finished(node: str, round_: int) -> ev.Reported:
    return report(node, round_, NodePhase.FINISHED)


KILLED = failure(exit_code=-9)
CLOSED = failure(
    error_type="RuntimeError", message="[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
)
BUG = failure(error_type="ValueError", message="bad value 17", frame="train.py:3 in step")


@dataclass
class Core:
    """A job, fed one event after another; every decision is checked."""

    policy: Policy
    job: Job = field(default_factory=Job)
    now: float = 0.0
    decision: Decision | None = None
    used_stores: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.feed(ev.MasterStarted("job"))

    def feed(self, event: Event, at: float | None = None) -> Decision:
        self.now = self.now if at is None else at
        before, self.policy = self.job, resized(event, self.policy)
        decision = handle(before, event, self.now, self.policy)
        check(before, event, decision, self.now, self.policy, self.used_stores)
        self.job, self.decision = decision.state, decision
        return decision

    def attach(self, *nodes: str, at: float | None = None, **more: Any) -> Decision:
        return self.feed(ev.Attached(tuple(attachment(n, **more) for n in nodes)), at)

    def tick(self, at: float) -> Decision:
        return self.feed(ev.Tick(), at)

    def seats(self) -> list[str]:
        """Nodes of the standing round by place; empty if none stands."""
        current = self.job.round
        return [s.node_id for s in current.seats] if current and current.standing else []

    def order(self, node: str) -> Directive:
        return directive(self.job, NodeId(node), places(self.job.round))

    def reason(self) -> str:
        assert self.decision is not None
        return self.decision.reason

    def wake(self) -> float | None:
        assert self.decision is not None
        times = [e.time for e in self.decision.effects if isinstance(e, ev.WakeAt)]
        assert len(times) <= 1
        return times[0] if times else None

    def restarts(self) -> dict[str, int]:
        return dict(self.job.ledger.restarts)

    def exit_code(self) -> int | None:
        return self.job.result.exit_code if self.job.result else None


def running(*nodes: str, slots: int = 1, **policy: Any) -> Core:
    """A job whose first round stands on `nodes`, at time 10; each has a fresh spare store."""
    policy.setdefault("max_nodes", len(nodes))
    policy.setdefault("min_nodes", 1)
    core = Core(Policy(**policy))
    core.attach(*nodes, slots=slots, at=0.0)
    core.tick(core.policy.last_call)
    assert core.seats() == list(nodes)[: core.policy.max_nodes]
    spare(core)
    core.tick(10.0)
    return core


def spare(core: Core) -> None:
    """Every node whose store was taken names a new one."""
    for node in core.job.nodes.values():
        if not node.store:
            name = f"{node.node_id}:{next(_ports)}"
            core.feed(ev.StoreReady(node.node_id, node.incarnation, name))

"""The whole decider: events in, state and effects out. Pure; composes the machines beside it.

A job is a fold over its events, so replaying the journal is the master's recovery.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from elastic.master import events as ev
from elastic.master import ledger as books
from elastic.master import nodes as registry
from elastic.master import recovery as medic
from elastic.master import rendezvous
from elastic.master.events import Effect, Event, Incarnation, NodeId, NodePhase
from elastic.master.ledger import Ledger
from elastic.master.nodes import Node, NodeState
from elastic.master.policy import Policy
from elastic.master.recovery import Cause, Observed, Recovery
from elastic.master.rendezvous import Candidate, Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    number: int
    seats: tuple[Seat, ...]
    incarnations: Mapping[NodeId, Incarnation]
    roles: Mapping[NodeId, str]
    store: str
    started: float
    standing: bool = True
    """False once it ended before its time; its ranks are to be stopped."""
    finished: frozenset[NodeId] = frozenset()
    failures: tuple[Observed, ...] = ()
    stepped: bool = False
    """Its first step was finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    exit_code: int
    reason: str
    resumable: bool = False
    """The same command goes on from here: the job was stopped, it did not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    uid: str = ""
    epoch: int = 0
    nodes: registry.Nodes = field(default_factory=dict[NodeId, Node])
    round: Round | None = None
    """The last one formed."""
    last_round: int = 0
    """Its number; never goes back, not even for a new job in the same directory."""
    restart_count: int = 0
    unit: int = 1
    """What the script declared its world to be a multiple of."""
    recovery: Recovery = Recovery()
    ledger: Ledger = Ledger()
    below_min_since: float | None = None
    stop_grace: float = 0.0
    """Seconds between SIGTERM and SIGKILL for the ranks of the round that ended last."""
    draining: bool = False
    result: Result | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    state: Job
    effects: tuple[Effect, ...]
    reason: str
    """Why this was decided, or why nothing was."""


ALL = ev.Tell()

DRAINED = 213
"""Exit code of a launcher whose job or node was drained: not finished, and not failed."""


def handle(job: Job, event: Event, now: float, policy: Policy) -> Decision:
    """Take one event in; `now` is job time in seconds and never goes back."""
    before = job
    job, effects, reason = _OBSERVE[type(event)](job, event, now, policy)
    for follow in (_expire, _decide):
        if job.result is None:
            job, more, why = follow(job, now, policy)
            effects, reason = effects + more, _join(reason, why)
    if job.result is not None and before.result is None:
        job = replace(job, ledger=books.closed(job.ledger, now))
        over = ev.Finished(job.result.exit_code, job.result.reason)
        return Decision(state=job, effects=(*effects, ALL, over), reason=job.result.reason)
    return Decision(state=job, effects=effects, reason=reason)


Step = tuple[Job, tuple[Effect, ...], str]


# --- observe: facts in -------------------------------------------------------------------------


def _master_started(job: Job, event: ev.MasterStarted, now: float, policy: Policy) -> Step:
    if job.result is not None and not job.result.resumable:
        job = Job(last_round=job.last_round, epoch=job.epoch)
    fresh = not job.uid
    waiting = {
        key: replace(node, state=NodeState.UNREACHABLE, changed=now)
        for key, node in job.nodes.items()
    }
    job = replace(
        job,
        uid=job.uid or event.job_uid,
        epoch=job.epoch + 1,
        nodes=waiting,
        result=None,
        draining=False,
        ledger=Ledger(began=now, since=now) if fresh else job.ledger,
    )
    return job, (ALL,), "job begins" if fresh else f"master is back in epoch {job.epoch}"


def _attached(job: Job, event: ev.Attached, now: float, policy: Policy) -> Step:
    current = job.round
    for arrival in event.nodes:
        if current is None or not current.standing or arrival.node_id in current.finished:
            continue
        expected = current.incarnations.get(arrival.node_id)
        if expected is not None and expected != arrival.incarnation:
            reason = f"the agent on {arrival.node_id} died and is back"
            job = _interrupt(job, Cause.AGENT_LOST, reason, now, policy)
            current = job.round
    job = replace(job, nodes=registry.attach(job.nodes, event.nodes, now))
    for arrival in event.nodes:
        report = ev.Reported(arrival.node_id, arrival.incarnation, arrival.report)
        job, _, _ = _reported(job, report, now, policy)
    ids = frozenset(arrival.node_id for arrival in event.nodes)
    return job, (ev.Tell(ids),), f"{', '.join(sorted(ids)[:5])} attached"


def _detached(job: Job, event: ev.Detached, now: float, policy: Policy) -> Step:
    node = _known(job, event.node_id, event.incarnation)
    if node is None or node.state is not NodeState.ATTACHED:
        return job, (), ""
    node = replace(node, state=NodeState.UNREACHABLE, changed=now)
    job = replace(job, nodes=registry.with_node(job.nodes, node))
    return job, (ev.Knock(node.node_id, node.incarnation),), f"{node.node_id} is unreachable"


def _knocked(job: Job, event: ev.Knocked, now: float, policy: Policy) -> Step:
    node = _known(job, event.node_id, event.incarnation)
    if node is None:
        return job, (), ""
    heard = registry.knocked(node, event.answer, now)
    if heard is None:
        return _lose(job, node, Cause.NODE_LOST, f"{node.node_id} is gone", now, policy)
    job = replace(job, nodes=registry.with_node(job.nodes, heard))
    if heard.state is NodeState.RESTARTING and node.state is not NodeState.RESTARTING:
        reason = f"the agent on {node.node_id} died"
        if _seated(job, node.node_id):
            job = _interrupt(job, Cause.AGENT_LOST, reason, now, policy)
        return job, (ALL,), reason
    return job, (), ""


def _left(job: Job, event: ev.Left, now: float, policy: Policy) -> Step:
    node = _known(job, event.node_id, event.incarnation)
    if node is None:
        return job, (), ""
    return _lose(job, node, Cause.NODE_LEFT, f"{node.node_id} left: {event.reason}", now, policy)


def _reported(job: Job, event: ev.Reported, now: float, policy: Policy) -> Step:
    node, current, report = _known(job, event.node_id, event.incarnation), job.round, event.report
    if node is None or current is None or not current.standing or report.round != current.number:
        return job, (), ""
    if event.node_id not in current.incarnations:
        return job, (), ""
    if report.phase is NodePhase.FINISHED and event.node_id not in current.finished:
        current = replace(current, finished=current.finished | {event.node_id})
        return replace(job, round=current), (), f"{event.node_id} finished"
    known = {(o.node_id, o.failure.rank) for o in current.failures}
    fresh = tuple(
        Observed(node_id=event.node_id, failure=failure, at=now)
        for failure in report.failures
        if (event.node_id, failure.rank) not in known
    )
    if not fresh:
        return job, (), ""
    job = replace(job, round=replace(current, failures=current.failures + fresh))
    return job, (), medic.describe(fresh[0])


def _store_ready(job: Job, event: ev.StoreReady, now: float, policy: Policy) -> Step:
    node = _known(job, event.node_id, event.incarnation)
    if node is None or node.store == event.address:
        return job, (), ""
    node = replace(node, store=event.address)
    return replace(job, nodes=registry.with_node(job.nodes, node)), (), ""


def _unit_declared(job: Job, event: ev.UnitDeclared, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or event.unit < 1:
        return job, (), ""
    job = replace(job, unit=event.unit)
    world = sum(s.ranks for s in current.seats)
    if current.standing and world % event.unit:
        reason = f"the script needs a multiple of {event.unit} ranks, {world} were given"
        return _interrupt(job, Cause.UNIT, reason, now, policy), (ALL,), reason
    return job, (), ""


def _progressed(job: Job, event: ev.Progressed, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or not current.standing:
        return job, (), ""
    if current.stepped and event.step <= job.ledger.step:
        return job, (), ""
    first = not current.stepped
    job = replace(
        job,
        round=replace(current, stepped=True),
        recovery=medic.progressed(job.recovery) if first else job.recovery,
        ledger=books.progressed(job.ledger, event.step, now),
    )
    step = f" (step {event.step})" if event.step else ""
    return job, (), f"round {current.number} finished its first step{step}" if first else ""


def _restart_asked(job: Job, event: ev.RestartAsked, now: float, policy: Policy) -> Step:
    if job.round is None or not job.round.standing:
        return job, (), "nothing runs that could be restarted"
    return _interrupt(job, Cause.REQUEST, event.reason, now, policy), (ALL,), event.reason


def _drain_asked(job: Job, event: ev.DrainAsked, now: float, policy: Policy) -> Step:
    if event.node_id is None:
        job = replace(job, draining=True, stop_grace=policy.drain_timeout)
        result = Result(exit_code=DRAINED, reason=f"drained: {event.reason}", resumable=True)
        return replace(job, result=result), (ALL,), result.reason
    node = job.nodes.get(event.node_id)
    if node is None:
        return job, (), f"there is no node {event.node_id}"
    job = replace(job, nodes=registry.with_node(job.nodes, replace(node, draining=True)))
    reason = f"{event.node_id} drains: {event.reason}"
    if _seated(job, event.node_id):
        job = _interrupt(job, Cause.REQUEST, reason, now, policy)
    return job, (ALL,), reason


def _stopping(job: Job, event: ev.Stopping, now: float, policy: Policy) -> Step:
    if job.result is not None:
        return job, (), ""
    result = Result(exit_code=1, reason=event.reason, resumable=True)
    return replace(job, result=result, stop_grace=policy.drain_timeout), (), event.reason


def _tick(job: Job, event: ev.Tick, now: float, policy: Policy) -> Step:
    return job, (), ""


_OBSERVE: dict[type, Callable[..., Step]] = {
    ev.MasterStarted: _master_started,
    ev.Attached: _attached,
    ev.Detached: _detached,
    ev.Knocked: _knocked,
    ev.Left: _left,
    ev.Reported: _reported,
    ev.StoreReady: _store_ready,
    ev.UnitDeclared: _unit_declared,
    ev.Progressed: _progressed,
    ev.RestartAsked: _restart_asked,
    ev.DrainAsked: _drain_asked,
    ev.Stopping: _stopping,
    ev.Tick: _tick,
}


# --- decide: what follows ----------------------------------------------------------------------


def _expire(job: Job, now: float, policy: Policy) -> Step:
    effects: tuple[Effect, ...] = ()
    reason = ""
    for node in registry.expired(job.nodes, now, policy):
        silent = node.state is NodeState.UNREACHABLE
        why = f"nothing heard for {policy.lease:g} s" if silent else "its agent did not come back"
        job, more, reason = _lose(
            job, node, Cause.NODE_LOST, f"{node.node_id} is lost: {why}", now, policy
        )
        effects += more
    return job, effects, reason


def _decide(job: Job, now: float, policy: Policy) -> Step:
    current = job.round
    if current is not None and current.standing:
        if current.finished >= current.incarnations.keys():
            done = Result(exit_code=0, reason=f"all {len(current.seats)} nodes finished")
            return replace(job, result=done), (), done.reason
        if current.failures:
            return _judge(job, current, now, policy)
        return _grow(job, current, now, policy)
    return _form(job, now, policy)


def _judge(job: Job, current: Round, now: float, policy: Policy) -> Step:
    unsure = any(
        job.nodes[seat.node_id].state is not NodeState.ATTACHED
        for seat in current.seats
        if seat.node_id in job.nodes
    )
    state, verdict = medic.judge(job.recovery, current.failures, unsure, now, policy)
    if isinstance(verdict, medic.Hold):
        return job, (ev.WakeAt(verdict.until),), verdict.reason
    job = replace(job, recovery=state)
    if isinstance(verdict, medic.Fail):
        result = Result(exit_code=1, reason=verdict.reason)
        return replace(job, result=result), (), verdict.reason
    job = _break(job, verdict.cause, verdict.reason, now, policy)
    job, effects, reason = _form(job, now, policy)
    return job, (ALL, *effects), _join(verdict.reason, reason)


def _grow(job: Job, current: Round, now: float, policy: Policy) -> Step:
    if len(job.nodes) <= len(current.seats):
        return _rest(job, policy)
    plan = rendezvous.could_grow(current.seats, _candidates(job), now, job.unit, policy)
    if plan is None:
        return _rest(job, policy)
    if not plan.seats:
        return job, () if plan.until is None else (ev.WakeAt(plan.until),), plan.reason
    job = _break(job, Cause.GROWTH, f"more nodes came: {plan.reason}", now, policy)
    return _form(job, now, policy)


def _rest(job: Job, policy: Policy) -> Step:
    deadline = registry.next_deadline(job.nodes, policy)
    return job, () if deadline is None else (ev.WakeAt(deadline),), ""


def _form(job: Job, now: float, policy: Policy) -> Step:
    """Start a round if one can start."""
    if job.result is not None:
        return job, (), ""
    if len(job.nodes) < policy.min_nodes:  # the common case while thousands join: no planning
        return _wait(job, rendezvous.too_few(len(job.nodes), policy), now, policy)
    here = _candidates(job)
    last = job.round.seats if job.round is not None else ()
    coming = tuple(
        (node.node_id, deadline)
        for node in job.nodes.values()
        if not node.draining and (deadline := node.deadline(policy)) is not None
    )
    plan = rendezvous.decide(last, here, coming, now, job.unit, policy)
    if not plan.seats:
        return _wait(job, plan, now, policy)
    head = job.nodes[plan.seats[0].node_id]
    if not head.store:
        return job, (), f"{head.node_id} makes a store"
    number = job.last_round + 1
    seated = {s.node_id: job.nodes[s.node_id] for s in plan.seats}
    started = Round(
        number=number,
        seats=plan.seats,
        incarnations={key: node.incarnation for key, node in seated.items()},
        roles={key: node.role for key, node in seated.items()},
        store=head.store,
        started=now,
    )
    job = replace(
        job,
        round=started,
        last_round=number,
        restart_count=job.restart_count + (job.round is not None),
        nodes=registry.with_node(job.nodes, replace(head, store="")),
        below_min_since=None,
    )
    return job, (ALL,), f"round {number}: {plan.reason}"


def _wait(job: Job, plan: rendezvous.Plan, now: float, policy: Policy) -> Step:
    effects: tuple[Effect, ...] = () if plan.until is None else (ev.WakeAt(plan.until),)
    deadline = registry.next_deadline(job.nodes, policy)
    if deadline is not None:
        effects += (ev.WakeAt(deadline),)
    if plan.until is not None or policy.below_min_timeout is None:
        return job, effects, plan.reason
    since = now if job.below_min_since is None else job.below_min_since
    over = since + policy.below_min_timeout
    if now >= over:
        reason = f"{plan.reason}, for {policy.below_min_timeout:g} s"
        return replace(job, result=Result(exit_code=1, reason=reason)), effects, reason
    if job.below_min_since is None:
        job = replace(job, below_min_since=since)
    return job, (*effects, ev.WakeAt(over)), plan.reason


# --- shared ------------------------------------------------------------------------------------


def _lose(
    job: Job, node: Node, cause: Cause, reason: str, now: float, policy: Policy
) -> Step:
    """Take a node out; its round ends with it unless its part is done."""
    needed = _seated(job, node.node_id)
    job = replace(job, nodes=registry.without(job.nodes, node.node_id))
    if needed:
        job = _interrupt(job, cause, reason, now, policy)
    return job, (ALL,), reason


def _interrupt(job: Job, cause: Cause, reason: str, now: float, policy: Policy) -> Job:
    """End the standing round for a cause that needs no judging, and charge for it."""
    state, verdict = medic.charge(job.recovery, cause, reason, None, policy)
    job = replace(job, recovery=state)
    if isinstance(verdict, medic.Fail):
        return replace(job, result=Result(exit_code=1, reason=verdict.reason))
    return _break(job, cause, reason, now, policy)


def _break(job: Job, cause: Cause, reason: str, now: float, policy: Policy) -> Job:
    assert job.round is not None
    planned = cause in (Cause.GROWTH, Cause.REQUEST)
    return replace(
        job,
        round=replace(job.round, standing=False),
        ledger=books.interrupted(job.ledger, cause, reason, now),
        stop_grace=policy.drain_timeout if planned else policy.failure_grace,
    )


def _join(one: str, other: str) -> str:
    return f"{one}; {other}" if one and other and one != other else one or other


def _seated(job: Job, node_id: NodeId) -> bool:
    """It has a part in the standing round that it has not finished."""
    current = job.round
    return (
        current is not None
        and current.standing
        and node_id in current.incarnations
        and node_id not in current.finished
    )


def _known(job: Job, node_id: NodeId, incarnation: Incarnation) -> Node | None:
    """The fence: messages of another life of the node are nobody's."""
    node = job.nodes.get(node_id)
    return node if node is not None and node.incarnation == incarnation else None


def _candidates(job: Job) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            node_id=node.node_id,
            slots=node.slots,
            since=node.joined,
            labels=node.labels,
            node_rank=node.node_rank,
        )
        for node in job.nodes.values()
        if node.state is NodeState.ATTACHED and not node.draining
    )

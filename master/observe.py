"""Facts in: what each event says of the job. Whatever anybody reports, at whatever time, is legal
input; what is stale, unknown or impossible changes nothing. Pure.
"""

from collections.abc import Callable, Sized
from dataclasses import replace
from typing import Any

from elastic.master import events as ev
from elastic.master import ledger as books
from elastic.master import nodes as registry
from elastic.master import observe_health, prechecks, trial
from elastic.master import recovery as medic
from elastic.master.events import Effect, Event, Failed, NodeId, NodePhase, RankFailure
from elastic.master.ledger import Ledger
from elastic.master.nodes import Node, NodeState
from elastic.master.policy import Policy
from elastic.master.recovery import Cause, Observed
from elastic.master.state import (
    Job,
    Result,
    Rollback,
    Round,
    Step,
    Why,
    busy,
    drain,
    drained,
    end,
    excuse,
    forget,
    in_round,
    interrupt,
    is_stale,
    known,
    lose,
    names,
    needed,
    one_line,
    plan,
    probe,
    ranks_on,
    trained,
)

MOST_ROUNDS = 1 << 32
"""No job has so many: who tells of one says nothing true."""
KEEP_FAILURES = 256
"""Failures of a round that are kept, where they are mere followers of another."""


def observe(job: Job, event: Event, now: float, policy: Policy) -> Step:
    """Take one event in. Whether a round can start or must end is decided after it."""
    return _OBSERVE[type(event)](job, event, now, policy)


def expire(job: Job, now: float, policy: Policy) -> Step:
    """What time alone says of the nodes."""
    nodes = registry.patient(job.nodes, now, policy)
    knocks = registry.to_knock_at(nodes, now, policy)
    if knocks:
        nodes = {**nodes, **{node.node_id: replace(node, asked=True) for node in knocks}}
    if nodes is not job.nodes:
        job = replace(job, nodes=nodes)
    lost: dict[str, list[Node]] = {}
    for node in registry.expired(nodes, now, policy):
        restarting = node.state is NodeState.RESTARTING
        why = "no agent came back" if restarting else f"nothing heard for {node.lease(policy):g} s"
        lost.setdefault(why, []).append(node)
    reasons = []
    for why, gone in lost.items():
        what = f"{_be(gone)} lost: {why}"
        job, _, reason = lose(job, gone, Cause.NODE_LOST, what, now, policy)
        reasons.append(reason)
    effects: tuple[Effect, ...] = tuple(ev.Knock(n.node_id, n.incarnation) for n in knocks)
    if aged := prechecks.aged(job.nodes, job.checks, busy(job), now, policy):
        asked = [node.node_id for node in aged]
        job = probe(job, aged, now, policy)
        effects += (ev.Tell(frozenset(asked)),)
        reasons.append(f"probing {names(asked)} again")
    return job, effects, "; ".join(reasons)


def _master_started(job: Job, event: ev.MasterStarted, now: float, policy: Policy) -> Step:
    same_launch = event.launch and event.launch == job.launch
    if job.result is not None and not same_launch:
        job = _resumed(job) if job.result.resumable else _cleared(job)
    fresh = not job.uid
    waiting = {key: registry.silent(node, now, asked=False) for key, node in job.nodes.items()}
    if policy.precheck == "off":
        waiting = {key: replace(node, probe=None) for key, node in waiting.items()}
        job = replace(job, trial=None)
    if job.trial is not None:
        job = replace(job, trial=trial.awaited_anew(job.trial, now, policy))
    job = replace(
        job,
        uid=job.uid or event.job_uid,
        epoch=max(job.epoch + 1, event.least_epoch),
        last_round=job.last_round or event.least_round,
        launch=event.launch,
        policy=event.policy,
        nodes=waiting,
        below_min_since=None,
        lead_since=now,
        ledger=Ledger(began=now, since=now) if fresh else job.ledger,
    )
    return job, (ev.Tell(),), "job begins" if fresh else f"master is back in epoch {job.epoch}"


def _resumed(job: Job) -> Job:
    """A job that was stopped goes on; its nodes were all told to end, and what failed may have been put right."""
    assert job.result is not None
    return replace(
        forget(job, tuple(job.nodes.values())),
        round=None if job.round is None else replace(job.round, standing=False, change=None),
        ledger=books.interrupted(job.ledger, books.STOPPED, job.result.reason, job.ledger.since),
        recovery=replace(job.recovery, seen={}, ooms={}),
        trial=None,
        result=None,
    )


def _cleared(job: Job) -> Job:
    """A new job where another one ended."""
    spent = forget(job, tuple(job.nodes.values())).spent
    return Job(
        last_round=job.last_round,
        epoch=job.epoch,
        spent=spent,
        checks=job.checks,
        probes=job.probes,
    )


def _attached(job: Job, event: ev.Attached, now: float, policy: Policy) -> Step:
    ids = [arrival.node_id for arrival in event.nodes]
    reasons = [f"{names(sorted(set(ids)))} attached"] if ids else []
    job = replace(job, last_round=_last_round(job, event))
    for arrival in event.nodes:
        before = job.nodes.get(arrival.node_id)
        if before is None or before.incarnation == arrival.incarnation:
            continue
        if needed(job, before):
            reason = f"the agent on {arrival.node_id} died and is back"
            job = interrupt(job, Cause.AGENT_LOST, reason, now, policy)
            reasons.append(reason)
    nodes, spent = registry.attach(job.nodes, job.spent, event.nodes, now)
    job = replace(job, nodes=nodes, spent=spent)
    for arrival in event.nodes:
        report = ev.Reported(arrival.node_id, arrival.incarnation, arrival.report)
        job, _, reason = _reported(job, report, now, policy)
        reasons.append(reason)
    came = [job.nodes[node_id] for node_id in dict.fromkeys(ids)]
    came = [node for node in came if not in_round(job, node)]  # who trains cannot be tried
    if due := prechecks.due(came, job.checks, trained(job), now, policy):
        job = probe(job, due, now, policy)
        reasons.append(f"probing {names([node.node_id for node in due])}")
    return job, (ev.Tell(frozenset(ids)),), "; ".join(filter(None, reasons))


def _last_round(job: Job, event: ev.Attached) -> int:
    """A master whose predecessor's journal is lost begins behind the rounds that agents were in: these take no order
    of an earlier one."""
    told = [one.report.round for one in event.nodes if one.report.round < MOST_ROUNDS]
    return max([job.last_round, *told])


def _detached(job: Job, event: ev.Detached, now: float, policy: Policy) -> Step:
    away = {
        node.node_id: registry.silent(node, now, asked=True)
        for node_id, incarnation in event.nodes
        if (node := known(job, node_id, incarnation)) is not None
        and node.state is NodeState.ATTACHED
    }
    if not away:
        return job, (), ""
    job = replace(job, nodes={**job.nodes, **away})
    knocks = tuple(ev.Knock(node.node_id, node.incarnation) for node in away.values())
    return job, knocks, f"{names([*away])} {_be(away)} unreachable"


def _knocked(job: Job, event: ev.Knocked, now: float, policy: Policy) -> Step:
    changed: dict[NodeId, Node] = {}
    gone: list[Node] = []
    for node_id, incarnation, answer in event.nodes:
        node = known(job, node_id, incarnation)
        if node is None:
            continue
        heard = registry.knocked(node, answer, now)
        if heard is None:
            gone.append(node)
        elif heard is not node:
            changed[node_id] = heard
    reasons = []
    if changed:
        job = replace(job, nodes={**job.nodes, **changed})
    if gone:
        job, _, reason = lose(job, gone, Cause.NODE_LOST, f"{_be(gone)} gone", now, policy)
        reasons.append(reason)
    died = [node for node in changed.values() if node.state is NodeState.RESTARTING]
    if died:
        reasons.append(f"the agent on {names([node.node_id for node in died])} died")
        if any(needed(job, node) for node in died):
            job = interrupt(job, Cause.AGENT_LOST, reasons[-1], now, policy)
    return job, (), "; ".join(reasons)


def _be(several: Sized) -> str:
    return "is" if len(several) == 1 else "are"


def _left(job: Job, event: ev.Left, now: float, policy: Policy) -> Step:
    node = known(job, event.node_id, event.incarnation)
    if node is None:
        return job, (), ""
    what = f"left: {one_line(event.reason)}"
    if not in_round(job, node):  # if others still need its store, they will say so
        return forget(job, (node,)), (), f"{node.node_id} {what}"
    return lose(job, [node], Cause.NODE_LEFT, what, now, policy)


def _reported(job: Job, event: ev.Reported, now: float, policy: Policy) -> Step:
    node_id, current, report = event.node_id, job.round, event.report
    if is_stale(job, node_id, event.incarnation, report.round):
        return job, (), ""
    if current is None or not current.standing:
        return job, (), ""
    if not current.ended.issuperset(report.ended):
        current = replace(current, ended=current.ended | frozenset(report.ended))
        job = replace(job, round=current)
    told = {_which(o.failure) for o in current.failures if o.node_id == node_id}
    failures = report.failures
    if report.phase is NodePhase.FAILED and not failures and not told:
        failures = (_unexplained(current, node_id),)
    if report.phase is NodePhase.FINISHED and not failures and not told:
        if node_id in current.finished:
            return job, (), ""
        current = replace(current, finished=current.finished | {node_id})
        return replace(job, round=current), (), f"{node_id} finished"
    fresh = tuple({_which(f): f for f in failures if _which(f) not in told}.values())
    if len(current.failures) >= KEEP_FAILURES:
        fresh = tuple(f for f in fresh if not medic.follows(f))
    if not fresh:
        return job, (), ""
    seen = tuple(Observed(node_id=node_id, failure=f, at=now) for f in fresh)
    ended = current.ended
    if not current.failures:
        ended |= frozenset(ranks_on(current, current.finished))
    job = replace(job, round=replace(current, failures=current.failures + seen, ended=ended))
    return job, (), medic.describe(seen[0])


def _which(failure: RankFailure) -> tuple[Failed, int]:
    """What tells two failures of a node apart."""
    return failure.what, failure.rank


def _unexplained(current: Round, node_id: NodeId) -> RankFailure:
    return RankFailure(
        rank=ranks_on(current, [node_id])[0],
        local_rank=0,
        exit_code=1,
        message="its agent did not say why",
    )


def _store_ready(job: Job, event: ev.StoreReady, now: float, policy: Policy) -> Step:
    node = known(job, event.node_id, event.incarnation)
    if node is None:
        return job, (), ""
    ready = registry.with_store(node, event.address)
    if ready is node:
        return job, (), ""
    return replace(job, nodes=registry.with_node(job.nodes, ready)), (), ""


def _prepared(job: Job, event: ev.Prepared, now: float, policy: Policy) -> Step:
    node = known(job, event.node_id, event.incarnation)
    if node is None or node.prepared:
        return job, (), ""
    node = replace(node, prepared=True)
    return replace(job, nodes=registry.with_node(job.nodes, node)), (), ""


def _unit_declared(job: Job, event: ev.UnitDeclared, now: float, policy: Policy) -> Step:
    current = job.round
    if is_stale(job, event.node_id, event.incarnation, event.round):
        return job, (), ""
    if current is None or event.unit < 1:
        return job, (), ""
    if job.unit != event.unit:
        job = replace(job, unit=event.unit)
    world = sum(s.ranks for s in current.seats)
    if not current.standing or world % event.unit == 0:
        return job, (), ""
    reason = f"the script needs a multiple of {event.unit} ranks, {world} were given"
    return interrupt(job, Cause.UNIT, reason, now, policy), (), reason


def _progressed(job: Job, event: ev.Progressed, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or not current.standing:
        return job, (), ""
    if current.stepped and event.step <= current.step:
        return job, (), ""
    first, step = not current.stepped, max(0, event.step)
    untold = not (step or job.recovery.reached)
    advanced = current.advanced or step > job.recovery.reached
    effects: tuple[Effect, ...] = ()
    if event.plain and not job.plain:
        job = replace(job, plain=True)
        waiting = frozenset(job.nodes) - {seat.node_id for seat in current.seats}
        effects = (ev.Tell(waiting),) if waiting else ()
    job = replace(
        job,
        round=replace(current, stepped=True, step=step, advanced=advanced),
        recovery=medic.progressed(job.recovery, told=not untold)
        if untold or (advanced and not current.advanced)
        else job.recovery,
        ledger=books.progressed(job.ledger, step, now),
    )
    named = f" (step {step})" if step else ""
    return job, effects, f"round {current.number} finished its first step{named}" if first else ""


def _saving(job: Job, event: ev.Saving, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or current.saves or not current.standing:
        return job, (), ""
    return replace(job, round=replace(current, saves=True)), (), ""


def _met(job: Job, event: ev.Met, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or not current.standing:
        return job, (), ""
    if current.change is None or current.change.met:
        return job, (), ""
    job = replace(job, round=replace(current, change=replace(current.change, met=True)))
    if event.lost:
        return (
            job,
            (),
            f"all ranks wait in the save of step {event.step}, in vain: {one_line(event.lost)}",
        )
    return job, (), f"all ranks have saved step {event.step}"


def _restart_asked(job: Job, event: ev.RestartAsked, now: float, policy: Policy) -> Step:
    if job.round is None or not job.round.standing:
        return job, (), "nothing runs that could be restarted"
    reason = one_line(event.reason) or "restart asked for"
    if not event.back:
        return plan(job, Cause.REQUEST, reason, now, policy), (), reason
    job = replace(job, rollback=Rollback(before=job.last_round, moments=event.back))
    reason = f"{reason}: back to step {event.back[0][2]}"  # what is saved meanwhile would be void
    return interrupt(job, Cause.REQUEST, reason, now, policy), (), reason


def _drain_asked(job: Job, event: ev.DrainAsked, now: float, policy: Policy) -> Step:
    node = None if event.node_id is None else job.nodes.get(event.node_id)
    stay = [n for n in job.nodes.values() if not n.draining and n is not node]
    last = node is not None and not stay and not policy.supplied  # nobody would be left
    if event.node_id is None or last:
        reason = f"drained: {one_line(event.reason)}"
        if job.round is None or not job.round.standing:
            return drained(job, reason, now, policy), (), reason
        return plan(job, Cause.REQUEST, reason, now, policy, ends=True), (), reason
    if node is None:
        return job, (), f"there is no node {event.node_id}"
    reason = f"{event.node_id} drains: {one_line(event.reason)}"
    if node.draining:
        return job, (), reason
    return drain(job, node, reason, now, policy)


def _removed(job: Job, event: ev.Removed, now: float, policy: Policy) -> Step:
    """One change for all; the worst of their causes is charged."""
    told = {one.node_id: one for one in event.nodes if one.node_id in job.nodes}
    for one in event.nodes:
        if one.node_id not in told and (free := Cause(one.cause)) in medic.FREE:
            job = excuse(job, one.node_id, free, one_line(one.reason))
    if not told:
        return job, (), ""
    gone = [job.nodes[node_id] for node_id in told]
    causes = [Cause(told[node.node_id].cause) for node in gone if needed(job, node)]
    cause = next((c for c in causes if c not in medic.FREE), Cause.PREEMPTED)
    why = "; ".join(dict.fromkeys(one_line(one.reason) for one in told.values()))
    return lose(job, gone, cause, f"{_be(gone)} gone: {why}", now, policy)


def _withdrawn(job: Job, event: ev.Withdrawn, now: float, policy: Policy) -> Step:
    leave = {
        node_id: one_line(reason)
        for node_id, reason in event.nodes
        if (node := job.nodes.get(node_id)) is not None and not node.draining
    }
    if not leave:
        return job, (), ""
    reason = f"{names([*leave])} drain: {'; '.join(dict.fromkeys(leave.values()))}"
    if any(in_round(job, job.nodes[node_id]) for node_id in leave):
        job = plan(job, Cause.REQUEST, reason, now, policy)
    draining = {
        node_id: replace(job.nodes[node_id], draining=True, why=event.why) for node_id in leave
    }
    job = replace(job, nodes={**job.nodes, **draining})
    return job, (ev.Tell(frozenset(leave)),), reason


def _resized(job: Job, event: ev.Resized, now: float, policy: Policy) -> Step:
    """`policy` has it already: whoever folds the event sees to that (`resized`)."""
    if job.policy == policy:
        return job, (), ""
    job = replace(job, policy=policy, below_min_since=None)
    return job, (), f"{policy.min_nodes} to {policy.max_nodes} nodes are wanted"


def resized(event: Event, policy: Policy) -> Policy:
    """What holds once an event is taken in."""
    if not isinstance(event, ev.Resized):
        return policy
    return replace(
        policy,
        min_nodes=event.min_nodes,
        max_nodes=event.max_nodes,
        node_unit=event.node_unit,
    )


def _fail_asked(job: Job, event: ev.FailAsked, now: float, policy: Policy) -> Step:
    result = Result(exit_code=1, reason=one_line(event.reason), cause=event.cause)
    job = replace(job, stop_grace=policy.failure_grace)
    return end(job, result, now, event.cause), (), result.reason


def _stopping(job: Job, event: ev.Stopping, now: float, policy: Policy) -> Step:
    reason = one_line(event.reason) or "the master was told to end"
    result = Result(exit_code=1, reason=reason, resumable=True, cause=Why.STOPPED)
    return end(replace(job, stop_grace=policy.drain_timeout), result, now), (), reason


def _stalled(job: Job, event: ev.Stalled, now: float, policy: Policy) -> Step:
    if job.trial is not None and (late := trial.heard_late(job.trial, now)) is not job.trial:
        job = replace(job, trial=late)
    if all(node.state is not NodeState.UNREACHABLE for node in job.nodes.values()):
        return job, (), ""
    return replace(job, nodes=registry.silent_anew(job.nodes, now)), (), ""


def _together(job: Job, event: ev.Together, now: float, policy: Policy) -> Step:
    effects: list[Effect] = []
    reasons: list[str] = []
    for part in event.events:
        job, more, reason = observe(job, part, now, policy)
        effects += more
        reasons.append(reason)
    return job, tuple(effects), "; ".join(filter(None, reasons))


def _tick(job: Job, event: ev.Tick, now: float, policy: Policy) -> Step:
    return job, (), ""


_OBSERVE: dict[type, Callable[[Job, Any, float, Policy], Step]] = {
    ev.MasterStarted: _master_started,
    ev.Attached: _attached,
    ev.Detached: _detached,
    ev.Knocked: _knocked,
    ev.Left: _left,
    ev.Reported: _reported,
    ev.StoreReady: _store_ready,
    ev.Prepared: _prepared,
    ev.Probed: observe_health.probed,
    ev.Paired: observe_health.paired,
    ev.UnitDeclared: _unit_declared,
    ev.Progressed: _progressed,
    ev.Saving: _saving,
    ev.Met: _met,
    ev.Damaged: observe_health.damaged,
    ev.Doubted: observe_health.doubted,
    ev.Hung: observe_health.hung,
    ev.Straggling: observe_health.straggling,
    ev.RestartAsked: _restart_asked,
    ev.DrainAsked: _drain_asked,
    ev.Removed: _removed,
    ev.Withdrawn: _withdrawn,
    ev.Resized: _resized,
    ev.FailAsked: _fail_asked,
    ev.Stopping: _stopping,
    ev.Stalled: _stalled,
    ev.Together: _together,
    ev.Tick: _tick,
}

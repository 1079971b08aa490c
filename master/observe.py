"""Facts in: what each event says of the job. Whatever anybody reports, at whatever time, is legal
input; what is stale, unknown or impossible changes nothing. Pure.
"""

from collections.abc import Callable, Sized
from dataclasses import replace
from typing import Any

from elastic.master import events as ev
from elastic.master import ledger as books
from elastic.master import nodes as registry
from elastic.master import prechecks, rendezvous, trial
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
    candidates,
    doubt,
    drained,
    end,
    forget,
    in_round,
    interrupt,
    is_stale,
    known,
    lose,
    names,
    needed,
    nodes_of,
    plan,
    probe,
    trained,
)

KEEP_FAILURES = 256
"""Failures of a round that are kept, where they are mere followers of another."""

MOST_DAMAGED = 1000
"""Damages of checkpoints that are remembered."""


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
    if aged := prechecks.aged(job.nodes, job.checks, trained(job), now, policy):
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
        epoch=job.epoch + 1,
        launch=event.launch,
        policy=event.policy,
        nodes=waiting,
        below_min_since=None,
        lead_since=now,
        ledger=Ledger(began=now, since=now) if fresh else job.ledger,
    )
    return job, (ev.Tell(),), "job begins" if fresh else f"master is back in epoch {job.epoch}"


def _resumed(job: Job) -> Job:
    """A job that was stopped goes on; its nodes were all told to end."""
    assert job.result is not None
    return replace(
        forget(job, tuple(job.nodes.values())),
        round=None if job.round is None else replace(job.round, standing=False, change=None),
        ledger=books.interrupted(job.ledger, books.STOPPED, job.result.reason, job.ledger.since),
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
    if due := prechecks.due(came, job.checks, trained(job), now, policy):
        job = probe(job, due, now, policy)
        reasons.append(f"probing {names([node.node_id for node in due])}")
    return job, (ev.Tell(frozenset(ids)),), "; ".join(filter(None, reasons))


def _probed(job: Job, event: ev.Probed, now: float, policy: Policy) -> Step:
    nodes: dict[NodeId, Node] = {}
    checks: dict[str, prechecks.Checked] = {}
    reasons = []
    for health in event.nodes:
        node = known(job, health.node_id, health.incarnation)
        if node is None or node.probe is None or node.probe.number != health.number:
            continue
        before = job.checks.get(prechecks.where(node))
        nodes[node.node_id] = replace(node, probe=None)
        checks[prechecks.where(node)] = prechecks.Checked(
            node_id=health.node_id,
            incarnation=health.incarnation,
            level=health.level,
            state=health.state,
            what=health.what,
            at=now,
            device=health.device,
            devices=health.devices,
            paired=None if before is None else before.paired,
            doubted="" if before is None else before.doubted,
        )
        found = f"is kept out: {health.what}" if health.state == "faulty" else f"is {health.state}"
        reasons.append(f"{health.node_id} {found}, probed in {health.seconds:.1f} s")
    if not nodes:
        return job, (), ""
    checks = {**prechecks.kept(job.checks, job.nodes, now, policy), **checks}
    job = replace(job, nodes={**job.nodes, **nodes}, checks=checks)
    return job, (ev.Tell(frozenset(nodes)),), "; ".join(reasons)


def _paired(job: Job, event: ev.Paired, now: float, policy: Policy) -> Step:
    if job.trial is None:
        return job, (), ""
    going, nodes = trial.answered(job.trial, job.nodes, event.nodes)
    if nodes is job.nodes:
        return job, (), ""
    told = ev.Tell(frozenset(one.node_id for one in event.nodes))
    return replace(job, trial=going, nodes=nodes), (told,), ""


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
    what = f"left: {_line(event.reason)}"
    if not in_round(job, node):  # if others still need its store, they will say so
        return forget(job, (node,)), (), f"{node.node_id} {what}"
    return lose(job, [node], Cause.NODE_LEFT, what, now, policy)


def _reported(job: Job, event: ev.Reported, now: float, policy: Policy) -> Step:
    node_id, current, report = event.node_id, job.round, event.report
    if is_stale(job, node_id, event.incarnation, report.round):
        return job, (), ""
    if current is None or not current.standing:
        return job, (), ""
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
    job = replace(job, round=replace(current, failures=current.failures + seen))
    return job, (), medic.describe(seen[0])


def _which(failure: RankFailure) -> tuple[Failed, int]:
    """What tells two failures of a node apart."""
    return failure.what, failure.rank


def _unexplained(current: Round, node_id: NodeId) -> RankFailure:
    first = 0
    for seat in current.seats:
        if seat.node_id == node_id:
            break
        first += seat.ranks
    return RankFailure(rank=first, local_rank=0, exit_code=1, message="its agent did not say why")


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
    effects: tuple[Effect, ...] = ()
    if event.plain and not job.plain:
        job = replace(job, plain=True)
        waiting = frozenset(job.nodes) - {seat.node_id for seat in current.seats}
        effects = (ev.Tell(waiting),) if waiting else ()
    job = replace(
        job,
        round=replace(current, stepped=True, step=step),
        recovery=medic.progressed(job.recovery) if first else job.recovery,
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
            f"all ranks wait in the save of step {event.step}, in vain: {_line(event.lost)}",
        )
    return job, (), f"all ranks have saved step {event.step}"


def _damaged(job: Job, event: ev.Damaged, now: float, policy: Policy) -> Step:
    """All go on from something else: each damage is found once, so that comes to an end."""
    current, damage = job.round, event.damage
    if current is None or event.round != current.number:
        return job, (), ""
    if damage.where not in {known.where for known in job.damaged}:
        job = replace(job, damaged=(*job.damaged, damage)[-MOST_DAMAGED:])
    elif not current.standing:
        return job, (), ""
    reason = (
        f"step {damage.step} of checkpoint {damage.checkpoint} is damaged: {_line(damage.what)}"
    )
    return interrupt(job, Cause.DAMAGED, reason, now, policy), (), reason


def _doubted(job: Job, event: ev.Doubted, now: float, policy: Policy) -> Step:
    """Nobody goes on from that; a round that may have, since it was heard of late, begins anew. The round
    itself ends as its script does. Whose ranks may be wrong is tried before it joins the next one."""
    current = job.round
    damage = ev.Damage(
        checkpoint=event.checkpoint,
        round=event.round,
        step=event.after + 1,
        from_memory=False,
        what=_line(event.what),
        later=True,
    )
    if current is None or not 0 < event.round <= current.number or event.after < 0:
        return job, (), ""
    if damage.where in {known.where for known in job.damaged}:
        return _doubted_too(job, current, event, now, policy)
    job = replace(job, damaged=(*job.damaged, damage)[-MOST_DAMAGED:])
    reason = f"what round {event.round} has saved after step {event.after} is not loaded again: {damage.what}"
    if current.number > event.round:
        return interrupt(job, Cause.DAMAGED, reason, now, policy), (ev.Tell(),), reason
    if named := nodes_of(current, event.ranks):
        job, _ = doubt(job, named, damage.what, now, policy)
        reason = f"{names(named)} may compute wrong; {reason}"
    return job, (ev.Tell(),), reason


def _doubted_too(job: Job, current: Round, event: ev.Doubted, now: float, policy: Policy) -> Step:
    """Said again, or of other ranks: groups of replicas are compared each for itself. Once the round is over its nodes
    are tried, and nothing that is only said again puts them in doubt again."""
    if current.number != event.round or not current.standing:
        return job, (), ""
    named = [
        node_id
        for node_id in nodes_of(current, event.ranks)
        if (node := job.nodes.get(node_id)) is not None and not prechecks.in_doubt(node, job.checks)
    ]
    job, probing = doubt(job, named, _line(event.what), now, policy)
    return job, (), f"{names(named)} may compute wrong" if probing else ""


def _hung(job: Job, event: ev.Hung, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or not current.standing:
        return job, (), ""
    reason = _line(event.reason)
    if policy.hang_action != "recover":
        return job, (), reason
    root = None
    if event.ranks:
        failure = RankFailure(
            rank=event.ranks[0],
            local_rank=0,
            exit_code=0,
            message=reason,
            frame=event.place,
            what=Failed.HANG,
        )
        root = Observed(node_id=event.nodes[0], failure=failure, at=now)
    job = interrupt(job, Cause.HANG, reason, now, policy, root)
    if event.machine:
        suspects = event.nodes or [seat.node_id for seat in current.seats]
        job, doubted = doubt(job, suspects, "hang", now, policy)
        reason = "; ".join(filter(None, (reason, doubted)))
    return job, (), reason


def _straggling(job: Job, event: ev.Straggling, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or not current.standing:
        return job, (), ""
    stand = tuple(one for one in current.stragglers if one.about != event.about)
    stand = stand if event.over else (*stand, event)
    reason = _line(event.reason)
    if stand == current.stragglers:
        return job, (), reason
    job = replace(job, round=replace(current, stragglers=stand))
    node = job.nodes.get(event.nodes[0]) if event.kind in ("rank", "node") else None
    if event.over or not event.pays or not policy.exclude_straggler or node is None:
        return job, (), reason
    if current.change is not None or not in_round(job, node):
        return job, (), reason
    if not _faster_without(job, current, node, event.share, now, policy):
        return job, (), f"{reason}, and nobody can take its place"
    return _drain(job, node, f"{node.node_id} drains: {reason}", now, policy)


def _faster_without(
    job: Job, current: Round, node: Node, share: float, now: float, policy: Policy
) -> bool:
    """Whether the others, and who waits, are a legal world that gets more done. share: of its time, that the node
    costs the job."""
    others = [one for one in candidates(job, policy) if one.node_id != node.node_id]
    plan = rendezvous.decide(current.seats, others, (), now, job.unit, policy)
    ranks = sum(seat.ranks for seat in plan.seats)
    return ranks > (1 - share) * sum(seat.ranks for seat in current.seats)


def _restart_asked(job: Job, event: ev.RestartAsked, now: float, policy: Policy) -> Step:
    if job.round is None or not job.round.standing:
        return job, (), "nothing runs that could be restarted"
    reason = _line(event.reason) or "restart asked for"
    if not event.back:
        return plan(job, Cause.REQUEST, reason, now, policy), (), reason
    job = replace(job, rollback=Rollback(before=job.last_round, moments=event.back))
    reason = f"{reason}: back to step {event.back[0][2]}"  # what is saved meanwhile would be void
    return interrupt(job, Cause.REQUEST, reason, now, policy), (), reason


def _drain_asked(job: Job, event: ev.DrainAsked, now: float, policy: Policy) -> Step:
    node = None if event.node_id is None else job.nodes.get(event.node_id)
    stay = [n for n in job.nodes.values() if not n.draining and n is not node]
    if event.node_id is None or (node is not None and not stay):  # nobody would be left
        reason = f"drained: {_line(event.reason)}"
        if job.round is None or not job.round.standing:
            return drained(job, reason, now, policy), (), reason
        return plan(job, Cause.REQUEST, reason, now, policy, ends=True), (), reason
    if node is None:
        return job, (), f"there is no node {event.node_id}"
    reason = f"{event.node_id} drains: {_line(event.reason)}"
    if node.draining:
        return job, (), reason
    return _drain(job, node, reason, now, policy)


def _drain(job: Job, node: Node, reason: str, now: float, policy: Policy) -> Step:
    """A node leaves; others stay."""
    if in_round(job, node):
        job = plan(job, Cause.REQUEST, reason, now, policy)
    job = replace(job, nodes=registry.with_node(job.nodes, replace(node, draining=True)))
    return job, (ev.Tell(frozenset({node.node_id})),), reason


def _stopping(job: Job, event: ev.Stopping, now: float, policy: Policy) -> Step:
    reason = _line(event.reason) or "the master was told to end"
    result = Result(exit_code=1, reason=reason, resumable=True)
    return end(replace(job, stop_grace=policy.drain_timeout), result, now), (), reason


def _line(text: str) -> str:
    return " ".join(text.split())


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
    ev.Probed: _probed,
    ev.Paired: _paired,
    ev.UnitDeclared: _unit_declared,
    ev.Progressed: _progressed,
    ev.Saving: _saving,
    ev.Met: _met,
    ev.Damaged: _damaged,
    ev.Doubted: _doubted,
    ev.Hung: _hung,
    ev.Straggling: _straggling,
    ev.RestartAsked: _restart_asked,
    ev.DrainAsked: _drain_asked,
    ev.Stopping: _stopping,
    ev.Stalled: _stalled,
    ev.Together: _together,
    ev.Tick: _tick,
}

"""The whole decider: events in, state and effects out. Pure; composes the machines beside it.

A job is a fold over its events, so replaying the journal is the master's recovery.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastic.master import events as ev
from elastic.master import nodes as registry
from elastic.master import observe, observe_health, prechecks, rendezvous, trial
from elastic.master import recovery as medic
from elastic.master.events import Effect, Event, NodeId
from elastic.master.policy import Policy
from elastic.master.recovery import Cause
from elastic.master.rendezvous import Candidate
from elastic.master.state import (
    DRAINED,
    Change,
    Job,
    Result,
    Round,
    Why,
    broken,
    busy,
    candidates,
    doubt,
    drained,
    end,
    fail,
    in_round,
    interrupt,
    recovered,
    trained,
)
from elastic.master.state import plan as planned

__all__ = ["DRAINED", "Decision", "Job", "Result", "Round", "handle", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    state: Job
    """The very object that went in, if nothing changed: the event need not be journaled."""
    effects: tuple[Effect, ...]
    reason: str
    """Why this was decided, or why nothing was."""


def handle(job: Job, event: Event, now: float, policy: Policy) -> Decision:
    """Take one event in; `now` is job time in seconds and never goes back."""
    before, policy = job, observe.resized(event, policy)
    if job.result is not None and not isinstance(event, ev.MasterStarted):
        return _too_late(job, event, job.result)
    job, effects, reason = observe.observe(job, event, now, policy)
    reasons = [reason]
    if job.result is None and _stirred(before, job, event):
        job, more, said = _settle(job, now, policy)
        effects += more
        reasons += said
    elif job.result is None:
        job, reason = _finish(job, now)
        reasons.append(reason)
    if _shown(before) != _shown(job) and ev.Tell() not in effects:
        effects += (ev.Tell(),)
    if job.result is not None:
        effects += (ev.Finished(job.result.exit_code, job.result.reason),)
        reasons = [job.result.reason]
    return Decision(state=job, effects=effects, reason=_join(reasons))


def replay(job: Job, entries: Iterable[tuple[Event, float]], policy: Policy) -> Job:
    """Fold what a journal holds, events with their job times, each under the policy of its epoch.

    policy: for an epoch that names none.
    """
    for event, now in entries:
        own = event.policy if isinstance(event, ev.MasterStarted) else job.policy
        job = handle(job, event, now, own or policy).state
    return job


def _too_late(job: Job, event: Event, result: Result) -> Decision:
    """The job is over; whoever comes now is told so."""
    parts = event.events if isinstance(event, ev.Together) else (event,)
    came = [node.node_id for part in parts if isinstance(part, ev.Attached) for node in part.nodes]
    if came:
        told = ev.Tell(frozenset(came))
        return Decision(state=job, effects=(told,), reason=f"the job is over: {result.reason}")
    return Decision(state=job, effects=(), reason="")


def _stirred(before: Job, job: Job, event: Event) -> bool:
    """Something changed on which rounds depend; for thousands of nodes most reports are not it."""
    if isinstance(event, ev.Tick | ev.MasterStarted | ev.Resized) or job.nodes is not before.nodes:
        return True
    return (
        job.unit != before.unit
        or _shown(job) != _shown(before)
        or (job.round is not None and job.round.failures != _failures(before))
    )


def _failures(job: Job) -> tuple[medic.Observed, ...]:
    return () if job.round is None else job.round.failures


def _shown(job: Job) -> tuple[object, ...]:
    """What everybody is told rests on it."""
    current = job.round
    standing = current is not None and current.standing
    change = None if current is None else current.change
    asked = None if job.trial is None else job.probes
    return (job.last_round, standing, job.result is None, change, asked)


def _settle(job: Job, now: float, policy: Policy) -> tuple[Job, tuple[Effect, ...], list[str]]:
    """What follows from the facts and the time, and when to look again: the earliest time at which
    anything can change by itself. Whom a decision leaves idle with an old verdict is seen to at once."""
    effects: tuple[Effect, ...] = ()
    reasons = []
    aged: float | None = now
    while aged is not None and aged <= now:
        job, more, reason = observe.expire(job, now, policy)
        effects += more
        reasons.append(reason)
        if job.result is not None:
            return job, effects, reasons
        job, more, reason = observe_health.replace_straggler(job, now, policy)
        effects += more
        reasons.append(reason)
        job, until, reason = _decide(job, now, policy)
        reasons.append(reason)
        if job.result is not None:
            return job, effects, reasons
        aged = prechecks.next_due(job.nodes, job.checks, busy(job), policy)
    times = [t for t in (until, registry.next_deadline(job.nodes, policy), aged) if t is not None]
    return job, effects + ((ev.WakeAt(min(times)),) if times else ()), reasons


def _join(reasons: Iterable[str]) -> str:
    """One line; what is only the beginning of another reason is left out."""
    said = " ".join("; ".join(filter(None, reasons)).split())
    parts = list(dict.fromkeys(said.split("; ")))
    kept = [p for p in parts if not any(q != p and q.startswith(p) for q in parts)]
    return "; ".join(kept)


# --- what follows from the facts: each gives the state, when to look again, and why --------------

Next = tuple[Job, float | None, str]


def _decide(job: Job, now: float, policy: Policy) -> Next:
    job, reason = _finish(job, now)
    if job.result is not None:
        return job, None, reason
    current = job.round
    if current is None or not current.standing:
        return _form(job, now, policy)
    if current.failures:
        return _judge(job, current, now, policy)
    change = current.change
    if change is None or change.cause is Cause.GROWTH:
        return _grow(job, current, now, policy)
    if not change.due(now):
        return job, change.until, _leaving(change)
    if not change.ends:
        job = interrupt(job, change.cause, change.reason, now, policy)
    return _form(job, now, policy)


def _finish(job: Job, now: float) -> tuple[Job, str]:
    current = job.round
    if current is None or not current.standing or len(current.finished) < len(current.seats):
        return job, ""
    count = len(current.seats)
    result = Result(
        exit_code=0, reason=f"all {count} nodes finished" if count > 1 else "its node finished"
    )
    return end(job, result, now), result.reason


def _judge(job: Job, current: Round, now: float, policy: Policy) -> Next:
    silent = [
        until
        for seat in current.seats
        if (node := job.nodes.get(seat.node_id)) is not None
        and in_round(job, node)
        and (until := node.awaited(policy, now)) is not None
    ]
    unsure = max(silent, default=now)
    rested = recovered(job, current, now)
    books = job.ledger
    step = books.step if books.step or books.stepping or books.productive else None
    ended = (
        () if current.change is not None else sorted(current.ended)
    )  # who leaves as planned may well
    recovery, verdict = medic.judge(rested, current.failures, unsure, now, policy, step, ended)
    if isinstance(verdict, medic.Hold):
        return job, verdict.until, verdict.reason
    job = replace(job, recovery=recovery)
    if isinstance(verdict, medic.Fail):
        return fail(job, verdict, now, policy), None, verdict.reason
    job = broken(job, verdict.cause, verdict.reason, now, policy)
    job, doubted = doubt(job, _suspects(current, verdict), verdict.cause, now, policy)
    job, until, reason = _form(job, now, policy)
    return job, until, _join((verdict.reason, doubted, reason))


def _suspects(current: Round, verdict: medic.Restart) -> Iterable[NodeId]:
    """Nodes of which one may be at fault, or what is between them."""
    if verdict.root is not None and medic.may_be_device(verdict):
        return (verdict.root.node_id,)
    return current.incarnations if verdict.cause is Cause.NETWORK else ()


def _grow(job: Job, current: Round, now: float, policy: Policy) -> Next:
    """Make the world larger if that can be had; not once a node is done with its part."""
    if len(job.nodes) <= len(current.seats) or current.finished:
        return _stay(job, current), None, ""
    plan = rendezvous.could_grow(current.seats, candidates(job, policy), now, job.unit, policy)
    if plan is None:
        return _stay(job, current), None, ""
    if not plan.seats:
        return _stay(job, current), plan.until, plan.reason
    head = job.nodes[plan.seats[0].node_id]
    if not head.store:
        why = f"{plan.reason}: once {head.node_id} has made a store"
        return _stay(job, current), None, why
    change = current.change
    if change is None:
        job = planned(job, Cause.GROWTH, f"more nodes came: {plan.reason}", now, policy)
        assert job.round is not None
        change = job.round.change
        assert change is not None
    if not change.due(now):
        return job, change.until, _leaving(change)
    job = broken(job, Cause.GROWTH, f"more nodes came: {plan.reason}", now, policy)
    seated = [job.nodes[seat.node_id] for seat in plan.seats]
    if prechecks.to_pair(seated, job.checks, trained(job), now, policy):
        return _try(job, trial.begin(seated, job.checks, now, policy), now, policy)
    return _start(job, plan, now)


def _stay(job: Job, current: Round) -> Job:
    """No larger world after all: whoever was to leave for it goes on."""
    return job if current.change is None else replace(job, round=replace(current, change=None))


def _leaving(change: Change) -> str:
    return f"{change.reason}: once all ranks have saved a step"


def _form(job: Job, now: float, policy: Policy) -> Next:
    """Start a round if one can start, and the job goes on."""
    if job.round is not None and (change := job.round.change) is not None and change.ends:
        return drained(job, change.reason, now, policy), None, change.reason
    if job.trial is not None:
        return _try(job, job.trial, now, policy)
    if policy.probe_only:
        return _precheck(job, now, policy)
    if len(job.nodes) < policy.min_nodes:  # the common case while thousands join: no planning
        return _wait(job, rendezvous.too_few(len(job.nodes), policy), now, policy)
    last = job.round.seats if job.round is not None else ()
    here = candidates(job, policy)
    lives = trained(job)
    warmed = any(
        lives.get(one.node_id) == (node := job.nodes[one.node_id]).incarnation
        and not prechecks.in_doubt(node, job.checks)
        for one in here
    )
    coming = tuple(
        (node.node_id, until)
        for node in job.nodes.values()
        if not node.draining
        and (
            until := node.awaited(policy, now)
            or prechecks.awaited(node, job.checks, policy, trained=warmed)
        )
        is not None
    )
    if not warmed and (enough := _enough(job, here, now, policy)):
        here = enough
        coming = tuple(
            one for one in coming if prechecks.tested(job.nodes[one[0]], job.checks, policy)
        )
    warm = [candidate for candidate in here if candidate.ready <= now]
    plan = rendezvous.decide(last, warm, coming, now, job.unit, policy)
    if not plan.seats and len(warm) < len(here):
        plan = rendezvous.decide(last, here, coming, now, job.unit, policy)
    if not plan.seats:
        if plan.until is None and _never(job, here, coming, policy):
            reason = (
                f"{plan.reason}, and the job may have no more nodes: give more --nproc-per-node "
            )
            reason += "or --nnodes"
            return end(job, Result(exit_code=1, reason=reason), now), None, reason
        return _wait(job, plan, now, policy)
    seated = [job.nodes[seat.node_id] for seat in plan.seats]
    if job.below_min_since is not None:
        job = replace(job, below_min_since=None)
    if prechecks.to_pair(seated, job.checks, lives, now, policy):
        return _try(job, trial.begin(seated, job.checks, now, policy), now, policy)
    head = seated[0]
    if head.store:
        return _start(job, plan, now)
    return job, None, f"{plan.reason}: once {head.node_id} has made a store"


def _enough(
    job: Job, here: Sequence[Candidate], now: float, policy: Policy
) -> tuple[Candidate, ...]:
    """Those that were tested with one another, and are as many as a round takes of all that were here before; empty:
    there are none. Who came since joins as it does once they train, or tests had no end."""
    last = job.round.seats if job.round is not None else ()
    tested = tuple(
        one for one in here if prechecks.tested(job.nodes[one.node_id], job.checks, policy)
    )
    seats = rendezvous.decide(last, tested, (), now, job.unit, policy).seats
    if not seats:
        return ()
    began = max(prechecks.paired_at(job.nodes[one.node_id], job.checks) for one in tested)
    ids = {one.node_id for one in tested}
    before = tuple(one for one in here if one.node_id in ids or one.since <= began)
    possible = rendezvous.decide(last, before, (), now, job.unit, policy).seats
    return tested if len(seats) >= len(possible) else before


def _precheck(job: Job, now: float, policy: Policy) -> Next:
    """Try all nodes, alone and then with one another; that is the whole job."""
    if len(job.nodes) < policy.max_nodes:
        return _wait(job, rendezvous.too_few(len(job.nodes), policy), now, policy)
    nodes = tuple(job.nodes.values())
    times = [
        until
        for node in nodes
        if (
            until := node.awaited(policy, now)
            or node.deadline(policy)
            or prechecks.awaited(node, job.checks, policy)
        )
        is not None
    ]
    if times and now < max(times):
        return job, max(times), f"{rendezvous.many(len(times), 'node')} to be heard of"
    here = (node for node in nodes if node.state is registry.NodeState.ATTACHED)
    fit = [node for node in here if prechecks.may_join(node, job.checks, policy)]
    if prechecks.to_pair(fit, job.checks, {}, now, policy):
        return _try(job, trial.begin(fit, job.checks, now, policy), now, policy)
    reason = f"{len(fit)} of {rendezvous.many(len(nodes), 'node')} can train"
    if times:
        reason += f"; {rendezvous.many(len(times), 'node')} never answered"
    reason = _join((reason, prechecks.describe(job.nodes, job.checks, policy)))
    bad = len(fit) < len(nodes)
    cause = Why.UNHEALTHY if bad else ""
    return end(job, Result(exit_code=int(bad), reason=reason, cause=cause), now), None, reason


def _try(job: Job, going: trial.Trial, now: float, policy: Policy) -> Next:
    """Nodes are tested with one another; then it goes on with those that work."""
    moved = trial.go_on(going, job.nodes, job.checks, job.probes, now, policy)
    if moved.trial is not job.trial or moved.nodes is not job.nodes:
        job = replace(
            job, trial=moved.trial, nodes=moved.nodes, checks=moved.checks, probes=moved.probes
        )
    if moved.trial is not None:
        return job, moved.trial.until, moved.reason
    job, until, reason = _form(job, now, policy)
    return job, until, _join((moved.reason, reason))


def _never(job: Job, here: Sequence[Candidate], coming: Sequence[object], policy: Policy) -> bool:
    """What the script declared fits into no world of this job. One that has trained did have such a world,
    and may have it again."""
    trained = job.ledger.productive or job.ledger.high_water
    return job.unit > 1 and not trained and not coming and len(here) >= policy.max_nodes


def _start(job: Job, plan: rendezvous.Plan, now: float) -> Next:
    number = job.last_round + 1
    seated = {s.node_id: job.nodes[s.node_id] for s in plan.seats}
    head = seated[plan.seats[0].node_id]
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
        nodes=registry.with_node(job.nodes, registry.take_store(head)),
        below_min_since=None,
    )
    return job, None, f"round {number}: {plan.reason}"


def _wait(job: Job, plan: rendezvous.Plan, now: float, policy: Policy) -> Next:
    """No round yet; with too few nodes for any, only for so long."""
    out = prechecks.describe(job.nodes, job.checks, policy)
    plan = replace(plan, reason=_join((plan.reason, out)))
    if job.round is None and policy.join_timeout is not None:
        over = max(job.ledger.began, job.lead_since) + policy.join_timeout
        if now >= over:
            reason = f"{plan.reason}, {policy.join_timeout:g} s after the job began"
            result = Result(exit_code=1, reason=reason, cause=Why.JOIN_TIMEOUT)
            return end(job, result, now), None, reason
        plan = replace(plan, until=over if plan.until is None else min(plan.until, over))
        return job, plan.until, plan.reason
    if plan.until is not None or policy.below_min_timeout is None:
        if job.below_min_since is not None:
            job = replace(job, below_min_since=None)
        return job, plan.until, plan.reason
    since = now if job.below_min_since is None else job.below_min_since
    over = since + policy.below_min_timeout
    if now >= over:
        reason = f"{plan.reason}, for {policy.below_min_timeout:g} s"
        result = Result(exit_code=1, reason=reason, cause=Why.BELOW_MIN)
        return end(job, result, now), None, reason
    if job.below_min_since is None:
        job = replace(job, below_min_since=since)
    return job, over, plan.reason

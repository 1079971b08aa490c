"""Facts in, about health: what probes find, who hangs or is slow, what is damaged or in doubt. Pure."""

from dataclasses import replace

from elastic.master import events as ev
from elastic.master import prechecks, rendezvous, trial
from elastic.master.culprits import FOREVER
from elastic.master.events import Failed, NodeId, RankFailure
from elastic.master.nodes import Node
from elastic.master.policy import Policy
from elastic.master.recovery import Cause, Fail, Observed
from elastic.master.state import (
    Job,
    Replaced,
    Round,
    Step,
    Why,
    candidates,
    doubt,
    drain,
    fail,
    in_round,
    interrupt,
    known,
    names,
    nodes_of,
    one_line,
)

MOST_DAMAGED = 1000
"""Damages of checkpoints that are remembered."""
MOST_REPLACED = 100
"""Slow nodes that were drained, likewise."""


def probed(job: Job, event: ev.Probed, now: float, policy: Policy) -> Step:
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
            times=0 if before is None else before.times,
            failed=0 if before is None else before.failed,
            doubted="" if before is None else before.doubted,
        )
        found = f"is kept out: {health.what}" if health.state == "faulty" else f"is {health.state}"
        reasons.append(f"{health.node_id} {found}, probed in {health.seconds:.1f} s")
    if not nodes:
        return job, (), ""
    checks = {**prechecks.kept(job.checks, job.nodes, now, policy), **checks}
    job = replace(job, nodes={**job.nodes, **nodes}, checks=checks)
    return job, (ev.Tell(frozenset(nodes)),), "; ".join(reasons)


def paired(job: Job, event: ev.Paired, now: float, policy: Policy) -> Step:
    if job.trial is None:
        return job, (), ""
    going, nodes = trial.answered(job.trial, job.nodes, event.nodes)
    if nodes is job.nodes:
        return job, (), ""
    told = ev.Tell(frozenset(one.node_id for one in event.nodes))
    return replace(job, trial=going, nodes=nodes), (told,), ""


def damaged(job: Job, event: ev.Damaged, now: float, policy: Policy) -> Step:
    """All go on from something else: each damage is found once, so that comes to an end."""
    current, damage = job.round, event.damage
    if current is None or event.round != current.number:
        return job, (), ""
    if damage.where not in {known.where for known in job.damaged}:
        job = replace(job, damaged=(*job.damaged, damage)[-MOST_DAMAGED:])
    elif not current.standing:
        return job, (), ""
    reason = (
        f"step {damage.step} of checkpoint {damage.checkpoint} is damaged: {one_line(damage.what)}"
    )
    return interrupt(job, Cause.DAMAGED, reason, now, policy), (), reason


def doubted(job: Job, event: ev.Doubted, now: float, policy: Policy) -> Step:
    """Nobody goes on from that; a round that may have, since it was heard of late, begins anew. The round
    itself ends as its script does. Whose ranks may be wrong is tried before it joins the next one."""
    current = job.round
    damage = ev.Damage(
        checkpoint=event.checkpoint,
        round=event.round,
        step=event.after + 1,
        from_memory=False,
        what=one_line(event.what),
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
    job, probing = doubt(job, named, one_line(event.what), now, policy)
    return job, (), f"{names(named)} may compute wrong" if probing else ""


def hung(job: Job, event: ev.Hung, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or not current.standing:
        return job, (), ""
    reason = one_line(event.reason)
    if policy.hang_action == "dump":
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
    if policy.hang_action == "fail":
        return fail(job, Fail(Cause.HANG, reason, root), now, policy), (), reason
    # What may be wrong gets longer each time, and only then is the same failure again.
    sure = not event.soft or event.seconds >= FOREVER
    job = interrupt(job, Cause.HANG, reason, now, policy, root, repeats=sure)
    if event.machine:
        suspects = event.nodes or [seat.node_id for seat in current.seats]
        job, doubted = doubt(job, suspects, "hang", now, policy)
        reason = "; ".join(filter(None, (reason, doubted)))
    return job, (), reason


def straggling(job: Job, event: ev.Straggling, now: float, policy: Policy) -> Step:
    current = job.round
    if current is None or event.round != current.number or not current.standing:
        return job, (), ""
    stand = tuple(one for one in current.stragglers if one.about != event.about)
    stand = stand if event.over else (*stand, event)
    reason = one_line(event.reason)
    if stand == current.stragglers:
        return job, (), reason
    current = replace(current, stragglers=stand)
    job = replace(job, round=current)
    if event.over or (node := _replaceable(job, current, event, policy)) is None:
        return job, (), reason
    if (before := _replaced_before(job, event, node)) is not None:
        return (
            job,
            (),
            f"{reason}; so they were on {before.node_id}: it is their work, not the node",
        )
    if not _faster_without(job, current, node, event.share, now, policy):
        return job, (), f"{reason}, and nobody can take its place"
    return _replaced(job, node, event, now, policy)


def replace_straggler(job: Job, now: float, policy: Policy) -> Step:
    """Drain the first that stands, for whom nobody was there when it was told of, and somebody is now."""
    current = job.round
    for event in () if current is None or not current.standing else current.stragglers:
        assert current is not None
        node = _replaceable(job, current, event, policy)
        if node is None or _replaced_before(job, event, node) is not None:
            continue
        if _faster_without(job, current, node, event.share, now, policy):
            return _replaced(job, node, event, now, policy)
    return job, (), ""


def _replaceable(job: Job, current: Round, event: ev.Straggling, policy: Policy) -> Node | None:
    """Whom it names, if somebody is to take its place where that pays."""
    if not policy.exclude_straggler or not event.pays or event.kind not in ("rank", "node"):
        return None
    node = job.nodes.get(event.nodes[0])
    here = node is not None and in_round(job, node) and current.change is None
    return node if here else None


def _replaced_before(job: Job, event: ev.Straggling, node: Node) -> Replaced | None:
    """Another node that was drained for the same ranks, which are as slow without it."""
    return next(
        (
            one
            for one in reversed(job.replaced)
            if one.ranks == event.ranks and one.node_id != node.node_id
        ),
        None,
    )


def _replaced(job: Job, node: Node, event: ev.Straggling, now: float, policy: Policy) -> Step:
    reason = f"{node.node_id} drains: {one_line(event.reason)}"
    slow = Replaced(node_id=node.node_id, ranks=event.ranks)
    job = replace(job, replaced=(*job.replaced, slow)[-MOST_REPLACED:])
    return drain(job, node, reason, now, policy, Why.STRAGGLER)


def _faster_without(
    job: Job, current: Round, node: Node, share: float, now: float, policy: Policy
) -> bool:
    """Whether the others, and who waits, are a legal world that gets more done. share: of its time, that the node
    costs the job."""
    others = [one for one in candidates(job, policy) if one.node_id != node.node_id]
    plan = rendezvous.decide(current.seats, others, (), now, job.unit, policy)
    ranks = sum(seat.ranks for seat in plan.seats)
    return ranks > (1 - share) * sum(seat.ranks for seat in current.seats)

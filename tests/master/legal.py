"""What holds after every decision, whatever came in. Used by examples, properties and the
simulator alike.
"""

import math

from elastic.master import events as ev
from elastic.master import prechecks
from elastic.master.directive import directive, places
from elastic.master.events import Event, NodeId
from elastic.master.job import Decision, Job, Round
from elastic.master.nodes import NodeState
from elastic.master.observe import MOST_ROUNDS
from elastic.master.policy import Policy


def check(
    before: Job, event: Event, decision: Decision, now: float, policy: Policy, used: set[str]
) -> None:
    """Raise AssertionError unless the decision is legal; `used` collects addresses of stores."""
    after = decision.state
    _grows(before, event, after)
    _legal_round(before, after, policy, used)
    _trial(after)
    _directives(after)
    _effects(before, decision, now)
    if _visible(before) != _visible(after):
        assert decision.reason, f"{event} changed what people see, without a reason"
    _plain(decision.reason)


def _grows(before: Job, event: Event, after: Job) -> None:
    started = isinstance(event, ev.MasterStarted)
    least, told = 0, list[int]()
    if isinstance(event, ev.MasterStarted):
        least, told = event.least_epoch, [event.least_round] if not before.last_round else []
    if isinstance(event, ev.Attached):
        told = [one.report.round for one in event.nodes if one.report.round < MOST_ROUNDS]
    assert after.last_round - max([before.last_round, *told]) in (0, 1)
    assert after.epoch == max(before.epoch + started, least)
    assert after.round is None or after.round.number == after.last_round
    if before.result is not None and not started:
        assert after is before, "nothing changes once there is a result"
    if before.round and after.round and after.round.number == before.round.number:
        assert before.round.standing or not after.round.standing, "a broken round stands again"
        assert after.round.finished >= before.round.finished
        assert after.round.seats == before.round.seats
    if before.uid == after.uid:
        assert after.damaged[: len(before.damaged)] == before.damaged, "damage is forgotten"
        assert sum(_books(after)) >= sum(_books(before)) - 1e-9


def _books(job: Job) -> tuple[float, ...]:
    return (job.ledger.productive, *job.ledger.lost.values())


def _legal_round(before: Job, after: Job, policy: Policy, used: set[str]) -> None:
    current = after.round
    if current is None:
        return
    ids = [seat.node_id for seat in current.seats]
    assert len(set(ids)) == len(ids), "one node, two places"
    assert current.finished <= set(ids) == set(current.incarnations) == set(current.roles)
    if current.standing and after.result is None:
        assert len(current.finished) < len(ids), "all finished, and no result"
        for seat in current.seats:
            assert seat.node_id in after.nodes or seat.node_id in current.finished
    if after.last_round == before.last_round:
        return
    size = len(ids)
    assert policy.min_nodes <= size <= policy.max_nodes
    assert size % policy.node_unit == 0
    assert sum(s.ranks for s in current.seats) % math.lcm(after.unit, policy.rank_unit) == 0
    for seat in current.seats:
        node = after.nodes[seat.node_id]
        assert node.state is NodeState.ATTACHED
        assert not node.draining
        assert prechecks.may_join(node, after.checks, policy)
        assert 1 <= seat.ranks <= node.slots
        assert current.incarnations[seat.node_id] == node.incarnation
    assert current.store
    assert current.store not in used, "two rounds on one store"
    used.add(current.store)
    assert not after.nodes[ids[0]].store, "its store is still offered"


def _trial(job: Job) -> None:
    """Whoever is tested with others is in the trial, with partners of its own group, and none trains meanwhile."""
    asked = {
        n: node.probe.pairs for n, node in job.nodes.items() if node.probe and node.probe.pairs
    }
    if job.trial is None:
        assert not asked
        return
    assert not _standing(job.round)
    assert asked.keys() <= job.trial.members.keys()
    for node_id, pairs in asked.items():
        assert node_id in pairs.nodes
        assert len(set(pairs.nodes)) == len(pairs.nodes) > 1
        assert {each for pair in pairs.pairs for each in pair} == set(pairs.nodes)


def _directives(job: Job) -> None:
    seated = places(job.round)
    nowhere = NodeId("nobody")
    orders = {node: directive(job, node, seated) for node in (*job.nodes, *seated, nowhere)}
    kinds = {order.kind for order in orders.values()}
    if job.result is not None:
        assert kinds == {"exit"}
        assert {order.exit_code for order in orders.values()} == {job.result.exit_code}
        return
    assert orders[nowhere].kind == "wait"
    runs = {node: order for node, order in orders.items() if order.kind == "run"}
    if not _standing(job.round):
        assert not runs
    assert len({order.place.node_rank for order in runs.values()}) == len(runs)
    for node, order in runs.items():
        assert job.round is not None
        assert job.round.incarnations[node] == job.nodes[node].incarnation
        assert order.round == job.last_round
        assert order.store == job.round.store
        assert 0 <= order.place.first_rank < order.place.world_size
    for node, order in orders.items():
        if node in job.nodes and job.nodes[node].draining and node not in runs:
            assert order.kind == "exit"


def _standing(current: Round | None) -> bool:
    return current is not None and current.standing


def _effects(before: Job, decision: Decision, now: float) -> None:
    after, effects = decision.state, decision.effects
    wakes = [e.time for e in effects if isinstance(e, ev.WakeAt)]
    assert len(wakes) <= 1
    assert all(time > now for time in wakes), "a wake in the past would spin"
    ended = before.result is None and after.result is not None
    assert [e for e in effects if isinstance(e, ev.Finished)] == (
        [ev.Finished(after.result.exit_code, after.result.reason)]
        if ended and after.result is not None
        else []
    )
    moved = (
        before.last_round != after.last_round
        or _standing(before.round) != _standing(after.round)
        or ended
    )
    if moved:
        assert ev.Tell() in effects, "everybody's directive changed, and nobody is told"


def _visible(job: Job) -> tuple[object, ...]:
    nodes = tuple((n.node_id, n.incarnation, n.state, n.draining) for n in job.nodes.values())
    current = job.round
    finished = current.finished if current else None
    return (job.last_round, _standing(current), finished, job.result, job.epoch, nodes)


def _plain(reason: str) -> None:
    assert "\n" not in reason
    parts = reason.split("; ")
    assert len(set(parts)) == len(parts), f"it says the same twice: {reason}"

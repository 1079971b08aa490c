"""Nodes that are about to train together are tested two by two before: rounds of tests as `pairing` plans them,
until every fault has a name. Pure.

Two nodes meet at a spare store of one of them. Who does not answer in time has failed its tests; who is gone,
cannot be heard, or could not be tested, is left out, and accused of nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from elastic.master import pairing
from elastic.master.events import Incarnation, NodeId, Pairing
from elastic.master.grouping import Group
from elastic.master.nodes import Node, Nodes, NodeState, Pairs, Probe
from elastic.master.pair_results import Account, Kind, Limits, Link, Outcome, Test, Verdict, link
from elastic.master.pairing import Found, Solo
from elastic.master.policy import Policy
from elastic.master.prechecks import Checked, Checks, times_in_doubt, where

START = 30.0
"""Seconds for a group to have a store."""
LATE = 15.0
"""Seconds beyond its deadline for an answer to come."""
DEADLINE = {"quick": (60.0, 20.0), "full": (90.0, 60.0)}
"""Seconds that a node's tests may take: to import torch, and for each of them."""
ANY_SPEED = Limits(matmul_ratio=inf, gather_ratio=inf)
"""Only what does not work is a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    members: Mapping[NodeId, Incarnation]
    began: float
    """In job time, as all times here."""
    turn: int = 0
    """How often those of them that are in doubt were tested before."""
    rounds: tuple[tuple[Test, ...], ...] = ()
    """That are over."""
    waiting: tuple[Group, ...]
    """Of this round, without a store so far."""
    groups: tuple[Group, ...] = ()
    """Of this round, that have begun."""
    answers: Mapping[NodeId, Pairing] = field(default_factory=dict[NodeId, Pairing])
    """In this round."""
    untested: frozenset[NodeId] = frozenset()
    """Who could not be."""
    until: float
    """When this round is over, whoever has not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    trial: Trial | None
    """None: it is over."""
    nodes: Nodes
    checks: Checks
    probes: int
    reason: str


def begin(nodes: Sequence[Node], checks: Checks, now: float, policy: Policy) -> Trial:
    members = {node.node_id: node.incarnation for node in nodes}
    table = {node.node_id: node for node in nodes}
    turn = times_in_doubt(nodes, checks)
    plan = pairing.decide(_labels(table), _solo(table, checks), (), _limits(policy), turn)
    return Trial(
        members=members,
        began=now,
        turn=turn,
        waiting=plan.groups,
        until=_until(plan.groups, now, policy),
    )


def awaited_anew(trial: Trial, now: float, policy: Policy) -> Trial:
    """Nobody could answer for a while."""
    return replace(trial, until=_until((*trial.waiting, *trial.groups), now, policy))


def heard_late(trial: Trial, now: float) -> Trial:
    """Answers may have come, and wait to be read. The very trial that went in if there is time for that."""
    return trial if now + LATE <= trial.until else replace(trial, until=now + LATE)


def answered(trial: Trial, nodes: Nodes, answers: Sequence[Pairing]) -> tuple[Trial, Nodes]:
    """Take in what nodes say."""
    taken = {}
    for one in answers:
        node = nodes.get(one.node_id)
        if node is None or node.incarnation != one.incarnation or node.probe is None:
            continue
        if node.probe.number == one.number and node.probe.pairs is not None:
            taken[one.node_id] = one
    if not taken:
        return trial, nodes
    untested = {node_id for node_id, one in taken.items() if one.state == "unknown"}
    trial = replace(trial, answers={**trial.answers, **taken}, untested=trial.untested | untested)
    return trial, {**nodes, **{key: replace(nodes[key], probe=None) for key in taken}}


def go_on(
    trial: Trial, nodes: Nodes, checks: Checks, probes: int, now: float, policy: Policy
) -> Moved:
    """Ask whom there is to ask; once all have answered, the next round, or what came of it."""
    here = _here(trial, nodes)
    late = now >= trial.until
    ready, waiting = _with_stores(trial, here, now, policy)
    if late or waiting != trial.waiting:
        groups = (*trial.groups, *(group for group, _ in ready))
        trial = replace(trial, waiting=() if late else waiting, groups=groups)
    asked = {}
    for group, stores in ready:
        pairs = _order(stores, f"probe/{probes + 1}", group, here, checks, policy)
        for node_id in group.nodes:
            probes += 1
            probe = Probe(number=probes, level=policy.precheck, since=now, pairs=pairs)
            asked[node_id] = replace(nodes[node_id], probe=probe)
    left = {n: replace(nodes[n], probe=None) for n in _forsaken(trial, nodes, here)}
    if asked or left:
        nodes = {**nodes, **asked, **left}
    silent = [
        n for n in trial.members if (node := nodes.get(n)) and node.probe and node.probe.pairs
    ]
    if not late and (silent or trial.waiting):
        reason = f"{len(trial.members)} nodes are tested two by two"
        return Moved(trial=trial, nodes=nodes, checks=checks, probes=probes, reason=reason)
    if silent:  # who cannot be heard has not failed
        mute = {key for key in silent if nodes[key].state is not NodeState.ATTACHED}
        nodes = {**nodes, **{key: replace(nodes[key], probe=None) for key in silent}}
        members = {key: life for key, life in trial.members.items() if key not in mute}
        trial = replace(trial, members=members)
    return _round_over(trial, nodes, checks, probes, now, policy)


def _forsaken(trial: Trial, nodes: Nodes, here: Nodes) -> list[NodeId]:
    """Who waits for nobody but such as are gone."""
    if len(here) == len(trial.members):
        return []
    gone = trial.members.keys() - here.keys()
    asked = [n for n in here if (probe := nodes[n].probe) is not None and probe.pairs is not None]
    open_ = {
        n for group in trial.groups for pair in group.pairs if not gone & set(pair) for n in pair
    }
    return [n for n in asked if n not in open_]


def _round_over(
    trial: Trial, nodes: Nodes, checks: Checks, probes: int, now: float, policy: Policy
) -> Moved:
    """The next one, or the end."""
    here = _here(trial, nodes)
    rounds = (*trial.rounds, tuple(_tests(trial)))
    tested = {key: node for key, node in here.items() if key not in trial.untested}
    solo = _solo(tested, checks)
    plan = pairing.decide(_labels(tested), solo, rounds, _limits(policy), trial.turn)
    if plan.groups:
        until = _until(plan.groups, now, policy)
        trial = replace(
            trial, rounds=rounds, waiting=plan.groups, groups=(), answers={}, until=until
        )
        return go_on(trial, nodes, checks, probes, now, policy)
    faults = _faults(here, plan.verdicts)
    said = [f"{len(trial.members)} nodes were tested two by two, {now - trial.began:.1f} s"]
    said += _some([f"{node_id} is kept out: {what}" for node_id, what in faults.items()])
    said += _some([str(one) for one in plan.undecided])
    return Moved(
        trial=None,
        nodes=nodes,
        checks=_judged(here, checks, faults, trial.began, now, policy),
        probes=probes,
        reason="; ".join(said),
    )


def _some(texts: Sequence[str], most: int = 5) -> list[str]:
    return [*texts[:most], *[f"{len(texts) - most} more"] * (len(texts) > most)]


def _limits(policy: Policy) -> Limits:
    return Limits() if policy.exclude_straggler else ANY_SPEED


def _until(groups: Sequence[Group], now: float, policy: Policy) -> float:
    longest = max((_deadline(group, policy) for group in groups), default=0.0)
    return now + START + longest + LATE


def _deadline(group: Group, policy: Policy) -> float:
    start, each = DEADLINE[policy.precheck]
    busiest = max(Counter(node_id for pair in group.pairs for node_id in pair).values())
    return start + each * busiest


def _here(trial: Trial, nodes: Nodes) -> dict[NodeId, Node]:
    """Its members, in this life."""
    return {
        node_id: node
        for node_id, incarnation in trial.members.items()
        if (node := nodes.get(node_id)) is not None
        and node.incarnation == incarnation
        and not node.draining
    }


def _labels(nodes: Nodes) -> dict[NodeId, str]:
    return {key: "/".join(value for _, value in sorted(n.labels)) for key, n in nodes.items()}


def _solo(nodes: Nodes, checks: Checks) -> dict[NodeId, Solo]:
    states = {"ok": Found.FINE, "faulty": Found.FAULTY}
    return {
        key: Solo(found=states.get(checked.state, Found.UNKNOWN), what=checked.what)
        for key, node in nodes.items()
        if (checked := checks.get(where(node))) is not None
    }


def _with_stores(
    trial: Trial, here: Nodes, now: float, policy: Policy
) -> tuple[list[tuple[Group, tuple[str, ...]]], tuple[Group, ...]]:
    """Groups of those who are here that can answer in time, with the store at which each pair can meet; and the others."""
    met = Counter[Link]()
    if trial.waiting:  # else, as with most events, nobody asks
        met.update(test.link for tests in trial.rounds for test in tests)
    ready, waiting = [], []
    for group in trial.waiting:
        left = Group(pairs=tuple(pair for pair in group.pairs if here.keys() >= set(pair)))
        stores = _stores(left, here, met)
        if left.pairs and all(stores) and now + _deadline(left, policy) + LATE <= trial.until:
            ready.append((left, stores))
        elif left.pairs:
            waiting.append(left)
    return ready, tuple(waiting)


def _stores(group: Group, here: Nodes, met: Counter[Link]) -> tuple[str, ...]:
    """For each pair that of one of its two nodes, once the one's and once the other's; empty: neither has one. A third one's
    would have them fail together for what is between it and one of them. met: how often each link was tested."""
    stores, again = [], Counter[Link]()
    for pair in group.pairs:
        which = link(*pair)
        ends = which if (met[which] + again[which]) % 2 == 0 else which[::-1]
        stores.append(next((here[node_id].store for node_id in ends if here[node_id].store), ""))
        again[which] += 1
    return tuple(stores)


def _order(
    stores: tuple[str, ...], prefix: str, group: Group, here: Nodes, checks: Checks, policy: Policy
) -> Pairs:
    known = [checks.get(where(here[node_id])) for node_id in group.nodes]
    cuda = all(one is not None and one.device == "cuda" for one in known)
    return Pairs(
        stores=stores,
        prefix=prefix,
        nodes=group.nodes,
        pairs=group.pairs,
        device="cuda" if cuda else "cpu",
        devices=min(one.devices for one in known if one) if cuda else 1,
        deadline=_deadline(group, policy),
    )


def _tests(trial: Trial) -> Iterator[Test]:
    """Of the round that is on."""
    for group in trial.groups:
        turn: Counter[NodeId] = Counter()
        for a, b in group.pairs:
            yield Test(a=_account(trial, a, turn[a]), b=_account(trial, b, turn[b]))
            turn.update((a, b))


def _account(trial: Trial, node_id: NodeId, turn: int) -> Account:
    """What a node says of its pairs' number `turn`."""
    said = trial.answers.get(node_id)
    if said is None:
        return Account(node_id=node_id, outcome=Outcome.TIMED_OUT, what="it never answered")
    if said.state == "faulty":
        alone = Outcome.FAILED_ALONE
        return Account(node_id=node_id, outcome=alone, what=said.what, gpu=said.gpu)
    if turn >= len(said.tests):
        return Account(node_id=node_id, outcome=Outcome.FAILED, what="it was not tested")
    test = said.tests[turn]
    failed = Outcome.TIMED_OUT if test.late else Outcome.FAILED
    return Account(
        node_id=node_id,
        outcome=Outcome.PASSED if test.passed else failed,
        what=test.what,
        matmul=said.matmul,
        gather=test.gather,
    )


def _judged(
    here: Nodes,
    checks: Checks,
    faults: Mapping[NodeId, Verdict],
    began: float,
    now: float,
    policy: Policy,
) -> Checks:
    """What is known of them now. began: when their tests did."""
    found = {}
    for node_id, node in here.items():
        key = where(node)
        known = checks.get(key) or Checked(
            node_id=node_id, incarnation=node.incarnation, level=policy.precheck, state="unknown", what="", at=now
        )  # fmt: skip
        fault = faults.get(node_id)
        if fault is not None:
            known = replace(known, state="faulty", what=str(fault), incarnation=node.incarnation)
        found[key] = replace(
            known,
            at=now,
            paired=began,
            times=known.times + 1,
            failed=known.failed + 1 if fault is not None else 0,
            doubted="" if fault is None else str(fault),
            between=fault is not None and fault.kind is Kind.LINK,
        )
    return {**checks, **found}


def _faults(here: Nodes, verdicts: Sequence[Verdict]) -> dict[NodeId, Verdict]:
    """Who is kept out, and why. Of a link's two ends one can train: the one with fewer such links, or that came
    first."""
    faults = {one.nodes[0]: one for one in verdicts if one.kind is not Kind.LINK}
    links = [one for one in verdicts if one.kind is Kind.LINK]
    many = Counter(node_id for one in links for node_id in one.nodes)
    came = {node_id: number for number, node_id in enumerate(here)}
    for one in sorted(links, key=lambda one: -max(many[node_id] for node_id in one.nodes)):
        if not faults.keys() & set(one.nodes):
            worst = max(one.nodes, key=lambda node_id: (many[node_id], came[node_id]))
            faults[worst] = one
    return faults

"""Which nodes are tried before they join a round, and which are kept out of it. Pure.

A verdict is about a node on its host, and holds for a while. Who trained in the last round has shown that it works,
so a fault of the software costs no probe; a fault that may be the machine's puts the node in doubt. A node that is
found faulty is kept out until that verdict is old, or until its launcher is started again, by somebody who has seen
to it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from elastic.master.events import Incarnation, NodeId
from elastic.master.nodes import Node, Nodes, NodeState
from elastic.master.policy import PRECHECKS, Policy

PATIENCE = {"quick": 180.0, "full": 900.0}
"""Seconds that a round which could start without it waits for a node that is being probed."""

DOUBLED = 5
"""How often, at most, the age is doubled at which a verdict is old."""

HURRY = 20.0
"""The same, where the others have trained, and could go on."""

SOON, SOONER = 60.0, 3
"""Seconds after which who is kept out is tried again where too few are left without it, so that nobody stops for that; doubled
so often at most."""
FORGOTTEN = 86_400.0
"""Seconds after which a doubt about a node that is gone is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the last probe of a node said."""

    node_id: NodeId
    incarnation: Incarnation
    """Of the node then."""
    level: str
    state: str
    """ok, faulty, or unknown, which is no fault."""
    what: str
    """Every fault, in one line."""
    at: float
    """In job time."""
    device: str = "cpu"
    """Or cuda."""
    devices: int = 1
    paired: float | None = None
    """When its last tests with others began, in job time."""
    times: int = 0
    """How often it was tested with others."""
    failed: int = 0
    """How often in a row tests with others had it kept out."""
    doubted: str = ""
    """Why it does not train before it was tried again, alone and with others; empty once it was, and works."""
    between: bool = False
    """Its fault is that of a link, of whose two ends it is the one that is kept out."""


Checks = Mapping[str, Checked]
"""By `where`."""


def where(node: Node) -> str:
    """A node's name may move to another host, as a pod's does."""
    return f"{node.node_id} on {node.host}"


def due(
    nodes: Iterable[Node],
    checks: Checks,
    trained: Mapping[NodeId, Incarnation],
    now: float,
    policy: Policy,
) -> tuple[Node, ...]:
    """Those of `nodes` to be probed before they may join. trained: the nodes of the last round."""
    if policy.precheck == "off":
        return ()
    return tuple(
        node
        for node in nodes
        if node.probe is None
        and (trained.get(node.node_id) != node.incarnation or in_doubt(node, checks))
        and not _holds(checks.get(where(node)), node, now, policy)
    )


def doubt(nodes: Iterable[Node], checks: Checks, why: str, now: float, policy: Policy) -> Checks:
    """What they met may be the fault of one of them."""
    found = {}
    for node in nodes if policy.precheck != "off" else ():
        found[where(node)] = Checked(
            node_id=node.node_id, incarnation=node.incarnation, level="off", state="unknown", what="", at=now,
            times=_times(node, checks), doubted=why,
        )  # fmt: skip
    return {**checks, **found} if found else checks


def kept(checks: Checks, nodes: Nodes, now: float, policy: Policy) -> Checks:
    """Without what is old, of nodes that are gone: they would be tried again whatever it says."""
    return {
        key: checked
        for key, checked in checks.items()
        if now < _old_at(checked, policy, short=False)
        or (checked.doubted and now < checked.at + FORGOTTEN)
        or ((node := nodes.get(checked.node_id)) is not None and where(node) == key)
    }


def to_pair(
    nodes: Sequence[Node],
    checks: Checks,
    trained: Mapping[NodeId, Incarnation],
    now: float,
    policy: Policy,
) -> bool:
    """Whether these, who are about to train together, are tested with one another before. Who trained waits for
    nobody to be tested, unless one of them is in doubt."""
    if policy.precheck == "off" or len(nodes) < 2:
        return False
    if any(in_doubt(node, checks) for node in nodes):
        return True
    new = all(trained.get(node.node_id) != node.incarnation for node in nodes)
    return new and not all(_paired(node, checks, now, policy) for node in nodes)


def times_in_doubt(nodes: Iterable[Node], checks: Checks) -> int:
    """How often those of them that are in doubt were tested with others before, at most."""
    return max((_times(node, checks) for node in nodes if in_doubt(node, checks)), default=0)


def _times(node: Node, checks: Checks) -> int:
    checked = checks.get(where(node))
    return 0 if checked is None else checked.times


def in_doubt(node: Node, checks: Checks) -> bool:
    checked = checks.get(where(node))
    return checked is not None and bool(checked.doubted)


def tested(node: Node, checks: Checks, policy: Policy) -> bool:
    """With others, in this life, and it works."""
    checked = checks.get(where(node)) if policy.precheck != "off" else None
    return (
        checked is not None
        and checked.paired is not None
        and checked.incarnation == node.incarnation
        and not checked.doubted
    )


def paired_at(node: Node, checks: Checks) -> float:
    """When its last tests with others began, in job time."""
    checked = checks.get(where(node))
    return -inf if checked is None or checked.paired is None else checked.paired


def _paired(node: Node, checks: Checks, now: float, policy: Policy) -> bool:
    """As long as it lives, or for a while."""
    checked = checks.get(where(node))
    if checked is None or checked.paired is None:
        return False
    return checked.incarnation == node.incarnation or now < checked.paired + policy.verdict_age


def _holds(checked: Checked | None, node: Node, now: float, policy: Policy) -> bool:
    if checked is None or now >= _old_at(checked, policy, short=False):
        return False
    if checked.state == "faulty" and checked.incarnation != node.incarnation:
        return False
    return PRECHECKS.index(checked.level) >= PRECHECKS.index(policy.precheck)


def may_join(node: Node, checks: Checks, policy: Policy) -> bool:
    if policy.precheck == "off":
        return True
    checked = checks.get(where(node))
    return node.probe is None and (checked is None or checked.state != "faulty")


def awaited(node: Node, checks: Checks, policy: Policy, *, trained: bool = False) -> float | None:
    """Until when, in job time, a round waits for its verdict; None: not at all. trained: others are here that did and
    are in no doubt, and wait for nobody but one of theirs that is."""
    if node.probe is None or policy.precheck == "off":
        return None
    if trained:
        return node.probe.since + HURRY if in_doubt(node, checks) else None
    return node.probe.since + PATIENCE[node.probe.level]


def aged(
    nodes: Nodes,
    checks: Checks,
    busy: Mapping[NodeId, Incarnation],
    now: float,
    policy: Policy,
) -> tuple[Node, ...]:
    """Those that wait, or are kept out, by a verdict that is old: to be probed again. busy: lives
    that train, or are being tested with one another."""
    idle, short = _idle(nodes, checks, busy, policy), _short(nodes, checks, policy)
    return tuple(node for node, one in idle if now >= _old_at(one, policy, short=short))


def next_due(
    nodes: Nodes, checks: Checks, busy: Mapping[NodeId, Incarnation], policy: Policy
) -> float | None:
    """When the next of them is."""
    idle, short = _idle(nodes, checks, busy, policy), _short(nodes, checks, policy)
    return min((_old_at(one, policy, short=short) for _, one in idle), default=None)


def _old_at(checked: Checked, policy: Policy, *, short: bool) -> float:
    """In job time. Twice as late each time that its tests with others, for which those stop, end in the same way; soon
    where nobody can train without it, as where all nodes lost a file system for a minute."""
    again = max(checked.failed - 1, 0)
    if short and checked.state == "faulty":
        return checked.at + min(SOON * (1 << min(again, SOONER)), policy.verdict_age)
    return checked.at + policy.verdict_age * (1 << min(again, DOUBLED))


def _short(nodes: Nodes, checks: Checks, policy: Policy) -> bool:
    """Whether fewer than the least are here and not kept out."""
    here = (n for n in nodes.values() if n.state is NodeState.ATTACHED and not n.draining)
    fit = sum((one := checks.get(where(n))) is None or one.state != "faulty" for n in here)
    return fit < policy.min_nodes


def _idle(
    nodes: Nodes, checks: Checks, busy: Mapping[NodeId, Incarnation], policy: Policy
) -> Iterator[tuple[Node, Checked]]:
    for node, checked in _here(nodes, checks, policy):
        if checked.state == "faulty" or busy.get(node.node_id) != node.incarnation:
            yield node, checked


def describe(nodes: Nodes, checks: Checks, policy: Policy) -> str:
    """Who is kept out, in words; empty: nobody."""
    here = _here(nodes, checks, policy)
    out = [f"{n.node_id} is kept out: {one.what}" for n, one in here if one.state == "faulty"]
    return "; ".join([*out[:3], *[f"{len(out) - 3} more are"] * (len(out) > 3)])


def unfit(nodes: Nodes, checks: Checks, policy: Policy) -> dict[NodeId, str]:
    """Whose machine is at fault, by a verdict that names it, and what it is. Nobody's where more are kept out than are
    fine: what most fail by is hardly the machines'. Of a job of one node there is nobody to compare it with."""
    here = [*_here(nodes, checks, policy)]
    out = [(node.node_id, one) for node, one in here if one.state == "faulty"]
    if 2 * len(out) > len(here) and policy.max_nodes > 1:
        return {}
    return {node_id: one.what for node_id, one in out if not one.between}


def fault(node: Node, checks: Checks) -> str:
    """What keeps it out; empty: nothing."""
    checked = checks.get(where(node))
    return checked.what if checked is not None and checked.state == "faulty" else ""


def _here(nodes: Nodes, checks: Checks, policy: Policy) -> Iterator[tuple[Node, Checked]]:
    """Those that are here to stay and not being probed, with what is known of them."""
    if policy.precheck == "off":
        return
    for key, checked in checks.items():
        node = nodes.get(checked.node_id)
        if node is None or node.state is not NodeState.ATTACHED or node.draining:
            continue
        if node.probe is None and where(node) == key:
            yield node, checked

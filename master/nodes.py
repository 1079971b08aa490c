"""Who is alive. A node is lost only on evidence: a refused knock, a guardian that does not bring
its agent back in time, or a lease that ran out while knocks went unanswered. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic.master.events import Attachment, Incarnation, KnockAnswer, NodeId
from elastic.master.policy import Policy


class NodeState(StrEnum):
    ATTACHED = "attached"
    UNREACHABLE = "unreachable"
    """Its stream ended; what runs there may well be training."""
    RESTARTING = "restarting"
    """Its agent died, and its ranks with it; the guardian is bringing it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Nodes that are tested two by two."""

    prefix: str
    """Of what they keep in stores."""
    nodes: tuple[NodeId, ...]
    pairs: tuple[tuple[NodeId, NodeId], ...]
    """In the order in which they are tested."""
    stores: tuple[str, ...] = ()
    """host:port at which each pair meets, of one of its two."""
    device: str
    """cpu or cuda."""
    devices: int
    """Of each node that take part."""
    deadline: float
    """Seconds that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A node is asked to try itself."""

    number: int
    level: str
    since: float
    """In job time."""
    pairs: Pairs | None = None
    """With whom; None: by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: NodeId
    incarnation: Incarnation
    slots: int
    host: str
    knock_address: str
    role: str
    labels: tuple[tuple[str, str], ...]
    node_rank: int | None
    store: str
    """Address of its unused store; empty while it makes a new one."""
    used_store: str = ""
    """Address of the store that a round took last, until it names another."""
    state: NodeState
    joined: float
    """When this life of its agent came, in job time."""
    changed: float
    """When its state began, in job time."""
    heard: float
    """When it last gave a sign of life, in job time."""
    asked: bool = False
    """Someone was sent to knock since it fell silent."""
    unanswered: int = 0
    """Knocks in a row since it was last heard that nobody answered."""
    with_most: bool = False
    """It fell silent with most of the others: it is rather the way from here that broke. Their ranks
    train on, and would all stop for nothing, so it gets longer; who refuses a knock is lost at once."""
    draining: bool = False
    why: str = ""
    """It drains, where that is not simply asked for."""
    prepared: bool = False
    """It has a standby, or needs none."""
    probe: Probe | None = None
    """What it is asked, until it answers."""

    def lease(self, policy: Policy) -> float:
        """Seconds of silence after which it is lost."""
        return policy.lease * (PATIENCE_WITH_MOST if self.with_most else 1)

    def deadline(self, policy: Policy) -> float | None:
        """When it is lost if nothing is heard of it; None: not by time alone.

        A master with thousands to hear and to knock at is late with both, so its silence is no
        evidence of its own, and one knock may be lost on the way.
        """
        if self.state is NodeState.UNREACHABLE:
            return self.heard + self.lease(policy) if self.unanswered >= SILENT_KNOCKS else None
        if self.state is NodeState.RESTARTING:
            return self.changed + policy.agent_restart
        return None

    def awaited(self, policy: Policy, now: float) -> float | None:
        """Until when a round waits for it: one that answers knocks may still never attach."""
        if self.state is NodeState.UNREACHABLE:
            until = self.changed + self.lease(policy)
            judged = self.heard > self.changed or self.unanswered >= SILENT_KNOCKS
            return until if judged else max(until, now + policy.settle)
        return None  # its ranks are gone, and its agent starts cold: it is a newcomer when it comes

    def knock_due(self, policy: Policy) -> float | None:
        """When to knock, where no stream's end was a reason to: after a master's restart."""
        if self.state is NodeState.UNREACHABLE and not self.asked:
            return self.changed + policy.settle
        return None


Nodes = Mapping[NodeId, Node]

Spent = tuple[tuple[NodeId, Incarnation, str], ...]
"""Stores that rounds took from lives of nodes that are not here now, oldest first."""

KEEP_SPENT = 256

SILENT_KNOCKS = 2
"""Knocks in a row without an answer after which silence counts."""

PATIENCE_WITH_MOST = 6
"""Leases that nodes get where more than half of them fall silent at once."""


def attach(
    nodes: Nodes, spent: Spent, arrivals: tuple[Attachment, ...], now: float
) -> tuple[dict[NodeId, Node], Spent]:
    """Take nodes in, new or back."""
    table = dict(nodes)
    taken = {(node_id, incarnation): store for node_id, incarnation, store in spent}
    for arrival in arrivals:
        known = table.get(arrival.node_id)
        same = known is not None and known.incarnation == arrival.incarnation
        if known and not same:
            spent = spend(spent, (known,))
            taken[known.node_id, known.incarnation] = known.used_store
        node = Node(
            node_id=arrival.node_id,
            incarnation=arrival.incarnation,
            slots=arrival.slots,
            host=arrival.host,
            knock_address=arrival.knock_address,
            role=arrival.role,
            labels=arrival.labels,
            node_rank=arrival.node_rank,
            store=known.store if same and known else "",
            used_store=known.used_store
            if same and known
            else taken.get((arrival.node_id, arrival.incarnation), ""),
            state=NodeState.ATTACHED,
            joined=known.joined if same and known else now,
            changed=now,
            heard=now,
            draining=known.draining if known else False,
            why=known.why if known else "",
            prepared=known.prepared if same and known else False,
            probe=known.probe if same and known else None,
        )
        table[arrival.node_id] = with_store(node, arrival.store)
    return table, spent


def spend(spent: Spent, gone: Iterable[Node]) -> Spent:
    """Remember the used stores of nodes that go: one may come back without having heard of it."""
    more = tuple((n.node_id, n.incarnation, n.used_store) for n in gone if n.used_store)
    return (*spent, *more)[-KEEP_SPENT:] if more else spent


def with_store(node: Node, address: str) -> Node:
    """It says which store it keeps ready.

    One that a round took is no spare, however often it is said: an agent whose stream broke may
    attach again before it has heard of that round. A small port range makes addresses come back,
    but only after another was named.
    """
    if address == node.store or (address and address == node.used_store):
        return node
    return replace(node, store=address, used_store="" if address else node.used_store)


def take_store(node: Node) -> Node:
    """A round uses its store."""
    return replace(node, store="", used_store=node.store)


def silent(node: Node, now: float, *, asked: bool) -> Node:
    """Nothing is heard of it from now on; its lease begins."""
    away = replace(node, state=NodeState.UNREACHABLE, changed=now, asked=asked)
    return _heard(away, now)


def silent_anew(nodes: Nodes, now: float) -> dict[NodeId, Node]:
    """The leases of all that are unreachable start anew."""
    return {
        key: silent(node, now, asked=node.asked) if node.state is NodeState.UNREACHABLE else node
        for key, node in nodes.items()
    }


def patient(nodes: Nodes, now: float, policy: Policy) -> Nodes:
    """Note who falls silent while most are silent, until most are back; the others are to be heard
    any moment then. The very table that went in if that changes nothing.
    """
    silent = [node for node in _away(nodes) if node.state is NodeState.UNREACHABLE]
    if len(nodes) > 2 and 2 * len(silent) > len(nodes):
        recent = (n for n in silent if not n.with_most and now < n.heard + policy.lease)
        changed = {node.node_id: replace(node, with_most=True) for node in recent}
    else:
        noted = (node for node in silent if node.with_most)
        changed = {n.node_id: replace(n, with_most=False, unanswered=0) for n in noted}
    return {**nodes, **changed} if changed else nodes


def _heard(node: Node, now: float) -> Node:
    return replace(node, heard=now, unanswered=0)


def knocked(node: Node, answer: KnockAnswer, now: float) -> Node | None:
    """What an answer says of a node whose stream ended; None: it is gone."""
    if node.state is not NodeState.UNREACHABLE:
        return node
    if answer is KnockAnswer.GONE:
        return None
    if answer is KnockAnswer.RESTARTING:
        return replace(node, state=NodeState.RESTARTING, changed=now, heard=now)
    if answer is KnockAnswer.ALIVE:
        return _heard(node, now)
    if node.unanswered >= SILENT_KNOCKS:
        return node
    return replace(node, unanswered=node.unanswered + 1)


def with_node(nodes: Nodes, node: Node) -> dict[NodeId, Node]:
    return {**nodes, node.node_id: node}


def without(nodes: Nodes, gone: Collection[NodeId]) -> dict[NodeId, Node]:
    return {key: node for key, node in nodes.items() if key not in gone}


def expired(nodes: Nodes, now: float, policy: Policy) -> tuple[Node, ...]:
    """Those whose time to answer is over."""
    return tuple(
        node
        for node in _away(nodes)
        if (deadline := node.deadline(policy)) is not None and now >= deadline
    )


def to_knock_at(nodes: Nodes, now: float, policy: Policy) -> tuple[Node, ...]:
    """Those that stayed silent, and that nobody was sent to."""
    return tuple(
        node for node in _away(nodes) if (due := node.knock_due(policy)) is not None and now >= due
    )


def next_deadline(nodes: Nodes, policy: Policy) -> float | None:
    """When time alone will tell something of a node."""
    times = [
        time
        for node in _away(nodes)
        for time in (node.deadline(policy), node.knock_due(policy))
        if time is not None
    ]
    return min(times, default=None)


def _away(nodes: Nodes) -> list[Node]:
    """Few of thousands, so nothing else is asked of the others."""
    attached = NodeState.ATTACHED
    return [node for node in nodes.values() if node.state is not attached]

"""Who is alive. A node is lost only on evidence: a refused knock, a guardian that does not bring
its agent back in time, or a lease that ran out in silence. Pure.
"""

from collections.abc import Mapping
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
    state: NodeState
    joined: float
    """When this incarnation first attached, in job time."""
    changed: float
    """When its state was last confirmed, in job time."""
    draining: bool = False

    def deadline(self, policy: Policy) -> float | None:
        """When it is lost if nothing is heard of it."""
        if self.state is NodeState.UNREACHABLE:
            return self.changed + policy.lease
        if self.state is NodeState.RESTARTING:
            return self.changed + policy.agent_restart
        return None


Nodes = Mapping[NodeId, Node]


def attach(nodes: Nodes, arrivals: tuple[Attachment, ...], now: float) -> dict[NodeId, Node]:
    """Take nodes in, new or back; one that comes with its old incarnation keeps its age."""
    table = dict(nodes)
    for arrival in arrivals:
        known = table.get(arrival.node_id)
        same = known is not None and known.incarnation == arrival.incarnation
        table[arrival.node_id] = Node(
            node_id=arrival.node_id,
            incarnation=arrival.incarnation,
            slots=arrival.slots,
            host=arrival.host,
            knock_address=arrival.knock_address,
            role=arrival.role,
            labels=arrival.labels,
            node_rank=arrival.node_rank,
            store=arrival.store,
            state=NodeState.ATTACHED,
            joined=known.joined if same and known else now,
            changed=now,
            draining=known.draining if known else False,
        )
    return table


def knocked(node: Node, answer: KnockAnswer, now: float) -> Node | None:
    """What an answer says of a node whose stream ended; None: it is gone."""
    if node.state is not NodeState.UNREACHABLE:
        return node
    if answer is KnockAnswer.GONE:
        return None
    if answer is KnockAnswer.RESTARTING:
        return replace(node, state=NodeState.RESTARTING, changed=now)
    if answer is KnockAnswer.ALIVE:
        return replace(node, changed=now)
    return node


def with_node(nodes: Nodes, node: Node) -> dict[NodeId, Node]:
    return {**nodes, node.node_id: node}


def without(nodes: Nodes, node_id: NodeId) -> dict[NodeId, Node]:
    return {key: node for key, node in nodes.items() if key != node_id}


def expired(nodes: Nodes, now: float, policy: Policy) -> tuple[Node, ...]:
    """Those whose time to answer is over."""
    return tuple(
        node
        for node in nodes.values()
        if (deadline := node.deadline(policy)) is not None and now >= deadline
    )


def next_deadline(nodes: Nodes, policy: Policy) -> float | None:
    deadlines = [d for node in nodes.values() if (d := node.deadline(policy)) is not None]
    return min(deadlines, default=None)

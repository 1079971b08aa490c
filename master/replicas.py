"""Which node keeps a second copy of whose images. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.master.events import NodeId
from elastic.master.holdings import Holdings, Member, whole
from elastic.proto.moment import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """A moment that is being replicated."""

    moment: Moment
    copies: Mapping[NodeId, Mapping[int, NodeId]]
    """Which ranks' images each node gets, and from which one."""
    units: int
    """How many different ones the whole state has."""


def partners(members: Sequence[Member]) -> dict[NodeId, NodeId]:
    """Who keeps each node's replicas: one each, in another failure domain wherever that is possible.

    The domain is the innermost label that nodes share. With the nodes in the order of their domains,
    a step as long as the largest domain leads out of each, if none has more than half of the nodes.
    """
    label = _domain(members)

    def domain(member: Member) -> tuple[str, str]:
        labels = dict(member.labels)
        return (labels[label], "") if label in labels else ("", member.node_id)

    order = sorted(members, key=domain)
    count = len(order)
    step = max(Counter(map(domain, members)).values(), default=0) % count if count else 0
    return {
        member.node_id: order[(index + (step or 1)) % count].node_id
        for index, member in enumerate(order)
    }


def _domain(members: Sequence[Member]) -> str:
    """The label with the most values among those that some nodes share; empty: each is its own."""
    values: dict[str, set[str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for member in members:
        for key, value in member.labels:
            values.setdefault(key, set()).add(value)
            counts[key, value] += 1
    shared = {key for (key, _), count in counts.items() if count > 1 and len(values[key]) > 1}
    return max(shared, key=lambda key: (len(values[key]), key), default="")


def plan(moment: Moment, holdings: Holdings, members: Sequence[Member]) -> Copying:
    """The copies without which the loss of one node would lose a part of a whole moment.

    None are made of a node whose units are elsewhere as well: what ranks keep equal needs no replica.
    """
    units = Counter(unit for holding in holdings.values() for unit in holding.units)
    images = Counter(rank for holding in holdings.values() for rank in holding.ranks)
    copies: dict[NodeId, dict[int, NodeId]] = {}
    partner = partners(members)
    for node_id, holding in holdings.items():
        if node_id not in partner or all(units[unit] > 1 for unit in holding.units):
            continue
        for rank in sorted(holding.ranks):
            if images[rank] == 1:
                copies.setdefault(partner[node_id], {})[rank] = node_id
    return Copying(moment=moment, copies=copies, units=len(units))


def safe(holdings: Holdings) -> bool:
    """The whole state is in memory, and would be without any one node."""
    units = Counter(unit for holding in holdings.values() for unit in holding.units)
    return whole(holdings) > 0 and min(units.values()) > 1


def done(copying: Copying, holdings: Holdings) -> bool:
    return all(
        node_id in holdings and copies.keys() <= holdings[node_id].ranks
        for node_id, copies in copying.copies.items()
    )

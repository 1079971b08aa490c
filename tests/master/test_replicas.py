"""Who keeps whose replicas: no loss of one node takes a whole moment away, and no copy is for nothing."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.master import holdings as held
from elastic.master.events import NodeId
from elastic.master.holdings import Holding, Member
from elastic.master.replicas import Copying, done, partners, plan, safe
from elastic.proto.moment import Moment

AT = Moment(1, 5)
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def members(domains: list[str | None], label: str = "rack") -> list[Member]:
    """One rank each; None: it has no label."""
    return [
        Member(NodeId(f"n{i}"), range(i, i + 1), () if domain is None else ((label, domain),))
        for i, domain in enumerate(domains)
    ]


@given(st.lists(st.sampled_from([None, "a", "b", "c", "n0", "n1"]), max_size=12))
def test_each_node_keeps_one_others_in_another_domain_wherever_there_is_one(
    domains: list[str | None],
) -> None:
    nodes = members(domains)
    found = partners(nodes)
    assert sorted(found) == sorted(found.values()) == sorted(node.node_id for node in nodes)
    if len(nodes) < 2:
        return
    assert all(node_id != partner for node_id, partner in found.items())
    sizes = Counter(domain for domain in domains if domain is not None)
    if len(sizes) > 1 and max(sizes.values()) * 2 <= len(nodes):
        where = {node.node_id: dict(node.labels).get("rack", node.node_id) for node in nodes}
        labelled = {node.node_id for node in nodes if node.labels}
        for node_id, partner in found.items():
            assert not {node_id, partner} <= labelled or where[node_id] != where[partner]


def test_the_innermost_label_that_nodes_share_is_the_domain() -> None:
    labels = [
        (("host", str(i)), ("rack", str(i // 2)), ("zone", str(i // 4)), ("os", "linux"))
        for i in range(8)
    ]
    nodes = [Member(NodeId(str(i)), range(i, i + 1), label) for i, label in enumerate(labels)]
    assert all(int(a) // 2 != int(b) // 2 for a, b in partners(nodes).items())


@st.composite
def moments(
    draw: st.DrawFn,
) -> tuple[list[Member], list[frozenset[int]], dict[NodeId, frozenset[int]]]:
    """A whole moment: the units of each rank's image, which others may have as well, and the ranks
    whose images each node has; some are on two nodes already."""
    counts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    world = sum(counts)
    units = [draw(st.frozensets(st.integers(0, 8), min_size=1, max_size=4)) for _ in range(world)]
    nodes, images, first = [], {}, 0
    for index, count in enumerate(counts):
        nodes.append(Member(NodeId(f"n{index}"), range(first, first + count)))
        more = draw(st.frozensets(st.integers(0, world - 1), max_size=2))
        images[nodes[-1].node_id] = frozenset(range(first, first + count)) | more
        first += count
    return nodes, units, images


def holding(units: list[frozenset[int]], ranks: frozenset[int], all_units: int = 0) -> Holding:
    found = frozenset(unit for rank in ranks for unit in units[rank])
    return Holding(world_size=len(units), ranks=ranks, units=found, all_units=all_units)


@given(moments())
def test_once_all_copies_are_made_any_one_node_may_be_lost(
    made: tuple[list[Member], list[frozenset[int]], dict[NodeId, frozenset[int]]],
) -> None:
    nodes, units, images = made
    before = {node_id: holding(units, ranks) for node_id, ranks in images.items()}
    copying = plan(AT, before, nodes)
    assert done(copying, before) == (not copying.copies)
    assert bool(copying.copies) != safe(before)
    after = dict(images)
    for node_id, copies in copying.copies.items():
        assert not copies.keys() & images[node_id], "a copy of what is there already"
        for rank, source in copies.items():
            assert rank in images[source], "nothing to copy from"
        after[node_id] |= copies.keys()
    copied = {node_id: holding(units, ranks) for node_id, ranks in after.items()}
    assert done(copying, copied)
    assert safe(copied)
    for lost in after:
        left = {k: holding(units, v, copying.units) for k, v in after.items() if k != lost}
        assert held.whole(left) == copying.units, f"without {lost}"


def test_what_ranks_keep_equal_needs_no_replica() -> None:
    nodes = members([None, None])
    equal = {
        n.node_id: Holding(world_size=2, ranks=frozenset(n.ranks), units=frozenset({7}))
        for n in nodes
    }
    assert plan(AT, equal, nodes) == Copying(moment=AT, copies={}, units=1)
    assert safe(equal)
    own = {k: replace(h, units=h.units | {8 + i}) for i, (k, h) in enumerate(equal.items())}
    n0, n1 = equal
    assert plan(AT, own, nodes).copies == {n1: {0: n0}, n0: {1: n1}}


def test_what_is_not_all_there_is_not_safe() -> None:
    part = Holding(world_size=2, ranks=frozenset({0}), units=frozenset({1}))
    assert not safe({A: part, B: part})
    assert safe({A: replace(part, all_units=1), B: part})
    assert not safe({})


def test_copies_are_done_once_each_is_where_it_was_to_be() -> None:
    copying = Copying(moment=AT, copies={A: {1: B}, B: {0: A}}, units=2)
    both = Holding(world_size=2, ranks=frozenset({0, 1}))
    assert not done(copying, {})
    assert not done(copying, {A: both, C: both})
    assert not done(copying, {A: both, B: replace(both, ranks=frozenset({1}))})
    assert done(copying, {A: both, B: both})

"""What a round finds in which memory: enough for each node, and nothing that is not there."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from elastic.master import holdings as held
from elastic.master.events import Incarnation, NodeId
from elastic.master.holdings import Holding, Images, Member, Said, Source
from elastic.proto.moment import Moment

AT = Moment(1, 5)


def said(
    name: str, ranks: set[int], *nodes: range, of: int, units: set[int] | None = None, base: bool = True
) -> Said:  # fmt: skip
    """A node with these ranks' images, each a unit of its own unless told otherwise."""
    holding = Holding(
        world_size=of,
        ranks=frozenset(ranks),
        nodes=nodes,
        units=frozenset(ranks if units is None else units),
    )
    holdings = {AT: holding} if ranks else {}
    return Said(
        node_id=NodeId(name),
        incarnation=Incarnation(1),
        holdings=holdings,
        base=f"http://{name}" if base else "",
    )


def nodes(*all_said: Said) -> Mapping[NodeId, Said]:
    return {one.node_id: one for one in all_said}


def member(name: str, *ranks: int) -> Member:
    return Member(NodeId(name), range(ranks[0], ranks[-1] + 1))


def lacks(all_said: Mapping[NodeId, Said], one: Member, world_size: int) -> set[int]:
    return set(Images(all_said, AT).missing(one, world_size))


A01 = said("a", {0, 1}, range(2), of=4)
B23 = said("b", {2, 3}, range(2, 4), of=4)


def test_the_same_nodes_lack_nothing() -> None:
    both = nodes(A01, B23)
    assert lacks(both, member("a", 0, 1), 4) == lacks(both, member("b", 2, 3), 4) == set()
    assert held.sources(both, AT, [member("a", 0, 1), member("b", 2, 3)]) == {}


def test_ranks_that_change_places_lack_what_they_were() -> None:
    both = nodes(A01, B23)
    assert held.sources(both, AT, [member("b", 0, 1), member("a", 2, 3)]) == {
        "b": (Source("http://a", (0, 1), needed=True),),
        "a": (Source("http://b", (2, 3), needed=True),),
    }


def test_who_saved_together_is_loaded_together() -> None:
    """Of what the ranks of a node hold equal each has a share: 2 nodes of 4, then 4 of 2."""
    a, b = said("a", {0, 1, 2, 3}, range(4), of=8), said("b", {4, 5, 6, 7}, range(4, 8), of=8)
    both = nodes(a, b)
    assert lacks(both, member("a", 0, 1), 8) == set()
    assert lacks(both, member("c", 2, 3), 8) == {0, 1, 2, 3}
    assert lacks(both, member("b", 4, 5), 8) == set()
    assert lacks(both, member("d", 6, 7), 8) == {4, 5, 6, 7}
    four = nodes(
        *(said(n, {2 * i, 2 * i + 1}, range(2 * i, 2 * i + 2), of=8) for i, n in enumerate("abcd"))
    )
    assert lacks(four, member("a", 0, 3), 8) == {2, 3}
    assert lacks(four, member("x", 4, 7), 8) == {4, 5, 6, 7}


def test_another_world_needs_all_that_is_not_equal() -> None:
    both = nodes(A01, B23)
    assert lacks(both, member("a", 0, 1), 6) == {2, 3}
    assert lacks(both, member("c", 4, 5), 6) == {0, 1, 2, 3}
    equal = nodes(
        said("a", {0, 1}, range(2), of=4, units={7, 8}),
        said("b", {2, 3}, range(2, 4), of=4, units={7, 8}),
    )
    assert lacks(equal, member("a", 0, 1), 6) == set()
    assert lacks(equal, member("c", 4, 5), 6) in ({0, 1}, {2, 3})


def test_equal_images_make_up_for_a_lost_node() -> None:
    left = nodes(said("a", {0}, range(1), of=2, units={7}))
    assert lacks(left, member("a", 0), 2) == set()
    assert lacks(left, member("c", 1), 2) == {0}


def test_replicas_stand_in_for_a_lost_node_and_are_second_copies_before() -> None:
    a = said("a", {0, 1}, range(1), range(1, 2), of=3)
    b = said("b", {1, 2}, range(1, 2), range(2, 3), of=3)
    c = said("c", {2, 0}, range(2, 3), range(1), of=3)
    assert held.sources(nodes(a, b, c), AT, [member(n, i) for i, n in enumerate("abc")]) == {
        "a": (Source("http://c", (0,), needed=False),),
        "b": (Source("http://a", (1,), needed=False),),
        "c": (Source("http://b", (2,), needed=False),),
    }
    lost = nodes(b, c, said("d", set(), of=3))
    assert held.sources(lost, AT, [member(n, i) for i, n in enumerate("dbc")]) == {
        "d": (Source("http://c", (0,), needed=True),),
        "c": (Source("http://b", (2,), needed=False),),
    }


def test_who_does_not_serve_yet_is_waited_for_only_by_those_who_need_it() -> None:
    both = nodes(A01, said("b", {2, 3}, range(2, 4), of=4, base=False))
    same = [member("a", 0, 1), member("b", 2, 3)]
    assert held.sources(both, AT, same) == {}
    assert held.sources(both, AT, [member("a", 0, 1), member("c", 2, 3)]) is None


@given(st.data())
def test_with_its_sources_every_node_has_the_whole_of_what_its_ranks_need(
    data: st.DataObject,
) -> None:
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    world, first, spans = sum(counts), 0, []
    for count in counts:
        spans.append(range(first, first + count))
        first += count
    shared = data.draw(st.frozensets(st.integers(100, 102)))
    units = [{rank, *(shared if data.draw(st.booleans()) else ())} for rank in range(world)]
    there = []
    for index, span in enumerate(spans):
        more = data.draw(st.sets(st.integers(0, world - 1), max_size=2))
        ranks = {*span, *more} if data.draw(st.integers(0, 3)) else more
        with_ranks = [s for s in spans if ranks & set(s)]
        mine = {u for r in ranks for u in units[r]}
        there.append(said(f"n{index}", ranks, *with_ranks, of=world, units=mine))
    everywhere = nodes(*there)
    all_units = {u for one in there for h in one.holdings.values() for u in h.units}
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    first, members = 0, []
    for index, size in enumerate(sizes):
        members.append(
            Member(
                NodeId(f"n{index + data.draw(st.integers(0, 1)) * 10}"), range(first, first + size)
            )
        )
        first += size
    if len({one.node_id for one in members}) < len(members):
        return
    found = held.sources(everywhere, AT, members)
    assert found is not None, "all serve"
    for one in members:
        holding = held.of(everywhere, AT).get(one.node_id, Holding(world_size=0))
        images = set(holding.ranks)
        for source in found.get(one.node_id, ()):
            server = NodeId(source.base.removeprefix("http://"))
            assert server != one.node_id
            assert set(source.ranks) <= everywhere[server].holdings[AT].ranks
            assert not source.needed or not holding.ranks & set(source.ranks)
            images |= set(source.ranks) if source.needed else set()
        together = {r for s in spans if set(s) & set(one.ranks) for r in s} | set(one.ranks)
        if first == world and together <= {
            r for h in held.of(everywhere, AT).values() for r in h.ranks
        }:
            assert together <= images
        else:
            assert {u for r in images for u in units[r]} == all_units

"""Who gets which place."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic.master.events import NodeId
from elastic.master.policy import Policy
from elastic.master.rendezvous import Candidate, Plan, Seat, could_grow, decide

LATER = 1000.0


def here(*names: str, slots: int = 1, since: float = 0.0) -> list[Candidate]:
    return [Candidate(node_id=NodeId(name), slots=slots, since=since) for name in names]


def seats(*names: str, ranks: int = 1) -> tuple[Seat, ...]:
    return tuple(Seat(node_id=NodeId(name), ranks=ranks) for name in names)


def form(
    candidates: list[Candidate], last: tuple[Seat, ...] = (), unit: int = 1, **policy: Any
) -> Plan:
    policy.setdefault("max_nodes", 1000)
    return decide(last, candidates, (), LATER, unit, Policy(**policy))


def names(plan: Plan) -> list[str]:
    return [seat.node_id for seat in plan.seats]


def ranks(plan: Plan) -> list[int]:
    return [seat.ranks for seat in plan.seats]


@pytest.mark.parametrize(
    ("slots", "policy", "unit", "expected"),
    [
        ([8, 8, 8], {}, 1, [8, 8, 8]),
        ([8, 8, 8], {"max_nodes": 2}, 1, [8, 8]),
        ([8, 8, 8], {"node_unit": 2}, 1, [8, 8]),
        ([8, 8, 8], {"min_nodes": 4}, 1, []),
        ([8, 8, 8], {"rank_unit": 16}, 1, [8, 8]),
        ([4, 4, 4], {"rank_unit": 8}, 1, [4, 4]),
        ([4, 4, 4], {"rank_unit": 5}, 1, [4, 4, 2]),
        ([4, 4, 4], {"rank_unit": 2}, 3, [4, 4, 4]),
        ([4, 4], {"rank_unit": 2}, 3, [4, 2]),
        ([1, 1, 1], {"rank_unit": 4}, 1, []),
        ([1, 1, 1], {}, 64, []),
        ([8, 8, 8], {"node_unit": 2, "rank_unit": 8}, 1, [8, 8]),
        ([4, 2], {"rank_unit": 4}, 1, [4]),
        ([4, 2], {"rank_unit": 4, "min_nodes": 2}, 1, [2, 2]),
        ([4, 2, 4], {"rank_unit": 4, "min_nodes": 3}, 1, [4, 2, 2]),
        ([8, 1], {"rank_unit": 8, "min_nodes": 2}, 1, [7, 1]),
        ([8, 8, 2, 2], {"rank_unit": 16, "node_unit": 4, "min_nodes": 4}, 1, [6, 6, 2, 2]),
        ([1, 1], {"min_nodes": 2, "rank_unit": 3}, 1, []),
    ],
)
def test_legal_worlds(
    slots: list[int], policy: dict[str, Any], unit: int, expected: list[int]
) -> None:
    candidates = [
        Candidate(node_id=NodeId(f"n{i}"), slots=n, since=0.0) for i, n in enumerate(slots)
    ]
    plan = form(candidates, unit=unit, **policy)
    assert ranks(plan) == expected
    assert plan.reason


@pytest.mark.parametrize(
    ("last", "present", "expected"),
    [
        ("abcd", "abcd", "abcd"),
        ("dcba", "abcd", "dcba"),
        ("abcd", "abd", "abd"),
        ("abcd", "acd", "adc"),
        ("abcd", "bcd", "dbc"),
        ("abcd", "cd", "dc"),
        ("abcd", "abxd", "abxd"),
        ("abcd", "xbyd", "xbyd"),
        ("abcd", "abcdx", "abcdx"),
        ("abcd", "bxyz", "xbyz"),
        ("abcd", "d", "d"),
        ("abcd", "xy", "xy"),
    ],
)
def test_a_node_keeps_its_place_where_it_can(last: str, present: str, expected: str) -> None:
    assert names(form(here(*present), seats(*last))) == list(expected)


@pytest.mark.parametrize(
    ("last", "present", "most", "expected"),
    [
        ("abcd", "abcdx", 4, "abcd"),
        ("abcd", "abdx", 3, "abd"),
        ("abcd", "dxy", 2, "xd"),
        ("ab", "abxy", 3, "abx"),
    ],
)
def test_who_had_a_place_goes_first(last: str, present: str, most: int, expected: str) -> None:
    assert names(form(here(*present), seats(*last), max_nodes=most)) == list(expected)


@given(
    size=st.integers(1, 12),
    gone=st.sets(st.integers(0, 11), max_size=11),
    came=st.integers(0, 11),
    most=st.integers(1, 16),
)
def test_k_departures_and_k_arrivals_move_at_most_k_nodes(
    size: int, gone: set[int], came: int, most: int
) -> None:
    gone = {i for i in gone if i < size}
    last = seats(*(f"n{i}" for i in range(size)))
    present = here(*(f"n{i}" for i in range(size) if i not in gone))
    present += here(*(f"x{i}" for i in range(came)))
    assume(present)
    assume(most >= size)
    plan = form(present, last, max_nodes=most)
    before = {seat.node_id: place for place, seat in enumerate(last)}
    moved = [
        node for place, node in enumerate(names(plan)) if before.get(NodeId(node), place) != place
    ]
    assert len(moved) <= max(0, len(gone) - came)
    assert len(plan.seats) == min(most, len(present))


def labelled(name: str, **labels: str) -> Candidate:
    return Candidate(node_id=NodeId(name), slots=1, since=0.0, labels=tuple(sorted(labels.items())))


def test_neighbours_get_neighbouring_places() -> None:
    nodes = [labelled(f"n{i}", zone=f"z{i % 2}", rack=f"r{i % 4}", host=f"h{i}") for i in range(16)]
    racks = [dict(seat.labels)["rack"] for seat in form(nodes).seats]
    zones = [dict(seat.labels)["zone"] for seat in form(nodes).seats]
    assert sum(a != b for a, b in itertools.pairwise(racks)) == 3
    assert sum(a != b for a, b in itertools.pairwise(zones)) == 1


def test_names_and_labels_count_as_people_do() -> None:
    assert names(form(here("n10", "n9", "n1"))) == ["n1", "n9", "n10"]
    nodes = [labelled("a", rack="r10"), labelled("b", rack="r9"), labelled("c", rack="r9")]
    assert names(form(nodes)) == ["b", "c", "a"]


def test_a_replacement_comes_from_the_neighbourhood() -> None:
    old = form([labelled("a", rack="r1"), labelled("b", rack="r2"), labelled("c", rack="r3")])
    present = [
        labelled("a", rack="r1"),
        labelled("c", rack="r3"),
        labelled("s1", rack="r1"),
        labelled("s2", rack="r2"),
    ]
    assert names(form(present, old.seats, max_nodes=3)) == ["a", "s2", "c"]


def test_the_user_says_where() -> None:
    nodes = [
        Candidate(node_id=NodeId(name), slots=1, since=0.0, node_rank=place)
        for name, place in (("a", 2), ("b", 0), ("c", 1))
    ]
    assert names(form(nodes)) == ["b", "c", "a"]
    again = [
        nodes[0],
        nodes[1],
        Candidate(node_id=NodeId("x"), slots=1, since=0.0),
        Candidate(node_id=NodeId("y"), slots=1, since=0.0, node_rank=1),
    ]
    assert names(form(again, form(nodes).seats, max_nodes=3)) == ["b", "y", "a"]


# Waiting.


def wait(
    candidates: list[Candidate],
    now: float,
    last: tuple[Seat, ...] = (),
    coming: tuple[tuple[str, float], ...] = (),
    **policy: Any,
) -> Plan:
    policy.setdefault("max_nodes", 4)
    expected = [(NodeId(name), until) for name, until in coming]
    return decide(last, candidates, expected, now, 1, Policy(**policy))


def test_last_call_follows_the_last_that_came() -> None:
    nodes = here("a", since=0.0) + here("b", since=0.7)
    assert wait(nodes, 1.0).until == 1.7
    assert names(wait(nodes, 1.7)) == ["a", "b"]
    assert names(wait(nodes, 1.0, max_nodes=2)) == ["a", "b"]


def test_no_last_call_for_the_same_size_again() -> None:
    nodes = here("a", "x", since=10.0)
    assert names(wait(nodes, 10.0, seats("a", "b"))) == ["a", "x"]
    assert wait(nodes, 10.0, seats("a", "b", "c")).until == 11.0, "a third may be right behind"


def test_only_those_on_their_way_are_waited_for() -> None:
    nodes = here("a", "b")
    plan = wait(nodes, 50.0, seats("a", "b", "c"), (("c", 52.0),))
    assert plan.until == 52.0
    assert plan.reason == "2 nodes here, last call for c"
    assert names(wait(nodes, 52.0, seats("a", "b", "c"), (("c", 52.0),))) == ["a", "b"]
    assert names(wait(nodes, 50.0, seats("a", "b", "c"))) == ["a", "b"]


def test_nobody_is_waited_for_who_would_not_make_the_world_larger() -> None:
    nodes = here("a", "b")
    plan = wait(nodes, 50.0, seats("a", "b", "c"), (("c", 52.0),), node_unit=2, min_nodes=2)
    assert names(plan) == ["a", "b"]


def test_too_few_says_how_many() -> None:
    plan = wait(here("a"), 50.0, (), (("b", 60.0),), min_nodes=2, node_unit=2)
    assert not plan.seats
    assert plan.until is None
    assert plan.reason == "1 of at least 2 nodes here, in units of 2; coming: b"


def test_growth() -> None:
    policy = Policy(max_nodes=4, node_unit=2)
    old = seats("a", "b")
    three = here("a", "b") + here("c", since=90.0)
    assert could_grow(old, three, 99.0, 1, policy) is None
    four = three + here("d", since=98.5)
    plan = could_grow(old, four, 99.5, 1, policy)
    assert plan is not None
    assert names(plan) == ["a", "b", "c", "d"]
    assert could_grow(old, here("a", "c", "d"), 99.0, 1, policy) is None, "b is out of reach"
    settling = could_grow(old, four, 99.0, 1, Policy(max_nodes=6))
    assert settling is not None
    assert settling.until == 99.5


@given(
    slots=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    last=st.permutations(range(12)),
    kept=st.integers(0, 12),
    unit=st.integers(1, 12),
    rank_unit=st.integers(1, 12),
    node_unit=st.integers(1, 4),
    least=st.integers(1, 12),
    more=st.integers(0, 12),
)
def test_any_world_is_legal_or_none_can_be_had(
    slots: list[int],
    last: list[int],
    kept: int,
    unit: int,
    rank_unit: int,
    node_unit: int,
    least: int,
    more: int,
) -> None:
    most = least + more
    assume(most // node_unit * node_unit >= least)
    policy = Policy(min_nodes=least, max_nodes=most, node_unit=node_unit, rank_unit=rank_unit)
    nodes = [Candidate(node_id=NodeId(f"n{i}"), slots=n, since=0.0) for i, n in enumerate(slots)]
    plan = decide(seats(*(f"n{i}" for i in last[:kept])), nodes, (), LATER, unit, policy)
    assert plan.reason
    step = math.lcm(unit, rank_unit)
    if plan.seats:
        assert least <= len(plan.seats) <= most
        assert len(plan.seats) % node_unit == 0
        assert sum(ranks(plan)) % step == 0
        assert len(set(names(plan))) == len(plan.seats)
        held = {c.node_id: c.slots for c in nodes}
        assert all(1 <= seat.ranks <= held[seat.node_id] for seat in plan.seats)
    else:  # the nodes with most slots are the best case for any size
        for size in range(node_unit, min(most, len(nodes)) + 1, node_unit):
            best = sum(sorted(slots)[:size])
            assert size < least or best // step * step < size

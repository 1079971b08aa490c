"""The tree of all ranks' stacks."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.master import tree
from elastic.master.tree import Apart, Call, Node

MAIN: Call = ("<module>", "/job/train.py", 90)
STEP: Call = ("Trainer.step", "/job/train.py", 20)
REDUCE: Call = ("all_reduce", "/lib/distributed_c10d.py", 3252)
LOAD: Call = ("__next__", "/lib/dataloader.py", 725)
LOOP: Call = ("spin", "/job/train.py", 40)

calls = st.tuples(st.sampled_from("abc"), st.sampled_from(["x.py", "y.py"]), st.integers(0, 3))
stacks = st.dictionaries(st.integers(0, 40), st.lists(calls, max_size=6).map(tuple), max_size=24)


def nodes(root: Node) -> Iterator[Node]:
    yield root
    for node in root.calls:
        yield from nodes(node)


def test_the_one_that_is_elsewhere_is_named() -> None:
    many = {rank: (REDUCE, STEP, MAIN) for rank in range(8)}
    found = tree.odd(tree.merge(many | {5: (LOOP, STEP, MAIN)}))
    assert found == Apart(ranks=(5,), call=LOOP)


def test_the_call_that_is_named_is_the_innermost_that_sets_it_apart() -> None:
    many = {rank: (REDUCE, STEP, MAIN) for rank in range(8)}
    fetch: Call = ("fetch", "/lib/fetch.py", 5)
    found = tree.odd(tree.merge(many | {2: (fetch, LOAD, MAIN)}))
    assert found == Apart(ranks=(2,), call=fetch)


def test_one_that_has_not_come_as_far_as_the_others_is_named() -> None:
    many = {rank: (REDUCE, STEP, MAIN) for rank in range(8)}
    found = tree.odd(tree.merge(many | {0: (STEP, MAIN)}))
    assert found == Apart(ranks=(0,), call=(*STEP[:2], 20))


def test_one_without_a_stack_is_apart() -> None:
    many = {rank: (REDUCE, STEP, MAIN) for rank in range(8)}
    found = tree.odd(tree.merge(many | {3: ()}))
    assert found == Apart(ranks=(3,), call=("", "", 0))


def test_a_collective_that_was_left_out_shows_by_the_line() -> None:
    later: Call = (*STEP[:2], 31)
    looks = {rank: (REDUCE, STEP, MAIN) for rank in range(4)} | {1: (REDUCE, later, MAIN)}
    assert tree.odd(tree.merge(looks)) is None
    found = tree.odd(tree.merge(looks, lines=True))
    assert found is not None
    assert found.ranks == (1,)


def test_within_a_pipelines_stages_one_is_named() -> None:
    """Half of the ranks are here, half there: neither is odd; but one among them is."""
    send, receive = ("send", "/lib/p2p.py", 1), ("recv", "/lib/p2p.py", 2)
    looks = {rank: ((send if rank < 4 else receive), STEP, MAIN) for rank in range(8)}
    assert tree.odd(tree.merge(looks)) is None
    split = {rank: (("wait", "/lib/w.py", 1), *stack) for rank, stack in looks.items()}
    found = tree.odd(tree.merge(split | {6: (LOOP, *looks[6])}))
    assert found == Apart(ranks=(6,), call=LOOP)


def test_where_everybody_is_elsewhere_or_nobody_is_nobody_is_odd() -> None:
    assert tree.odd(tree.merge({rank: (REDUCE, MAIN) for rank in range(8)})) is None
    assert tree.odd(tree.merge({0: (REDUCE, MAIN), 1: (LOAD, MAIN)})) is None
    three = {0: (REDUCE, MAIN), 1: (LOAD, MAIN), 2: (LOOP, MAIN)}
    assert tree.odd(tree.merge(three)) is None
    assert tree.odd(tree.merge({})) is None


def test_two_that_are_apart_in_two_ways_are_both_told_and_neither_is_the_odd_one() -> None:
    looks = {rank: (REDUCE, STEP, MAIN) for rank in range(8)}
    merged = tree.merge(looks | {1: (LOAD, MAIN), 2: (LOOP, STEP, MAIN)})
    assert [one.ranks for one in tree.apart(merged)] == [(1,), (2,)]
    assert tree.odd(merged) is None


def test_how_a_rank_was_started_sets_nobody_apart() -> None:
    forked: Call = ("_execute", "/venv/elastic/agent/starters/rank.py", 200)
    runpy: Call = ("run_path", "<frozen runpy>", 291)
    looks = {rank: (REDUCE, MAIN, runpy, forked) for rank in range(7)} | {7: (REDUCE, MAIN)}
    assert tree.apart(tree.merge(looks)) == ()


def test_a_bare_name_and_a_qualified_one_are_the_same_call() -> None:
    """faulthandler knows only the one, py-spy the other."""
    bare: Call = ("step", "/job/train.py", 20)
    merged = tree.merge({0: (REDUCE, STEP, MAIN), 1: (REDUCE, bare, MAIN)})
    (main,) = merged.calls
    assert [node.call for node in main.calls] == [STEP]


def test_people_read_it() -> None:
    many = {rank: (REDUCE, STEP, MAIN) for rank in (0, 1, 2, 4, 6, 7)}
    merged = tree.merge(many | {3: (STEP, MAIN), 5: (LOAD, MAIN)})
    assert tree.render(merged).splitlines() == [
        "<module> (/job/train.py:90)  [0-7]",
        "  Trainer.step (/job/train.py:20)  [0-4,6-7]",
        "    (here)  [3]",
        "    all_reduce (/lib/distributed_c10d.py:3252)  [0-2,4,6-7]",
        "  __next__ (/lib/dataloader.py:725)  [5]",
    ]


def test_ranks_in_many_places_are_counted() -> None:
    looks = {rank: ((LOAD, MAIN) if rank % 2 else (REDUCE, MAIN)) for rank in range(10_000)}
    _, even, odd = tree.render(tree.merge(looks)).splitlines()
    assert even.endswith("[0,2,4,6,8,10,12,14,16,18,20,22,... (5000 ranks)]")
    assert odd.endswith("[1,3,5,7,9,11,13,15,17,19,21,23,... (5000 ranks)]")


def test_a_deep_stack_is_read_on_one_level() -> None:
    deep = tuple((f"f{n}", "/job/train.py", n) for n in range(5_000))
    text = tree.render(tree.merge({0: deep, 1: deep}))
    assert len(text.splitlines()) <= 10
    assert "calls more" in text


@given(stacks, st.integers(2, 12))
def test_it_is_never_longer_than_asked(found: dict[int, tuple[Call, ...]], most: int) -> None:
    assert len(tree.render(tree.merge(found), most=most).splitlines()) <= most


@given(stacks, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_ranks_changes_nothing(
    found: dict[int, tuple[Call, ...]], random: Random, lines: bool
) -> None:
    shuffled = list(found.items())
    random.shuffle(shuffled)
    assert tree.merge(dict(shuffled), lines=lines) == tree.merge(found, lines=lines)


@given(stacks, st.booleans())
def test_no_rank_is_lost_and_none_is_twice(found: dict[int, tuple[Call, ...]], lines: bool) -> None:
    for node in nodes(tree.merge(found, lines=lines)):
        below = [rank for one in node.calls for rank in one.ranks] + list(node.here)
        assert sorted(below) == list(node.ranks)
    assert tree.merge(found).ranks == tuple(sorted(found))


@given(stacks, st.booleans())
def test_a_majority_is_never_odd(found: dict[int, tuple[Call, ...]], lines: bool) -> None:
    merged = tree.merge(found, lines=lines)
    told = tree.apart(merged)
    assert all(0 < 2 * len(one.ranks) < len(found) for one in told)
    if (one := tree.odd(merged)) is not None:
        assert one == told[0]
        assert all(len(one.ranks) < len(other.ranks) for other in told[1:])


@given(st.sets(st.integers(0, 60)))
def test_ranges_say_every_rank(ranks: set[int]) -> None:
    text = tree.ranges(ranks)
    said = set[int]()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        said |= set(range(int(first), int(last or first) + 1))
    assert said == ranks


@pytest.mark.parametrize(("ranks", "text"), [((), ""), ((0, 1, 2, 8), "0-2,8"), ((3,), "3")])
def test_ranges_are_short(ranks: tuple[int, ...], text: str) -> None:
    assert tree.ranges(ranks) == text


def test_ten_thousand_ranks_are_one_tree() -> None:
    below = tuple((f"f{n}", "/job/train.py", n) for n in range(60))
    many = {rank: (REDUCE, *below, MAIN) for rank in range(10_000)}
    found = tree.odd(tree.merge(many | {4_711: (LOOP, *below, MAIN)}))
    assert found == Apart(ranks=(4_711,), call=LOOP)

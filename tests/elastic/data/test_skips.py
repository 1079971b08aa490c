import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data import Leaves, Skips
from elastic.proto.errors import UsageError

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)


@given(ranges=RANGES)
def test_the_samples_of_a_run_are_the_places_that_are_left(ranges: list[tuple[int, int]]) -> None:
    skips = Skips.of(ranges)
    out = {place for first, end in ranges for place in range(first, end)}
    left = [place for place in range(200) if place not in out]
    assert skips.places(np.arange(100)).tolist() == left[:100]
    assert [skips.place(number) for number in range(100)] == left[:100]
    assert skips.before(99) == skips.count == len(out)


@given(ranges=RANGES)
def test_ranges_add_up_in_any_order(ranges: list[tuple[int, int]]) -> None:
    one = Skips()
    for first, end in reversed(ranges):
        one = one.add(first, end)
    assert one == Skips.of(ranges)
    for (_, before), (first, _) in zip(one.ranges, one.ranges[1:], strict=False):
        assert before < first


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_batch_is_the_same_for_any_world(size: int) -> None:
    skips, leaves = Skips().add(10, 20), Leaves(batch_size=12, leaf_size=2)
    found = [
        place
        for rank in range(size)
        for leaf in leaves.of(4, rank, size)
        if leaf.weight
        for place in skips.places(leaf.places).tolist()
    ]
    assert sorted(found) == [4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize("ranges", [((3, 3),), ((5, 8), (2, 4)), ((1, 4), (4, 6))])
def test_ranges_that_are_none_are_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(UsageError, match="in order"):
        Skips(ranges=ranges)

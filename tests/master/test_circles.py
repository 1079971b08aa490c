"""Circles of a small graph, against what each of its members can reach."""

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from elastic.master.circles import Waits, circles


@given(st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 5))))
def test_what_is_left_of_a_graph_is_in_circles_or_between_two(graph: dict[int, set[int]]) -> None:
    waits: Waits = {one: graph.get(one, set()) for one in range(6)}

    def behind(one: Hashable) -> set[Hashable]:
        found: set[Hashable] = set()
        left = [*waits[one]]
        while left:
            if (other := left.pop()) not in found:
                found.add(other)
                left += waits[other]
        return found

    within = {one for one in waits if one in behind(one)}
    after = {one for first in within for one in behind(first)}
    before = {one for one in waits if behind(one) & within}
    assert circles(waits) == after & before

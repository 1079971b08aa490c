"""What ranks have left out: the same moments, whatever the spans in which they are told."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.moment import MOST_SPANS, Moment, Span, merged

SPANS = st.builds(
    lambda round_, first, more: Span(round_, first, first + more),
    st.integers(1, 2), st.integers(1, 30), st.integers(0, 5),
)  # fmt: skip


@given(st.lists(SPANS, max_size=MOST_SPANS))
def test_merged_spans_have_the_same_moments_and_are_apart(spans: list[Span]) -> None:
    found = merged(spans)
    for moment in (Moment(round_, step) for round_ in (1, 2) for step in range(40)):
        had = any(span.has(moment) for span in spans)
        assert sum(span.has(moment) for span in found) == had
    assert list(found) == sorted(found)
    for one, other in itertools.pairwise(found):
        assert one.round < other.round or one.last + 1 < other.first


def test_the_newest_are_named() -> None:
    spans = [Span(1, 2 * n, 2 * n) for n in range(40)]
    assert merged(spans) == tuple(spans[-MOST_SPANS:])

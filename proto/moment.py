"""When a snapshot was taken."""

from collections.abc import Iterable
from typing import NamedTuple

MOST_SPANS = 16
"""That one message names, the newest."""


class Moment(NamedTuple):
    """A later round goes on from where its load put it, so whatever an earlier one has beyond that is
    void: moments are in the order of time, steps are not."""

    round: int
    step: int


class Span(NamedTuple):
    """Steps of a round that some rank has left out, from one to another: none of them is ever whole."""

    round: int
    first: int
    last: int

    def has(self, moment: Moment) -> bool:
        return moment.round == self.round and self.first <= moment.step <= self.last


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """All these steps, in as few spans, in order; the newest `MOST_SPANS`."""
    found: list[Span] = []
    for span in sorted(spans):
        last = found[-1] if found else None
        if last is not None and last.round == span.round and span.first <= last.last + 1:
            found[-1] = Span(span.round, last.first, max(last.last, span.last))
        else:
            found.append(span)
    return tuple(found[-MOST_SPANS:])

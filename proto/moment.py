"""When a snapshot was taken."""

from typing import NamedTuple


class Moment(NamedTuple):
    """A later round goes on from where its load put it, so whatever an earlier one has beyond that is
    void: moments are in the order of time, steps are not."""

    round: int
    step: int

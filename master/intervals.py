"""What ranks tell of an interval of some steps: plain frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A rank's place in a round."""

    node: str
    peers: str
    """Key of those who do the same work, and are compared: of a pipeline a stage, of other jobs all."""
    group: str
    """Key of those with whom it communicates in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """A rank's in an interval, in seconds a step."""

    compute: float
    """The median of its steps."""
    waiting: float
    """In communication of any kind, for others and for what is transferred: the median of its steps."""
    least: float
    """In collectives of its group, in the step in which that was least: where it came last, what transfers take. NaN
    where that is not known."""
    backward: float = nan
    """Of a backward pass on its device, the median. NaN: these are a host's times."""
    starved: bool = False
    """In most steps its device waited for its host in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An interval, of some steps, in which nothing changed."""

    round: int
    step: int
    """Steps that were finished at its end."""
    seats: Mapping[int, Seat]
    """By rank; the same in all reports of a round."""
    times: Mapping[int, Times]
    """By rank; some may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """When an interval ended."""

    at: float
    """Job time, in seconds."""
    step: int

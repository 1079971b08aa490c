"""What a rank's steps take, interval by interval, from looks at its page. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from elastic.proto.page import Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of an interval's steps, in seconds."""

    end: int
    """Steps that were finished at its end."""
    compute: float
    """Of a step, but for what it waits: the median."""
    waiting: float
    """The median."""
    least: float
    """In the step in which that was least."""


class Pace:
    """One rank's. Intervals end at the same steps on all ranks: at multiples of their length."""

    def __init__(self) -> None:
        self._last: Beat | None = None
        """The newest beat that was heard."""
        self._steps: list[tuple[int, int]] = []
        """Of this interval, what was computed and waited, in ns."""
        self._length = 0
        self._told: Times | None = None

    @property
    def heard(self) -> int:
        return 0 if self._last is None else self._last.number

    def hear(self, beats: Iterable[Beat], length: int) -> None:
        """beats: those since the last that was heard, some may be missing; length: of an interval, in steps."""
        if length != self._length:
            self._length, self._steps = length, []
        for beat in beats:
            last, self._last = self._last, beat
            if last is not None and last.number + 1 == beat.number:
                waited = beat.waited_ns - last.waited_ns
                self._steps.append((beat.end_ns - last.end_ns - waited, waited))
            if length and beat.number % length == 0:
                self._end(beat.number)

    def _end(self, number: int) -> None:
        """Of an interval; one of which less than half was seen tells nothing."""
        if 2 * len(self._steps) >= self._length:
            computed, waited = zip(*self._steps, strict=True)
            self._told = Times(
                end=number,
                compute=max(0, median_low(computed)) / 1e9,
                waiting=median_low(waited) / 1e9,
                least=min(waited) / 1e9,
            )
        self._steps = []

    def take(self) -> Times | None:
        """The last interval's, unless it was taken."""
        told, self._told = self._told, None
        return told

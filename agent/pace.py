"""What a rank's steps take, interval by interval, from looks at its page. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from elastic.proto.page import Beat

SAMPLES = 3
"""Steps of an interval that are known of a device, at least."""


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
        self._steps: dict[int, tuple[int, int]] = {}
        """Of this interval, by number: what a step took, and what of it the main thread waited, in ns."""
        self._on_device: dict[int, int] = {}
        """What steps waited on the device, where they wait there."""
        self._waits_there = False
        self._length = 0
        self._told: Times | None = None

    @property
    def heard(self) -> int:
        return 0 if self._last is None else self._last.number

    def hear(self, beats: Iterable[Beat], length: int) -> None:
        """beats: those since the last that was heard, some may be missing; length: of an interval, in steps."""
        if length != self._length:
            self._length, self._steps = length, {}
        for beat in beats:
            last, self._last = self._last, beat
            if last is not None and last.number + 1 == beat.number:
                waited = beat.waited_ns - last.waited_ns
                self._steps[beat.number] = (beat.end_ns - last.end_ns, waited)
            if length and beat.number % length == 0:
                self._end(beat.number)

    def hear_of_device(self, waited: Iterable[tuple[int, int]]) -> None:
        """waited: numbers of steps, and ns that each waited on the device; the host of a GPU waits for nobody."""
        self._on_device.update(waited)
        self._waits_there |= bool(self._on_device)

    def _seen(self) -> list[tuple[int, int]]:
        """What steps took and waited; nothing where less than half of an interval was seen, or of those on a device
        too few: the recorder keeps the last ones only."""
        if not self._waits_there:
            return list(self._steps.values()) if 2 * len(self._steps) >= self._length else []
        told = [(self._steps[n][0], ns) for n, ns in self._on_device.items() if n in self._steps]
        return told if len(told) >= min(self._length, SAMPLES) else []

    def _end(self, number: int) -> None:
        """Of an interval."""
        if seen := self._seen():
            computed, waited = zip(*((took - waited, waited) for took, waited in seen), strict=True)
            self._told = Times(
                end=number,
                compute=max(0, median_low(computed)) / 1e9,
                waiting=median_low(waited) / 1e9,
                least=min(waited) / 1e9,
            )
        self._steps, self._on_device = {}, {}

    def take(self) -> Times | None:
        """The last interval's, unless it was taken."""
        told, self._told = self._told, None
        return told

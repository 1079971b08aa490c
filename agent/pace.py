"""What a rank's steps take, interval by interval, from looks at its page. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from elastic.proto.page import Beat, DeviceStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesOnDevice:
    """What steps took on the rank's device, in seconds: of those that were heard of in an interval."""

    compute: float
    """The median, but for what it waits for other ranks."""
    backward: float
    """Of a backward pass: the median."""
    waiting: float
    """For other ranks: the median."""
    least: float
    """In the step in which that was least."""
    starved: bool
    """In most of them it waited for its host."""


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
    device: TimesOnDevice | None = None


class Pace:
    """One rank's. Intervals end at the same steps on all ranks: at multiples of their length."""

    def __init__(self) -> None:
        self._last: Beat | None = None
        """The newest beat that was heard."""
        self._steps: list[tuple[int, int]] = []
        """Of this interval, what was computed and waited, in ns."""
        self._on_device: list[DeviceStep] = []
        """Of this interval."""
        self.heard_of_device = 0
        """Steps."""
        self._length = 0
        self._told: Times | None = None

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

    def hear_of_device(self, steps: Iterable[DeviceStep], count: int) -> None:
        """steps: those since the last that was heard; count: of all there were. A device is behind its host, so they
        may be of the interval before: it ends with what was heard by then."""
        self._on_device += steps
        self.heard_of_device = count

    def _end(self, number: int) -> None:
        """Of an interval; one of which less than half was seen tells nothing."""
        if 2 * len(self._steps) >= self._length:
            computed, waited = zip(*self._steps, strict=True)
            self._told = Times(
                end=number,
                compute=max(0, median_low(computed)) / 1e9,
                waiting=median_low(waited) / 1e9,
                least=min(waited) / 1e9,
                device=_on_device(self._on_device),
            )
        self._steps, self._on_device = [], []

    def take(self) -> Times | None:
        """The last interval's, unless it was taken."""
        told, self._told = self._told, None
        return told


def _on_device(steps: list[DeviceStep]) -> TimesOnDevice | None:
    if not steps:
        return None
    waited = [step.collectives_ns for step in steps]
    return TimesOnDevice(
        compute=max(0, median_low(step.compute_ns for step in steps)) / 1e9,
        backward=max(0, median_low(step.backward_ns for step in steps)) / 1e9,
        waiting=max(0, median_low(waited)) / 1e9,
        least=max(0, min(waited)) / 1e9,
        starved=2 * sum(step.starved for step in steps) > len(steps),
    )

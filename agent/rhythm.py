"""How regularly one rank's optimizer steps: from looks at its page, two a second or more. Pure."""

from collections.abc import Iterator, Sequence
from statistics import median_low

from elastic.proto.page import Beat

STOOD_STILL = 1.5
"""Seconds between two looks after which this process, and so likely its node, stood still: a frozen container,
a suspended machine."""
GRAIN_NS = 100_000_000
"""So much of a step's time is what a busy machine does to one among many short ones."""
RARE = 3
"""Times as long as the one before: an interval in which a phase was named, and which is the phase's, no step's."""


class Rhythm:
    """Times are CLOCK_MONOTONIC in nanoseconds. Of ticks that are no beats, as those of several optimizers, several
    between two looks count as evenly spread: what is shorter than a look does not matter."""

    def __init__(self) -> None:
        self.ticks = 0
        self._tick_ns = 0
        self.beat = 0
        """The newest that was heard."""
        self._heard_ns = 0
        """When the page was looked at last."""
        self._awake_ns = 0
        """Until when this node stood still; no rank was quiet by itself then."""
        self._usual_ns = 0.0
        """The last interval that counted."""
        self._was_rare = False
        """The last did not; two in a row do, for then steps are longer."""
        self._longest_ns = 0.0

    def hear(
        self,
        ticks: int,
        tick_ns: int,
        now_ns: int,
        phase_ns: int = 0,
        beats: Sequence[Beat] = (),
    ) -> None:
        """What the page says now: its count, and when the last one was; phase_ns: when its script last named another
        phase; beats: those since `beat`, some may be missing. An evaluation between two steps, if it says so, says
        nothing of what steps take."""
        heard_ns, self._heard_ns = self._heard_ns, now_ns
        if heard_ns and now_ns - heard_ns > STOOD_STILL * 1e9:
            self._awake_ns = now_ns
        if ticks <= self.ticks and not beats:
            return
        if self.ticks:  # what comes before the first is no step's time
            for begin_ns, took_ns in self._intervals(ticks, tick_ns, heard_ns, beats):
                self._learn(took_ns, phased=phase_ns > begin_ns)
        self.ticks, self._tick_ns = ticks, tick_ns
        if beats:  # one may have come just after the tick that was read
            self.beat, self._tick_ns = beats[-1].number, max(tick_ns, beats[-1].end_ns)

    def _intervals(
        self, ticks: int, tick_ns: int, heard_ns: int, beats: Sequence[Beat]
    ) -> Iterator[tuple[int, float]]:
        """Begin and length of each."""
        begin_ns, number = self._tick_ns, self.beat
        if not beats:
            mean = (tick_ns - begin_ns) / (ticks - self.ticks)
            # Several optimizers step at once, and then none for long.
            yield begin_ns, max(mean, heard_ns - begin_ns)
            return
        found: list[tuple[int, int]] = []
        for beat in beats:
            if beat.number == number + 1:
                found.append((begin_ns, beat.end_ns - begin_ns))
            number, begin_ns = beat.number, beat.end_ns
        usual_ns = median_low(took_ns for _, took_ns in found) if found else 0
        for begin_ns, took_ns in found:
            yield begin_ns, max(min(usual_ns, took_ns), took_ns - GRAIN_NS)

    def _learn(self, took_ns: float, *, phased: bool) -> None:
        """phased: a phase was named in it, or since."""
        longer = self._usual_ns and took_ns > RARE * self._usual_ns
        rare = bool(longer) and phased and not self._was_rare
        if not rare:
            self._longest_ns = max(self._longest_ns, took_ns)
            self._usual_ns = took_ns
        self._was_rare = rare

    def quiet(self, now_ns: int) -> float:
        """Seconds since the last tick; 0: there was none."""
        since = max(self._tick_ns, self._awake_ns)
        return max(0, now_ns - since) / 1e9 if self.ticks else 0.0

    def take(self) -> float:
        """The longest interval since it was last taken, in seconds; 0: no tick came."""
        longest, self._longest_ns = self._longest_ns, 0.0
        return longest / 1e9

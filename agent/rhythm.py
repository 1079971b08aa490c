"""How regularly one rank's optimizer steps: from looks at its page, ten a second or more. Pure."""

STOOD_STILL = 1.0
"""Seconds between two looks after which this process, and so likely its node, stood still: a frozen container,
a suspended machine."""
RARE = 3
"""Times as long as the one before: an interval in which a phase was named, and which is the phase's, no step's."""


class Rhythm:
    """Times are CLOCK_MONOTONIC in nanoseconds. Where several ticks came between two looks, they count as
    evenly spread: what is shorter than a look does not matter."""

    def __init__(self) -> None:
        self.ticks = 0
        self._tick_ns = 0
        self._heard_ns = 0
        """When the page was looked at last."""
        self._awake_ns = 0
        """Until when this node stood still; no rank was quiet by itself then."""
        self._usual_ns = 0.0
        """The last interval that counted."""
        self._was_rare = False
        """The last did not; two in a row do, for then steps are longer."""
        self._longest_ns = 0.0

    def hear(self, ticks: int, tick_ns: int, now_ns: int, phase_ns: int = 0) -> None:
        """What the page says now: its count, and when the last one was; phase_ns: when its script last named another
        phase. An evaluation between two steps, if it says so, says nothing of what steps take."""
        heard_ns, self._heard_ns = self._heard_ns, now_ns
        if heard_ns and now_ns - heard_ns > STOOD_STILL * 1e9:
            self._awake_ns = now_ns
        if ticks <= self.ticks:
            return
        if self.ticks:  # what comes before the first is no step's time
            mean = (tick_ns - self._tick_ns) / (ticks - self.ticks)
            # Several optimizers step at once, and then none for long.
            took_ns = max(mean, heard_ns - self._tick_ns)
            longer = self._usual_ns and took_ns > RARE * self._usual_ns
            rare = bool(longer) and phase_ns > self._tick_ns and not self._was_rare
            if not rare:
                self._longest_ns = max(self._longest_ns, took_ns)
                self._usual_ns = took_ns
            self._was_rare = rare
        self.ticks, self._tick_ns = ticks, tick_ns

    def quiet(self, now_ns: int) -> float:
        """Seconds since the last tick; 0: there was none."""
        since = max(self._tick_ns, self._awake_ns)
        return max(0, now_ns - since) / 1e9 if self.ticks else 0.0

    def take(self) -> float:
        """The longest interval since it was last taken, in seconds; 0: no tick came."""
        longest, self._longest_ns = self._longest_ns, 0.0
        return longest / 1e9

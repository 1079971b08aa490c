"""How regularly one rank's optimizer steps: from looks at its page, ten a second. Pure."""


class Rhythm:
    """Times are CLOCK_MONOTONIC in nanoseconds. Where several ticks came between two looks, they count as
    evenly spread: what is shorter than a look does not matter."""

    def __init__(self) -> None:
        self.ticks = 0
        self._tick_ns = 0
        self._longest_ns = 0.0

    def hear(self, ticks: int, tick_ns: int) -> None:
        """What the page says: its count, and when the last one was."""
        if ticks <= self.ticks:
            return
        if self.ticks:  # what comes before the first is no step's time
            mean = (tick_ns - self._tick_ns) / (ticks - self.ticks)
            self._longest_ns = max(self._longest_ns, mean)
        self.ticks, self._tick_ns = ticks, tick_ns

    def quiet(self, now_ns: int) -> float:
        """Seconds since the last tick; 0: there was none."""
        return max(0, now_ns - self._tick_ns) / 1e9 if self.ticks else 0.0

    def take(self) -> float:
        """The longest interval since it was last taken, in seconds; 0: no tick came."""
        longest, self._longest_ns = self._longest_ns, 0.0
        return longest / 1e9

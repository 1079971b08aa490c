"""How a guardian sees that its master, whose process may be there and hang, does its work: a number in memory of both
that the master's event loop adds to.
"""

import mmap

EVERY = 1.0
"""Seconds between two looks, and about as many between two beats."""
LONGEST_LOOK = 2 * EVERY
"""Seconds that one look counts for: whoever looks stands still where all of the machine does, and then knows nothing."""
LEASES, LEAST = 6, 20.0
"""Of silence, and seconds: as many as nodes get where most fall silent, since a master of thousands may be late, and longer
than its journal may have to wait for a disk."""


class Pulse:
    """One object with two ends: made by the guardian, used by the master that it forks."""

    def __init__(self, lease: float) -> None:
        """lease: seconds of silence after which a node is looked after."""
        self.most = max(LEAST, LEASES * lease)
        """Seconds without a beat, while this process ran, after which the master hangs."""
        self._beats = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self.begin()

    def beat(self) -> None:
        """In the master: it works."""
        self._beats[0] += 1

    def begin(self) -> None:
        """A life of the master begins: until its first beat it starts, and takes what its disk takes."""
        self._seen = self._beats[0]
        self._beating = False
        self._silent = self._looked = 0.0

    def hangs(self, now: float) -> bool:
        """Whether that life does its work no more. To be asked every `EVERY` seconds of the monotonic clock `now`."""
        ran, self._looked = min(now - self._looked, LONGEST_LOOK), now
        if self._seen != self._beats[0]:
            self._seen, self._beating, self._silent = self._beats[0], True, 0.0
        elif self._beating:
            self._silent += ran
        return self._silent > self.most

"""When memory for snapshots that was not to be had is asked for again. Pure."""

from dataclasses import dataclass, replace

MOST = 32
"""Saves between two questions, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What was refused; the ranks of a node, which save the same steps, ask again in the same save."""

    bytes: int = 0
    """Of a slot; 0: nothing was refused."""
    times: int = 0
    left: int = 0
    """Saves until it is asked for again."""

    def asks(self, size: int) -> bool:
        """Whether slots of that size are asked for now: others than were refused are at once."""
        return size != self.bytes or not self.left

    def refused(self, size: int) -> "Want":
        """Asked for in vain: the next 1, 2, 4, ... saves do not."""
        times = self.times + 1 if size == self.bytes else 1
        return Want(bytes=size, times=times, left=min(1 << (times - 1), MOST))

    def passed(self) -> "Want":
        """A save has not asked."""
        return replace(self, left=self.left - 1)

"""What goes wrong, as a sentence: `Faults().refuse(429, times=2).drop_watch(after=3)`."""

from collections import deque
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong once."""

    status: int = 0
    """Answer with it; 0: break the connection off."""
    after: bool = False
    """Do what was asked for first."""
    retry_after: int | None = None
    """Seconds, in a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFault:
    """How one watch ends."""

    after: int
    """Events that it delivers first."""
    kind: str
    """drop, end, torn (in the middle of an event), gone, error, silence."""


class Faults:
    """What is still to go wrong, in order: calls of the chosen methods and watches apart."""

    def __init__(self) -> None:
        self.calls: deque[tuple[frozenset[str], Fault]] = deque()
        self.watches: deque[WatchFault] = deque()
        self.late: deque[float] = deque()

    def refuse(
        self,
        status: int,
        *methods: str,
        times: int = 1,
        after: bool = False,
        retry_after: int | None = None,
    ) -> Self:
        """Answer the next calls with a status; 0: with nothing."""
        fault = Fault(status=status, after=after, retry_after=retry_after)
        self.calls.extend([(frozenset(methods), fault)] * times)
        return self

    def end_watch(self, kind: str, *, after: int = 0) -> Self:
        self.watches.append(WatchFault(after=after, kind=kind))
        return self

    def delay(self, seconds: float) -> Self:
        """Let the next call wait."""
        self.late.append(seconds)
        return self

    def of_call(self, method: str) -> Fault | None:
        if self.calls and (not self.calls[0][0] or method in self.calls[0][0]):
            return self.calls.popleft()[1]
        return None

    def of_watch(self) -> WatchFault | None:
        return self.watches.popleft() if self.watches else None

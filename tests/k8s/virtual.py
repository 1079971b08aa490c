"""An event loop whose clock jumps to the next timer: hours of waiting in no time. For what touches no
socket.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class _Selector(selectors.DefaultSelector):
    """Waits for nothing, and says how long it would have waited."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen again"
        self.waited += max(0.0, timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.waited


def run(coroutine: Coroutine[Any, Any, R]) -> R:
    """As asyncio.run, in virtual time, which begins at 0."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)

"""Memory that a call takes at its height."""

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def peak(call: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and bytes."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

"""Waiting for what another process does, where nothing tells of it."""

import time
from collections.abc import Callable


def wait_for(what: str, true: Callable[[], bool], seconds: float = 150) -> None:
    """Fails where that never comes; seconds: far more than it takes."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it never came: {what}"
        time.sleep(0.05)

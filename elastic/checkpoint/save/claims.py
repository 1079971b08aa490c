"""Locks on slots that end with this process, not with a process that it forks meanwhile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from elastic.proto import slot

_held: set[int] = set()
_lock = Lock()


def claim(fd: int, *, exclusive: bool) -> int | None:
    """As `slot.claim`; to be given back with `release`."""
    with _lock:
        found = slot.claim(fd, exclusive=exclusive)
        if found is not None:
            _held.add(found)
        return found


def release(claimed: int) -> None:
    with _lock:
        _held.remove(claimed)
        os.close(claimed)


@contextmanager
def shared(fds: list[int]) -> Iterator[None]:
    """Nobody writes to these slots meanwhile, but for who does already."""
    claimed = [claim(fd, exclusive=False) for fd in fds]
    try:
        yield
    finally:
        for one in claimed:
            if one is not None:
                release(one)


def _forget() -> None:
    """In a fork: a loader's worker that had our lock would keep the slot from everybody."""
    while _held:
        os.close(_held.pop())
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget)

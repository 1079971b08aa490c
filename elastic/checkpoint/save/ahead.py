"""Slots that a spare rank maps and registers ahead of its round: what it loads as a rank then comes from
memory that the device knows, and its first saves go there."""

import os
from collections import deque
from collections.abc import Collection, Sequence

import torch

from elastic.checkpoint.memory import host, lanes
from elastic.checkpoint.memory.lanes import Lane, Rest
from elastic.checkpoint.save.slots import PART


class Ahead:
    """What one process has, by one thread of it. Nothing but these views holds the memory of a slot that
    its keeper has dropped, so they are to be told of it (`show`), and let go (`leave`)."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._views: list[memoryview] = []
        self._left: deque[memoryview] = deque()
        """Parts that are not registered yet."""

    def show(self, fds: Sequence[int]) -> None:
        """These are all slots of the rank that have their memory; what was one before is forgotten.

        fds: ours from here on.
        """
        before = self._views
        self._views = [host.shared(fd) for fd in fds]
        for fd in fds:
            os.close(fd)
        self._forget([view for view in before if not _among(view, self._views)])
        new = [view for view in self._views if not _among(view, before)]
        self._left.extend(view[at : at + PART] for view in new for at in range(0, len(view), PART))

    def go_on(self, rest: Rest | None = None) -> bool:
        """Register one more part; whether there is more to do. rest: as `Lane.register` takes it."""
        if self._left:
            self._lane.register(self._left.popleft(), rest)
        return bool(self._left)

    def leave(self, used: Collection[memoryview]) -> None:
        """The rank has its slots: of the others nothing is kept."""
        views, self._views = self._views, []
        self._forget([view for view in views if not _among(view, used)])
        self._left.clear()

    def _forget(self, views: Sequence[memoryview]) -> None:
        for view in views:
            start = host.address_of(view)
            self._left = deque(
                part
                for part in self._left
                if not start <= host.address_of(part) < start + len(view)
            )
            self._lane.forget(view)


def _among(view: memoryview, views: Collection[memoryview]) -> bool:
    """The same mapping; `==` would compare their bytes."""
    return any(view is other for other in views)


_here: list[Ahead] = []
"""Of this process, if it was a spare."""


def begin(device: str) -> Ahead:
    """In a spare of that device, which has a context there already."""
    lane = lanes.Host() if device == "cpu" else lanes.Cuda(torch.device(device))
    _here.append(Ahead(lane))
    return _here[0]


def settle(used: Collection[memoryview]) -> None:
    """In the rank that the spare has become, once it has its slots."""
    for ahead in _here:
        ahead.leave(used)
    _here.clear()

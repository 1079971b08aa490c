"""Nodes that come, go, or answer a knock or a probe in one moment, folded together: an event costs O(nodes)."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from elastic.master import events as ev
from elastic.master.events import Event, NodeId

News = ev.Attached | ev.Detached | ev.Knocked | ev.Probed | ev.Paired
_KINDS: tuple[Any, ...] = (ev.Attached, ev.Detached, ev.Knocked, ev.Probed, ev.Paired)

BATCH, LONGEST_PAUSE = 0.002, 0.2
"""Seconds in which news are gathered, and from one fold to the next."""
PAUSE = 20
"""The pause is so many times what a fold took; less where it was of fewer nodes."""


class Gathering:
    """What one node does stays in its order; between nodes there is none to keep."""

    def __init__(self, fold: Callable[[Event], None]) -> None:
        self._fold = fold
        self._news: dict[NodeId, list[News]] = defaultdict(list)
        self._not_before = 0.0
        """When the next fold may be, in the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        self.arriving = 0
        """Nodes that attached and are not in the job yet."""

    def add(self, node_id: NodeId, news: News) -> None:
        """Fold it in a moment, with what else comes until then."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            due = max(loop.time() + BATCH, self._not_before)
            self._timer = loop.call_at(due, self.flush)
        self._news[node_id].append(news)
        self.arriving += isinstance(news, ev.Attached)

    def flush(self) -> None:
        """Fold it now."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        times = min(PAUSE, len(self._news))
        events = tuple(_merged([*self._news.values()]))
        self._news.clear()
        self.arriving = 0
        began = time.monotonic()
        self._fold(events[0] if len(events) == 1 else ev.Together(events))
        took = time.monotonic() - began
        self._not_before = asyncio.get_running_loop().time() + min(times * took, LONGEST_PAUSE)


def _merged(news: list[list[News]]) -> Iterator[News]:
    """The first thing of each node, then the second of each; among them one event of each kind."""
    for layer in zip_longest(*news):
        for kind in _KINDS:
            if nodes := [
                node for event in layer if isinstance(event, kind) for node in event.nodes
            ]:
                yield kind(tuple(nodes))

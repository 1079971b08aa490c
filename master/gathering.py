"""Nodes that come, go or answer a knock in one moment, folded together: an event costs O(nodes)."""

import asyncio
import itertools
import time
from collections.abc import Callable

from elastic.master import events as ev
from elastic.master.events import Event, NodeId

News = ev.Attached | ev.Detached | ev.Knocked

BATCH, LONGEST_BATCH = 0.002, 0.2
"""Seconds in which news are gathered: LOAD times what the last of them took to fold."""
LOAD = 20


class Gathering:
    """Keeps the order in which things happened."""

    def __init__(self, fold: Callable[[Event], None]) -> None:
        self._fold = fold
        self._news: list[News] = []
        self._about: set[NodeId] = set()
        self._batch = BATCH
        self.arriving = 0
        """Nodes that attached and are not in the job yet."""

    def add(self, node_id: NodeId, news: News) -> None:
        """Fold it in a moment, with what else comes until then."""
        if not self._news:
            asyncio.get_running_loop().call_later(self._batch, self.flush)
        self._news.append(news)
        self._about.add(node_id)
        self.arriving += isinstance(news, ev.Attached)

    def is_about(self, node_id: NodeId) -> bool:
        return node_id in self._about

    def flush(self) -> None:
        """Fold it now."""
        if not self._news:
            return
        news, self._news = self._news, []
        self._about.clear()
        self.arriving = 0
        began = time.monotonic()
        events = tuple(_merged(news))
        self._fold(events[0] if len(events) == 1 else ev.Together(events))
        self._batch = min(max(BATCH, LOAD * (time.monotonic() - began)), LONGEST_BATCH)


def _merged(news: list[News]) -> list[News]:
    """Arrivals that follow one another as one."""
    merged: list[News] = []
    for _, run in itertools.groupby(news, lambda event: isinstance(event, ev.Attached)):
        events = list(run)
        arrivals = [
            node for event in events if isinstance(event, ev.Attached) for node in event.nodes
        ]
        merged += [ev.Attached(tuple(arrivals))] if arrivals else events
    return merged

"""Nodes that come, go or answer a knock in one moment, folded together: an event costs O(nodes)."""

import asyncio
import time
from collections.abc import Callable

from elastic.master import events as ev
from elastic.master.events import Event, NodeId

News = ev.Attached | ev.Detached | ev.Knocked

BATCH, LONGEST_BATCH = 0.002, 0.2
"""Seconds in which news are gathered: LOAD times what the last of them took to fold."""
LOAD = 20


class Gathering:
    """Of each node one thing at a time, so among them no order is lost."""

    def __init__(self, fold: Callable[[Event], None]) -> None:
        self._fold = fold
        self._news: list[News] = []
        self._about: set[NodeId] = set()
        self._batch = BATCH
        self._timer: asyncio.TimerHandle | None = None
        self.arriving = 0
        """Nodes that attached and are not in the job yet."""

    def add(self, node_id: NodeId, news: News) -> None:
        """Fold it in a moment, with what else comes until then."""
        if node_id in self._about:
            self.flush()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._batch, self.flush)
        self._news.append(news)
        self._about.add(node_id)
        self.arriving += isinstance(news, ev.Attached)

    def is_about(self, node_id: NodeId) -> bool:
        return node_id in self._about

    def flush(self) -> None:
        """Fold it now."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        news, self._news = self._news, []
        self._about.clear()
        self.arriving = 0
        began = time.monotonic()
        events = tuple(_merged(news))
        self._fold(events[0] if len(events) == 1 else ev.Together(events))
        self._batch = min(max(BATCH, LOAD * (time.monotonic() - began)), LONGEST_BATCH)


def _merged(news: list[News]) -> list[News]:
    """All arrivals as one."""
    arrivals = [node for event in news if isinstance(event, ev.Attached) for node in event.nodes]
    merged: list[News] = [ev.Attached(tuple(arrivals))] if arrivals else []
    return merged + [event for event in news if not isinstance(event, ev.Attached)]

"""Does to nodes what `tainting.py` says: `elasticctl operator --allow-node-taint`, and nothing without."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from elastic.k8s import tainting
from elastic.k8s.jobs import Job
from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.errors import Absent, ApiError, Conflict
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import NODES
from elastic.k8s.tainting import Change, Node
from elastic.proto.elasticjob import AvoidedNode

log = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between two looks: a taint is no matter of a moment."""


class Tainter:
    """jobs: by namespace, as they are whenever they are looked at; held: this process may write."""

    def __init__(
        self, api: Api, jobs: Collection[Iterable[Job | None]], held: Callable[[], bool]
    ) -> None:
        self._api, self._jobs, self._held = api, jobs, held
        self._nodes: Reflector[Node] = Reflector(
            api, NODES, project=tainting.node, changed=lambda old, new: None
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._nodes.run())
            await self._nodes.synced.wait()
            while True:
                for change in tainting.decide(self._avoided(), tuple(self._nodes), time.time()):
                    if self._held():
                        await self._do(change)
                await asyncio.sleep(LOOK)

    def _avoided(self) -> Iterator[AvoidedNode]:
        for one in itertools.chain.from_iterable(self._jobs):
            if one is not None and one.state is not None:
                yield from one.state.avoided_nodes

    async def _do(self, change: Change) -> None:
        try:
            await self._api.merge(NODES, "", change.node.name, tainting.patch(change))
        except (Absent, Conflict):  # another look shows it as it is
            return
        except ApiError as error:
            log.warning("node %s cannot be written: %s", change.node.name, error)
        else:
            log.warning("node %s: %s", change.node.name, change.reason)

"""What a server has at a path, kept as it is now; each change is told on the event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable

from urllib3.exceptions import HTTPError

from scripts.kubernetes.client import ApiError, Client, Object, Query

_LOG = logging.getLogger(__name__)
RETRY_SECONDS = 0.5


def key(value: Object) -> str:
    """namespace/name."""
    return f"{value['metadata'].get('namespace', '')}/{value['metadata']['name']}"


class Mirror:
    """A list and a watch, by a thread of its own that ends with the process."""

    def __init__(
        self,
        client: Client,
        path: str,
        changed: Callable[[Object | None, Object], None],
        **query: str,
    ) -> None:
        self.objects: dict[str, Object] = {}
        self.ready = asyncio.Event()
        """Has been listed once, or there is no such kind."""
        self._client, self._path, self._changed = client, path, changed
        self._query: Query = dict(query)
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._follow, name=f"watch {path}", daemon=True).start()

    def _follow(self) -> None:
        wait = threading.Event()  # never set: between two tries
        while not self._loop.is_closed():
            try:
                listed = self._client.call("GET", self._path, query=self._query)
                self._tell(self._replace, listed["items"])
                version = listed["metadata"]["resourceVersion"]
                for event in self._client.watch(self._path, resourceVersion=version, **self._query):
                    if event["type"] == "ERROR":
                        break
                    self._tell(self._event, event)
            except ApiError as error:
                if error.code == 404:
                    self._tell(self.ready.set)
                else:
                    _LOG.warning("%s: %s", self._path, error)
            except (HTTPError, OSError, ValueError) as error:
                _LOG.warning("%s: %s", self._path, error)
            wait.wait(RETRY_SECONDS)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _replace(self, items: list[Object]) -> None:
        fresh = {key(item): item for item in items}
        for name in self.objects.keys() - fresh.keys():
            self._event({"type": "DELETED", "object": self.objects[name]})
        for item in fresh.values():
            self._event({"type": "MODIFIED", "object": item})
        self.ready.set()

    def _event(self, event: Object) -> None:
        """Calls `changed(now, last)`: now is None once the object is gone."""
        value = event["object"]
        if event["type"] == "DELETED":
            self.objects.pop(key(value), None)
            self._changed(None, value)
        else:
            self.objects[key(value)] = value
            self._changed(value, value)

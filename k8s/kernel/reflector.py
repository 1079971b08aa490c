"""A cache of a cluster's objects, kept by list and watch: what was last seen, never what was hoped.

    list in pages -> watch from that version, with bookmarks -> the watch ends: go on where it ended
                  -> 410 Gone, an ERROR event: list again    -> it breaks off, or is silent: go on, later

Each object is made small (`project`) as it comes in and its JSON forgotten. Whoever is told of a change
gets what was there before and what is there now; after a list, that is every difference to before it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from elastic.k8s.kernel.api import SILENCE, Api, Json
from elastic.k8s.kernel.errors import ApiError, Gone, from_status
from elastic.k8s.kernel.resources import Resource

log = logging.getLogger(__name__)

T = TypeVar("T")

SHORTEST, LONGEST = 300.0, 600.0
"""Seconds of one watch, at random between these, so that not all of them end at once."""
PAUSE, LONG_PAUSE = 0.5, 30.0
"""Seconds to wait after a failure: the first time, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Generic[T]):
    """An object in the cache."""

    uid: str
    value: T
    """What `project` made of it."""


class Reflector(Generic[T]):
    """The cache of one kind of object, as far as a selector chooses it."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        *,
        project: Callable[[Json], T],
        changed: Callable[[T | None, T | None], None] = lambda old, new: None,
        indexers: Mapping[str, Callable[[T], Iterable[Hashable]]] | None = None,
        namespace: str = "",
        selector: str = "",
        fields: str = "",
        silence: float = SILENCE,
    ) -> None:
        """changed: told of every change, (before, now): neither may wait; None: it was not or is no
        more there. An object that took another's name is two changes. indexers: name -> the keys
        under which `by` finds an object."""
        self._api, self._resource, self._namespace = api, resource, namespace
        self._selector, self._fields, self._silence = selector, fields, silence
        self._project, self._changed = project, changed
        self._held: dict[tuple[str, str], Held[T]] = {}
        self._indexes: dict[str, _Index[T]] = {
            name: _Index(keys) for name, keys in (indexers or {}).items()
        }
        self._version = ""
        self._told = 0  # events of watches
        self.synced = asyncio.Event()
        """Set once the first list is in."""
        self.heard = float("-inf")
        """When anything came last, by the loop's clock: a list, an event, a bookmark."""
        self.lists = 0
        """How often all of it was listed."""
        self.listed = float("-inf")
        """When the last of these was begun: what was written before is in the cache, or is no more."""

    # --- reading ---------------------------------------------------------------------------------

    def get(self, namespace: str, name: str) -> T | None:
        held = self._held.get((namespace, name))
        return held.value if held else None

    def by(self, index: str, key: Hashable) -> tuple[T, ...]:
        """The objects that this index has under `key`, by namespace and name."""
        found = self._indexes[index].found.get(key, ())
        return tuple(self._held[place].value for place in sorted(found))

    def __iter__(self) -> Iterator[T]:
        return (held.value for held in list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    # --- keeping ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the cache until cancelled."""
        pause = PAUSE
        loop = asyncio.get_running_loop()
        while True:
            begun, told, failed = loop.time(), self._told, False
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except Gone as error:
                log.info("%s: listing again: %s", self._resource.plural, error)
                self._version = ""
            except ApiError as error:
                log.warning("%s: %s", self._resource.plural, error)
                failed = True
            if self._told > told:
                pause = PAUSE
            if failed or loop.time() - begun < PAUSE:  # an end at once, over and over, is a failure
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(2 * pause, LONG_PAUSE)

    async def _list(self) -> None:
        """Everything that there is now, in pages; what is in the cache and not in the list is gone."""
        began, seen = asyncio.get_running_loop().time(), set[tuple[str, str]]()
        token = ""
        while True:
            page = await self._api.page(
                self._resource,
                self._namespace,
                selector=self._selector,
                fields=self._fields,
                token=token,
            )
            for item in page.get("items") or ():
                seen.add(_place(item))
                self._put(item)
            token = page["metadata"].get("continue") or ""
            if not token:
                break
        for place in self._held.keys() - seen:
            self._drop(place)
        self._version = page["metadata"]["resourceVersion"]
        self.lists, self.listed = self.lists + 1, began
        self._hear()
        self.synced.set()

    async def _follow(self) -> None:
        """One watch, to its end."""
        events = self._api.watch(
            self._resource,
            self._namespace,
            version=self._version,
            selector=self._selector,
            fields=self._fields,
            seconds=random.uniform(SHORTEST, LONGEST),
            silence=self._silence,
        )
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                self._take(event)

    def _take(self, event: Json) -> None:
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            self._version = ""  # whatever it was: a list is always right
            raise from_status(item)
        if kind in ("ADDED", "MODIFIED"):
            self._put(item)
        elif kind == "DELETED":
            self._drop(_place(item))
        self._version = item["metadata"]["resourceVersion"]
        self._told += 1
        self._hear()

    def _hear(self) -> None:
        self.heard = asyncio.get_running_loop().time()

    def _put(self, item: Json) -> None:
        place, uid = _place(item), item["metadata"].get("uid", "")
        before = self._held.get(place)
        if before is not None and before.uid != uid:
            self._drop(place)
            before = None
        value = self._project(item)
        if before is not None and before.value == value:
            return
        self._held[place] = Held(uid=uid, value=value)
        for index in self._indexes.values():
            index.move(place, before.value if before else None, value)
        self._changed(before.value if before else None, value)

    def _drop(self, place: tuple[str, str]) -> None:
        held = self._held.pop(place, None)
        if held is None:
            return
        for index in self._indexes.values():
            index.move(place, held.value, None)
        self._changed(held.value, None)


class _Index(Generic[T]):
    """Where the objects with a key are."""

    def __init__(self, keys: Callable[[T], Iterable[Hashable]]) -> None:
        self._keys = keys
        self.found: dict[Hashable, set[tuple[str, str]]] = {}

    def move(self, place: tuple[str, str], before: T | None, now: T | None) -> None:
        old = set(self._keys(before)) if before is not None else set()
        new = set(self._keys(now)) if now is not None else set()
        for key in old - new:
            self.found[key].discard(place)
            if not self.found[key]:
                del self.found[key]
        for key in new - old:
            self.found.setdefault(key, set()).add(place)


def _place(item: Json) -> tuple[str, str]:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]

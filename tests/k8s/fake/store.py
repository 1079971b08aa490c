"""What the fake server holds: objects by kind, namespace and name, and the events so far."""

import asyncio
import copy
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]
Place = tuple[str, str, str]
"""Collection (`v1/pods`), namespace, name."""


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    version: int
    collection: str
    kind: str
    """ADDED, MODIFIED or DELETED."""
    item: Json


class Store:
    """One version counter for everything, as etcd has it."""

    def __init__(self) -> None:
        self.version = 100
        self.items: dict[Place, Json] = {}
        self.events: list[Event] = []
        self.floor = 0
        """Watches from versions before it are Gone."""
        self.changed = asyncio.Condition()
        self.created: list[tuple[Place, str]] = []
        """Everything that was ever created, with its uid."""

    def compact(self) -> None:
        """Forget every event so far."""
        self.floor = self.version
        self.events.clear()

    def chosen(self, collection: str, namespace: str, selector: str) -> list[Json]:
        found = [
            item
            for (of, space, _), item in sorted(self.items.items())
            if of == collection and namespace in ("", space) and matches(item, selector)
        ]
        return copy.deepcopy(found)

    def since(
        self, collection: str, namespace: str, selector: str, version: int
    ) -> Iterator[Event]:
        for event in list(self.events):
            space = event.item["metadata"].get("namespace", "")
            if (
                event.version > version
                and event.collection == collection
                and namespace in ("", space)
                and matches(event.item, selector)
            ):
                yield event

    def get(self, place: Place) -> Json:
        if place not in self.items:
            raise Refusal(404, "NotFound", f'{place[0]} "{place[2]}" not found')
        return copy.deepcopy(self.items[place])

    async def create(self, place: Place, item: Json) -> Json:
        if place in self.items:
            raise Refusal(409, "AlreadyExists", f'{place[0]} "{place[2]}" already exists')
        item = copy.deepcopy(item)
        item["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": place[1], "name": place[2]}
        self.created.append((place, item["metadata"]["uid"]))
        return await self._write(place, item, "ADDED")

    async def replace(self, place: Place, item: Json) -> Json:
        before, metadata = self.get(place), item["metadata"]
        if (
            metadata.get("resourceVersion", before["metadata"]["resourceVersion"])
            != (before["metadata"]["resourceVersion"])
        ):
            raise Refusal(409, "Conflict", "the object has been modified")
        if metadata.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            raise Refusal(409, "Conflict", "Precondition failed: UID in precondition")
        metadata |= {key: before["metadata"][key] for key in ("uid", "namespace", "name")}
        if "deletionTimestamp" in before["metadata"] and not metadata.get("finalizers"):
            del self.items[place]
            return await self._write(place, copy.deepcopy(item), "DELETED")
        return await self._write(place, copy.deepcopy(item), "MODIFIED")

    async def patch(self, place: Place, patch: Json) -> Json:
        item = self.get(place)
        precondition = {
            key: patch.get("metadata", {}).get(key)
            for key in ("uid", "resourceVersion")
            if key in patch.get("metadata", {})
        }
        merge(item, patch)
        item["metadata"] |= precondition
        return await self.replace(place, item)

    async def delete(self, place: Place, uid: str) -> Json:
        item = self.get(place)
        if uid and item["metadata"]["uid"] != uid:
            raise Refusal(409, "Conflict", "Precondition failed: UID in precondition")
        if item["metadata"].get("finalizers"):
            item["metadata"].setdefault("deletionTimestamp", f"{datetime.now(UTC):%FT%TZ}")
            return await self._write(place, item, "MODIFIED")
        del self.items[place]
        return await self._write(place, item, "DELETED")

    async def _write(self, place: Place, item: Json, kind: str) -> Json:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind != "DELETED":
            self.items[place] = item
        self.events.append(
            Event(
                version=self.version,
                collection=place[0],
                kind=kind,
                item=copy.deepcopy(item),
            )
        )
        async with self.changed:
            self.changed.notify_all()
        return copy.deepcopy(item)


def merge(item: Json, patch: Json) -> None:
    """A merge patch."""
    for key, value in patch.items():
        if value is None:
            item.pop(key, None)
        elif isinstance(value, dict) and isinstance(item.get(key), dict):
            merge(item[key], value)
        else:
            item[key] = copy.deepcopy(value)


def matches(item: Json, selector: str) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = (part.partition("=") for part in selector.split(",") if part)
    return all(
        labels.get(name) == value if equal else name in labels for name, equal, value in wanted
    )

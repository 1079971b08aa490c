"""The slots of this node: whose they are, what they hold, and the memory that they may still take."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from elastic.agent.snapshots.replicas import Replicas
from elastic.agent.snapshots.vault import Kept
from elastic.proto import descriptors, slot
from elastic.proto.errors import ProtocolMismatch, SlotError
from elastic.proto.moment import Moment

Kind = Literal["own", "copy"]
_NOTE = "0/note/"
"""Begins the name of what is no slot, in the vault."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """One memfd, mapped; its name in the vault says whose it is."""

    name: str
    fd: int
    view: memoryview
    _seen: tuple[bytes, slot.Snapshot] | None = None

    @classmethod
    def of(cls, name: str, fd: int) -> "Slot":
        size = os.fstat(fd).st_size
        return cls(name=name, fd=fd, view=memoryview(mmap.mmap(fd, size)))

    @property
    def snapshot(self) -> slot.Snapshot | None:
        """What it holds, whole; its chunks are not verified."""
        page = bytes(self.view[: slot.PAGE])
        if self._seen is not None and self._seen[0] == page:
            return self._seen[1]
        self._seen = None
        with suppress(SlotError, ProtocolMismatch):
            self._seen = page, slot.read(self.view)
            return self._seen[1]
        return None

    @property
    def moment(self) -> Moment | None:
        snapshot = self.snapshot
        return None if snapshot is None else snapshot.moment

    @property
    def untouched(self) -> int:
        """Bytes of memory that it may still take."""
        return max(0, len(self.view) - os.fstat(self.fd).st_blocks * 512)


@dataclass(slots=True)
class Slots:
    """Those of one checkpoint."""

    own: dict[int, list[Slot]] = field(default_factory=dict[int, list[Slot]])
    """By local rank."""
    copy: dict[int, list[Slot]] = field(default_factory=dict[int, list[Slot]])
    """Replicas of other nodes' images, by global rank."""

    def __iter__(self) -> Iterator[Slot]:
        for slots in (*self.own.values(), *self.copy.values()):
            yield from slots

    def held(self) -> list[tuple[Slot, slot.Snapshot]]:
        """Those that hold something, and what. Looked at once: ranks write meanwhile."""
        return [(one, found) for one in self if (found := one.snapshot) is not None]


class Shelf:
    """All of this node. What it makes outlives the agent (`Vault`), and is served to other nodes."""

    def __init__(self, vault: Kept, replicas: Replicas, dropped: Callable[[], None]) -> None:
        """dropped: called when a slot is no more."""
        self._dropped = dropped
        self._vault = vault
        self._replicas = replicas
        self._slots: dict[str, Slots] = {}
        self._counter = 0
        for name, fd in vault.kept.items():  # of agents before us
            self._counter = max(self._counter, int(name.partition("/")[0]))
            if not name.startswith(_NOTE):
                self._put(Slot.of(name, fd))

    def checkpoints(self) -> list[str]:
        return list(self._slots)

    def of(self, checkpoint: str) -> Slots:
        return self._slots.setdefault(checkpoint, Slots())

    def touched(self) -> dict[int, list[int]]:
        """Descriptors of ranks' own slots that have all their memory, by local rank."""
        found: dict[int, list[int]] = {}
        for slots in self._slots.values():
            for local_rank, own in slots.own.items():
                fds = found.setdefault(local_rank, [])
                fds += [one.fd for one in own if not one.untouched]
        return found

    @property
    def untouched(self) -> int:
        """Bytes of memory that they may still take."""
        return sum(one.untouched for slots in self._slots.values() for one in slots)

    def make(self, checkpoint: str, kind: Kind, owner: int, size: int) -> Slot:
        """A new one; no page of it is touched. Raises OSError."""
        self._counter += 1
        name = f"{self._counter}/{kind}/{owner}/{checkpoint}"
        fd = slot.create(size)
        self._vault.keep(name, fd)
        made = Slot.of(name, fd)
        self._put(made)
        return made

    def _put(self, one: Slot) -> None:
        self._beside(one).append(one)
        self._replicas.hold(one.name, one.name.split("/", 3)[3], one.fd)

    def drop(self, one: Slot) -> None:
        """Give its memory back, once nobody maps it any more."""
        self._beside(one).remove(one)
        self._replicas.drop(one.name)
        self._vault.drop(one.name)
        self._dropped()

    def note(self, checkpoint: str, text: bytes) -> None:
        """Keep a few words on a checkpoint, in the place of what was kept before. Raises OSError."""
        self._vault.keep(_NOTE + checkpoint, descriptors.memory_file(text))

    def notes(self) -> list[tuple[str, bytes]]:
        """What was kept, by checkpoint."""
        return [
            (name.removeprefix(_NOTE), os.pread(fd, os.fstat(fd).st_size, 0))
            for name, fd in self._vault.kept.items()
            if name.startswith(_NOTE)
        ]

    def _beside(self, one: Slot) -> list[Slot]:
        """Those of the same owner, itself included."""
        _, kind, owner, checkpoint = one.name.split("/", 3)
        slots = self.of(checkpoint)
        return (slots.own if kind == "own" else slots.copy).setdefault(int(owner), [])

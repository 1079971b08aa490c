"""What a job does about its checkpoint at this instant, by what can be seen of it: locks on slots, files
on storage, what ranks have told."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest

from . import processes
from .job import Job, Node

KINDS = ("save", "flush", "commit", "replication", "deletion", "restore")
PATIENCE = 10.0
"""Seconds after which what takes a moment is taken to have been missed; steps go on meanwhile."""


class Moments:
    """Of a job of `scripts/saves.py`, of two ranks, on whose storage `keep` steps stay."""

    def __init__(self, job: Job, keep: int) -> None:
        self._job = job
        self._keep = keep
        self._storage = Folder(job.folder / "checkpoint")
        self._whole: set[int] = set()
        """Steps that had a manifest at the last look."""
        self._couriers: list[int] = []

    def refresh(self, nodes: Iterable[Node]) -> None:
        """Find the processes that are looked at; it takes a while."""
        parts = (p for node in nodes for p in processes.descendants(node.guardian))
        self._couriers = [p.pid for p in parts if "elastic-courier" in p.command]

    def under_way(self) -> set[str]:
        found = self._on_storage() | self._in_ranks(self._job.round())
        if _writes_slot(self._ranks()):
            found.add("save")
        if _writes_slot(self._couriers):
            found.add("replication")
        return found

    def _ranks(self) -> list[int]:
        return [line.pid for line in self._job.told("start", round=self._job.round())]

    def _in_ranks(self, number: int) -> set[str]:
        """A rank is between `loading` and `loaded`."""
        loading, loaded = (
            {line.pid for line in self._job.told(kind, round=number)}
            for kind in ("loading", "loaded")
        )
        return {"restore"} if loading - loaded else set()

    def _on_storage(self) -> set[str]:
        """A deletion is due from the commit on, and is itself the shortest of all."""
        listing = self._storage.listing()
        whole = {step for step, names in listing.items() if manifest.NAME in names}
        found = {"deletion"} if len(whole) > self._keep else set[str]()
        for step in listing.keys() - whole:
            shards = [name for name in listing[step] if name.startswith("shard-")]
            if step in self._whole:
                found.add("deletion")
            elif step > max(whole, default=0):
                found.add("commit" if len(shards) == 2 else "flush")
        self._whole = whole
        return found

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """From when it is under way, if it is seen: it may be over before."""
        deadline = time.monotonic() + PATIENCE
        if kind == "save":
            with self._held_in_save(deadline):
                yield
            return
        while kind not in self._seen(kind) and time.monotonic() < deadline:
            time.sleep(0.0005)
        yield

    def _seen(self, kind: str) -> set[str]:
        return self._in_ranks(self._job.round()) if kind == "restore" else self._on_storage()

    @contextmanager
    def _held_in_save(self, deadline: float) -> Iterator[None]:
        """Ranks stopped, one of them in a save, which is too short to be met while it goes on."""
        ranks = self._ranks()
        processes.kill(*ranks, number=signal.SIGSTOP)
        try:
            while not _writes_slot(ranks) and time.monotonic() < deadline:
                processes.kill(*ranks, number=signal.SIGCONT)
                time.sleep(0.0005)
                ranks = self._ranks()  # a round may have ended meanwhile
                processes.kill(*ranks, number=signal.SIGSTOP)
            yield
        finally:
            processes.kill(*ranks, number=signal.SIGCONT)


def _writes_slot(pids: Iterable[int]) -> bool:
    """One of them holds a slot's lock for writing (`elastic/proto/slot.py`)."""
    for pid in pids:
        with suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fdinfo"):
                with suppress(OSError):
                    info = Path(f"/proc/{pid}/fdinfo/{entry}").read_text()
                    if "OFDLCK" in info and "WRITE" in info:
                        return True
    return False

"""Messages between an agent and its flusher, the process that writes snapshots to storage.

Over datagrams (`datagrams.py`), a memfd beside one where it is named.

| direction        | message    | descriptor                    | when                             |
|------------------|------------|-------------------------------|----------------------------------|
| agent to flusher | `Write`    | the slot                      |                                  |
|                  | `Commit`   | a memfd with the manifest     | all shards are on storage        |
|                  | `Delete`   |                               | something was committed          |
|                  | `Look`     |                               | somebody wants to go back        |
| flusher to agent | `Progress` |                               | each second or so of a `Write`   |
|                  | `Done`     |                               |                                  |
|                  | `Found`    |                               |                                  |
|                  | `Failed`   |                               |                                  |
"""

from dataclasses import dataclass, field

from elastic.proto.terms import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Write a slot's image to a file, for good."""

    id: int
    checkpoint: str
    """Path or URL."""
    storage_options: str = field(default="{}", repr=False)
    job: str
    """Its own id."""
    round: int
    """Of the snapshot that the slot must hold."""
    step: int
    file: str
    """Its name in the step's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Write a manifest, whole or not at all."""

    id: int
    checkpoint: str
    storage_options: str = field(default="{}", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete the steps that no rule keeps, and what a crash has left."""

    id: int
    checkpoint: str
    storage_options: str = field(default="{}", repr=False)
    retention: Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """It is not done yet, and going on."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Whether a step of a checkpoint is committed."""

    id: int
    checkpoint: str
    storage_options: str = field(default="{}", repr=False)
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was looked for, and by which job it was saved in which round."""

    id: int
    job: str
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It is on storage, synced."""

    id: int
    bytes: int = 0
    digest: int = 0
    """xxh3 of the file's table of checksums."""
    value: float | None = None
    """Of the snapshot, as its script gave it."""
    committed: bool = False
    """All of its moment is: there is a manifest that says so; of a `Commit`, none where there is one of a
    later moment already."""
    beside: str = ""
    """Of a `Commit`: another job that commits to the same checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Why not, in one sentence."""

    id: int
    error: str
    damaged: bool = False
    """What was to be written is not there, or not what it was: no use to try again."""


ToFlusher = Write | Commit | Delete | Look
ToAgent = Progress | Done | Found | Failed

"""Messages between a rank's `Checkpointer` and the keeper of its slots: its agent, or a keeper process.

A SOCK_SEQPACKET pair that the rank makes, whose other end it passes on over its link. One
message a datagram (`datagrams.py`), the first of them `Open`; descriptors travel beside it. A
question has a number, which its answer repeats: one that comes too late is nobody's.

| direction      | message    | descriptors   | when                                                   |
|----------------|------------|---------------|--------------------------------------------------------|
| rank to keeper | `Open`     |               | first                                                  |
|                | `Need`     |               | before the first save; again where the state grows     |
|                | `Held`     |               | a snapshot is committed in its slot                    |
|                | `Written`  |               | one is on storage without ever having been in a slot   |
|                | `Failed`   |               | one that was to be persisted will not be there         |
|                | `Skipped`  |               | one is left out                                        |
|                | `Shed`     |               | its slots cannot be used: no memory for their pages    |
|                | `Load`     |               | to know what to load                                   |
|                | `Looked`   |               | what is on storage, as `Look` has asked                |
|                | `Damaged`  |               | nothing is left of what `Restore` named; ended for it  |
|                | `Doubted`  |               | what this round has saved may be wrong                 |
|                | `Saved`    |               | at the end of a save, and while it waits there         |
| keeper to rank | `Slots`    | one a slot    | the answer to `Need`                                   |
|                | `Look`     |               | to rank 0's `Load`: that it is to look on storage first |
|                | `Restore`  | one an image  | the answer to `Load`, once all ranks of the job asked  |
|                | `Whole`    |               | a newer moment is in every rank's memory               |
|                | `Committed`|               | a newer moment is on storage                           |
|                | `Stalled`  |               | storage fails, or works again                          |
|                | `Lost`     |               | a moment is never whole that was to be                 |
|                | `LeftOut`  |               | which moments ranks have left out                      |
|                | `Leave`    |               | at which step to wait for this round's end             |
|                | `Noted`    |               | the answer to `Doubted`: nothing of it is loaded again |
|                | `Refused`  |               | what was asked for cannot be had, and why              |
"""

import socket
from dataclasses import dataclass, field
from typing import Any

from elastic.proto import datagrams, version
from elastic.proto.courier import Tls
from elastic.proto.errors import CodecError, LinkError
from elastic.proto.terms import Terms

MOST_FDS = 250
"""Beside one datagram; the kernel's limit is 253."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Who speaks, and of which checkpoint."""

    version: str
    checkpoint: str
    """Where it is on storage; what tells two of one job apart."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    replicate: bool = True
    """Another node keeps a copy, where there is one."""
    bandwidth: int | None = None
    """Bytes a second that a node may take in of such copies; None: no limit."""
    read_only: bool = False
    """It only loads, so its terms count for nothing."""
    terms: Terms = field(default_factory=Terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Slots of so many bytes."""

    bytes: int
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A slot holds a new snapshot, or one that is now to be written to storage; it says so itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """This rank's image of a step of its round is on storage, and in no slot."""

    step: int
    bytes: int
    digest: int
    """xxh3 of its table of checksums."""
    value: float | None = None
    """By which the best are kept."""
    beliefs: tuple[tuple[int, int], ...] = ()
    """As in a slot (`proto/slot.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """This rank has nothing of a step of its round that was to be persisted; `Held` or `Written`, where
    it is saved once more, take that back."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """This rank has no snapshot of a step of its round that was not to be persisted, and takes none."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """It has given its slots up: what they hold that nobody needs is memory for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be loaded: that step, or the newest."""

    step: int | None = None
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What of that `Load` is committed on storage."""

    job: str = ""
    """Whose it is."""
    round: int = 0
    step: int = 0
    """0: nothing is."""
    error: str = ""
    """Why nothing is taken from there, though there is something, or that cannot be known."""
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """What was to be loaded cannot be, with no good copy anywhere. The answer is the end of this process,
    and a round that loads something else."""

    round: int
    step: int
    from_memory: bool
    what: str
    """In words: file and tensor."""
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """What this round has saved after a step is not to be trusted."""

    after: int
    ranks: tuple[int, ...]
    """That may be wrong."""
    what: str
    """In words."""
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """It is on its way to the master, ahead of all that is heard of this rank."""

    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The save of that step has ended, or waits where it ends."""

    step: int
    waits: int = 0
    """The number of the `Leave` by which it waits; 0: the rank goes on."""
    lost: str = ""
    """Why the step in whose save it waits is kept nowhere; empty: it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """This rank's, in the order of their descriptors."""

    count: int
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A moment on storage that turned out to be damaged; the round of another job's is 0."""

    round: int
    step: int
    what: str
    later: bool = False
    """And all that its round has saved after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Memory does not tell what is loaded: say what is on storage, but for what is damaged."""

    damaged: tuple[Bad, ...] = ()
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What every rank loads. `step` 0: nothing, it begins anew."""

    round: int
    """Of the snapshot."""
    step: int
    from_memory: bool = False
    images: int = 0
    """Slots of this node that hold it: as many descriptors."""
    elsewhere: bool = False
    """One descriptor more, of a file with `Sources`."""
    error: str = ""
    """Why nothing is loaded, where that is no beginning."""
    question: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Another node's courier, and what it has."""

    base: str
    ranks: tuple[int, ...]
    needed: bool
    """This node has no image of these ranks; else only where ours is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is to be loaded and is in other nodes' memory."""

    sources: tuple[Source, ...]
    tls: Tls | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The newest moment that is in every rank's memory: its slot must not be written to."""

    round: int
    step: int
    keep: tuple[tuple[int, int], ...] = ()
    """Rounds and steps of others that must not be, either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The newest moment that is on storage for good."""

    round: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """Something of this node is not on storage yet. Empty: that is over."""

    reason: str = ""
    tries: int = 0
    """How many were in vain so far; said after each."""
    lost: tuple[int, int] | None = None
    """Round and step of what will never be there; None: it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A moment that is never whole."""

    round: int
    step: int
    reason: str
    """Which rank has nothing of it, or what differs between which ranks of a node."""
    apart: bool = False
    """Those are this node's: each of them writes all that it has from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """The newest moments that some rank has left out."""

    spans: tuple[tuple[int, int, int], ...]
    """Round, first and last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Wait in the first save of `step` or beyond it, until another `Leave` or this process's end."""

    order: int = 0
    """Its number."""
    step: int = 0
    """0: wait nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why not, in one sentence."""

    reason: str
    question: int = 0


Question = Need | Load | Looked | Damaged | Doubted
ToKeeper = Open | Held | Written | Failed | Skipped | Shed | Saved | Question
Answer = Slots | Look | Restore | Noted | Refused
"""Each to one question."""
ToRank = Answer | Whole | Committed | Stalled | Lost | LeftOut | Leave


def opening(
    *,
    checkpoint: str,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    terms: Terms,
    replicate: bool = True,
    bandwidth: int | None = None,
    read_only: bool = False,
) -> Open:
    """Of this version."""
    return Open(
        version=str(version.LINK),
        checkpoint=checkpoint,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        terms=terms,
        replicate=replicate,
        bandwidth=bandwidth,
        read_only=read_only,
    )


def check(message: Open) -> None:
    """Raises `ProtocolMismatch` or `LinkError` where the rank speaks another language."""
    try:
        message.checkpoint.encode()
    except UnicodeEncodeError as error:
        raise LinkError("a checkpoint's path is no UTF-8") from error
    if message.bandwidth is not None and message.bandwidth < 1:
        raise LinkError(f"a bandwidth of {message.bandwidth} bytes a second copies nothing")
    theirs = version.parse(message.version)
    if theirs is None:
        raise LinkError("a checkpointer names no version")
    version.check("the checkpointer", theirs, version.LINK)


def send(end: socket.socket, message: ToKeeper | ToRank, fds: tuple[int, ...] = ()) -> None:
    """Raises OSError; BlockingIOError where there is no room now."""
    datagrams.send(end, message, fds)


def receive_from_rank(end: socket.socket) -> ToKeeper | None:
    """The next message; None at the end. Raises `LinkError`, OSError."""
    found = _receive(end, ToKeeper, 0)
    return None if found is None else found[0]


def receive_from_keeper(end: socket.socket) -> tuple[ToRank, list[int]] | None:
    """The next message and its descriptors; None at the end. Raises `LinkError`, OSError."""
    return _receive(end, ToRank, MOST_FDS)


def _receive(end: socket.socket, kind: object, most_fds: int) -> tuple[Any, list[int]] | None:
    try:
        return datagrams.receive(end, kind, most_fds)
    except CodecError as error:
        raise LinkError(f"a message about snapshots is {error}") from error

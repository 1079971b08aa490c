"""Messages of keeper processes, which keep the snapshots of ranks that `elastic-run` did not start.

One keeper a node and `Checkpointer`. On a node they listen under names in the abstract Unix namespace
(`prefix`), SOCK_SEQPACKET, one JSON object a datagram (`codec.py`), for their own user only:

| direction                | message   | when                                                       |
|--------------------------|-----------|------------------------------------------------------------|
| rank to keeper           | `Join`    | first; after `Welcome` go on as in `keeper.py`             |
| a later run's to keeper  | `Await`   | closed at once while ranks are here, else with the keeper  |
| keeper to rank           | `Welcome` | all ranks of the job are here                              |
|                          | `Refused` | they are not, and why                                      |

Between nodes a TCP connection to rank 0's keeper, on which a `Greeting` is answered by `Welcome` or
`Refused`, a line of JSON each. After that come frames: 4 bytes of length, big-endian, then a `FromAgent`
or a `ToAgent` of `master.proto`: `Snapshots`, at the end `Leaving`; `SnapshotOrders`.
"""

import asyncio
import hashlib
import os
import socket
import struct
from dataclasses import dataclass

from google.protobuf.message import Message

from elastic.proto import codec
from elastic.proto.limits import MAX_ANSWER

DATAGRAM = 1 << 12
"""Bytes of a datagram or a line, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a keeper is started with, in a memfd."""

    checkpoint: str
    job: str
    """An id of this start of all ranks."""
    round: int
    rank: int
    """The first of this node."""
    local_world_size: int
    world_size: int
    timeout: float
    """Seconds that the ranks may take to come together."""
    listener: int
    """Descriptor of the Unix socket."""
    peers: int | None = None
    """Descriptor of a TCP socket: where rank 0's keeper listens, or the connection to it of another;
    None: the job has one node."""
    secret: str = ""
    """Of rank 0's keeper: by which it knows the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A rank of this start has made its checkpointer."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Who sends it is to go on from what an earlier start leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Of another node's keeper."""

    version: str
    """WIRE."""
    secret: str
    rank: int
    """The first of its node."""
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All ranks of the job are here."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why not, in one sentence."""

    reason: str


Request = Join | Await
Answer = Welcome | Refused


def prefix(checkpoint: str) -> str:
    """How the names of its keepers of this user begin."""
    digest = hashlib.sha256(f"{os.getuid()}:{checkpoint}".encode()).hexdigest()
    return f"elastic-keeper-{digest[:16]}-"


def peer_uid(end: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", found)
    return int(uid)


def line(message: Greeting | Answer) -> bytes:
    return codec.dumps(message).encode() + b"\n"


def frame(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return len(data).to_bytes(4, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The bytes of the next message. Raises EOFError at the end, ValueError where it is too long."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_ANSWER:
        raise ValueError(f"a message of {length} bytes is too long")
    return await reader.readexactly(length)

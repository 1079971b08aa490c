"""`python -m elastic.checkpoint.storage.flusher FD`: snapshots to storage, behind training's back.

One for each checkpoint, at low priority, and one file at a time: disks are no faster for more. What it
reads from a slot is verified on the way, so damage in memory never becomes a checkpoint. Needs no torch.
"""

import functools
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from time import monotonic

import psutil
from setproctitle import setproctitle

from elastic.agent.prctl import set_pdeathsig
from elastic.checkpoint.storage import manifests, retention
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import PIECE, Storage, words
from elastic.checkpoint.storage.retention import Stored
from elastic.proto import datagrams, manifest, slot, sums
from elastic.proto.errors import CheckpointError, ElasticError, SlotError
from elastic.proto.flusher import (
    Commit,
    Delete,
    Done,
    Failed,
    Found,
    Look,
    Progress,
    ToFlusher,
    Write,
)
from elastic.proto.slot import Snapshot

NICE = 10
LOWEST = 7
"""Of the disk's priorities, among those that are served at all while others write."""
PROGRESS = 1.0
"""Seconds between two words of it."""
_BLOCK = 4096
"""Direct writes begin and end at multiples of this many bytes."""

_connect = functools.cache(connect)


def main(args: list[str]) -> None:
    """Serve the agent at the other end of the descriptor `args[0]`, and end with it."""
    end = socket.socket(fileno=int(args[0]))
    set_pdeathsig()
    setproctitle("elastic-flusher")
    os.nice(NICE)
    with suppress(OSError, psutil.Error):  # some sandboxes have no priorities
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, LOWEST)
    while (received := datagrams.receive(end, ToFlusher, 1)) is not None:
        message, fds = received
        try:
            storage = _connect(message.checkpoint, message.storage_options)
            match message:
                case Write():
                    answer: Done | Found | Failed = _write(end, storage, message, fds[0])
                case Commit():
                    answer = _commit(storage, message, fds[0])
                case Delete():
                    answer = _delete(storage, message)
                case Look():
                    answer = _look(storage, message)
        except (OSError, ElasticError, IndexError) as error:
            gone = isinstance(error, SlotError)
            answer = Failed(id=message.id, error=words(error), damaged=gone)
        for fd in fds:
            os.close(fd)
        datagrams.send(end, answer)


# --- shards --------------------------------------------------------------------------------------


def _write(end: socket.socket, storage: Storage, message: Write, fd: int) -> Done:
    """A slot's image as a file. Raises OSError, `SlotError`."""
    claim = slot.claim(fd, exclusive=False)
    if claim is None:
        raise SlotError("the slot is being written")
    try:
        memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
        snapshot = slot.read(memory)
        stamp, size = snapshot.stamp, len(snapshot.image)
        if (stamp.round, stamp.step) != (message.round, message.step):
            raise SlotError(f"the slot holds step {stamp.step}, not {message.step}")
        table = snapshot.image[size - sums.ENTRY * len(snapshot.chunks) :]
        done = Done(id=message.id, bytes=size, digest=sums.checksum(table), value=stamp.value)
        if storage.has(message.step, message.file, size, table):
            return replace(done, committed=_committed(storage, message, done))
        pieces = _told(end, message.id, _verified(snapshot, memory[slot.PAGE :]))
        storage.write(message.step, message.file, pieces, size)
        return done
    finally:
        os.close(claim)


def _committed(storage: Storage, message: Write, done: Done) -> bool:
    """There is a manifest that names the file."""
    there = manifests.sound(storage, message.step)
    return (
        there is not None
        and (there.job, there.round) == (message.job, message.round)
        and any(
            (shard.file, shard.bytes, shard.digest) == (message.file, done.bytes, done.digest)
            for shard in there.shards
        )
    )


def _verified(snapshot: Snapshot, data: memoryview) -> Iterator[memoryview]:
    """An image in pieces, each once its chunks are found to be what was written.

    data: begins with the image, and goes on up to a multiple of a block; so do the pieces.
    """
    start = given = 0
    for end, expected in snapshot.chunks:
        if sums.checksum(data[start:end]) != expected:
            rank = snapshot.stamp.rank
            raise SlotError(f"bytes {start} to {end} in the slot of rank {rank} are damaged")
        start = end
        while start - given >= PIECE:
            yield data[given : given + PIECE]
            given += PIECE
    whole = -(-len(snapshot.image) // _BLOCK) * _BLOCK
    for at in range(given, whole, PIECE):
        yield data[at : min(at + PIECE, whole)]


def _told(end: socket.socket, number: int, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same, while the agent is told that they are taken."""
    said = monotonic()
    for piece in pieces:
        yield piece
        if monotonic() - said > PROGRESS:
            said = monotonic()
            datagrams.send(end, Progress(id=number))


# --- manifests -----------------------------------------------------------------------------------


def _commit(storage: Storage, message: Commit, fd: int) -> Done:
    """A manifest, unless another life of the agent has had it written. Raises OSError."""
    told = manifest.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    committed = manifests.commit(storage, told)
    return Done(id=message.id, committed=committed.done, beside=committed.beside)


def _look(storage: Storage, message: Look) -> Found:
    """Raises OSError, `CheckpointError`."""
    found = manifests.committed(storage, message.step)
    if found is None:
        raise CheckpointError(f"{message.checkpoint} has no step {message.step}")
    return Found(id=message.id, job=found.job, round=found.round)


# --- deletion ------------------------------------------------------------------------------------


def _delete(storage: Storage, message: Delete) -> Done:
    """A step's manifest goes first, so that at no time half of a step is taken for one."""
    listing = storage.listing()
    known, _ = manifests.readable(storage, [s for s, n in listing.items() if manifest.NAME in n])
    stored = [
        Stored(
            step=one.step, sequence=one.sequence, round=one.round, value=one.value,
            pinned=manifest.PIN in listing[one.step],
        )
        for one in known
    ]  # fmt: skip
    for step in retention.spent(stored, message.retention):
        if _pinned(storage, step):  # since a moment ago
            continue
        storage.delete(step, [manifest.NAME])
        storage.delete(step, retention.ours(listing.pop(step)))
        storage.drop(step)
    for step, left in retention.leftovers(listing, known, known[0]).items() if known else ():
        storage.delete(step, left)
        storage.drop(step)
    return Done(id=message.id)


def _pinned(storage: Storage, step: int) -> bool:
    """Raises OSError where that cannot be known."""
    try:
        storage.open(step, manifest.PIN)
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m elastic.checkpoint.flusher FD`: writes snapshots to storage, behind training's back.

One a node, at low priority, and one file at a time: disks are no faster for more. What it reads from a
slot is verified on the way, so damage in memory never becomes a checkpoint. Needs no torch.
"""

import contextlib
import mmap
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

from setproctitle import setproctitle

from elastic.agent.prctl import set_pdeathsig
from elastic.checkpoint import manifests
from elastic.proto import flusher, manifest, slot, sums
from elastic.proto.errors import ElasticError, SlotError
from elastic.proto.flusher import Commit, Done, Failed, ToFlusher, Write

NICE = 10
PIECE = 16 << 20
"""Bytes of one write."""
_BLOCK = 4096
"""Direct writes begin and end at multiples of this many bytes."""


def main(args: list[str]) -> None:
    """Serve the agent at the other end of the descriptor `args[0]`, and end with it."""
    end = socket.socket(fileno=int(args[0]))
    set_pdeathsig()
    setproctitle("elastic-flusher")
    os.nice(NICE)
    while (received := flusher.receive(end, ToFlusher)) is not None:
        message, fds = received
        try:
            if isinstance(message, Write):
                answer: Done | Failed = _write(message, fds[0])
            elif isinstance(message, Commit):
                answer = _commit(message, fds[0])
            else:
                continue
        except (OSError, ElasticError, IndexError) as error:
            gone = isinstance(error, SlotError)
            answer = Failed(id=message.id, error=_words(error), damaged=gone)
        for fd in fds:
            os.close(fd)
        flusher.send(end, answer)


def _write(message: Write, fd: int) -> Done:
    """A slot's image as a file. Raises OSError, `SlotError`."""
    claim = slot.claim(fd, exclusive=False)
    if claim is None:
        raise SlotError("the slot is being written")
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        snapshot = slot.read(memoryview(memory))
        stamp = snapshot.stamp
        if (stamp.round, stamp.step) != (message.round, message.step):
            raise SlotError(f"the slot holds step {stamp.step}, not {message.step}")
        if damaged := sums.verify(snapshot.image, snapshot.chunks):
            raise SlotError(f"{len(damaged)} chunks of the slot of rank {stamp.rank} are damaged")
        path = Path(message.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_file(path, memoryview(memory)[slot.PAGE :], len(snapshot.image))
        table = snapshot.image[len(snapshot.image) - sums.ENTRY * len(snapshot.chunks) :]
        return Done(id=message.id, bytes=len(snapshot.image), digest=sums.checksum(table))
    finally:
        os.close(claim)


def _write_file(path: Path, data: memoryview, size: int) -> None:
    """The first `size` bytes of `data`, which goes on up to a multiple of a block, synced with its
    folder. Under its name only once all of it is there: an agent that died may have had it written,
    and committed, and the next one cannot know."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    draft = path.with_name(f".{path.name}.{socket.gethostname()}")  # the next life writes over it
    try:
        fd, whole = os.open(draft, flags | os.O_DIRECT, 0o644), -(-size // _BLOCK) * _BLOCK
    except OSError:  # tmpfs and some network file systems have no direct writes
        fd, whole = os.open(draft, flags, 0o644), size
    try:
        at = 0
        while at < whole:
            at += os.pwrite(fd, data[at : min(at + PIECE, whole)], at)
        os.ftruncate(fd, size)
        os.fsync(fd)
        os.rename(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()  # half of a file is of no use, and takes room
        raise
    finally:
        os.close(fd)
    _sync(path.parent)
    _sync(path.parent.parent)


def _commit(message: Commit, fd: int) -> Done:
    """A manifest, under its name only once all of it is on storage. Raises OSError."""
    path = Path(message.path)
    told = manifest.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    last = manifests.committed(path.parent.parent)
    told = replace(told, sequence=1 if last is None else last.sequence + 1)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}")
    try:
        with open(draft, "wb") as file:
            file.write(manifest.dumps(told).encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    _sync(path.parent)
    return Done(id=message.id)


def _sync(folder: Path) -> None:
    """What names are in it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


if __name__ == "__main__":
    main(sys.argv[1:])

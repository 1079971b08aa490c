"""Files that are whole or not there, whatever dies and whoever else writes."""

import fcntl
import glob
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.proto.claims import claim

_BEYOND = 1 << 62
"""The byte of a draft that is locked: on SMB nobody else may write to those that are."""


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Give a draft's path to write to; on leaving, make it durable and put it in place of `path`.

    The draft has a name of its own, so that several processes may write the same `path`: the last
    one wins. On an exception the draft is removed and `path` stays as it was.
    """
    handle, draft = _locked_draft(path)
    try:
        yield draft
        draft.chmod(0o644)  # mkstemp's 0600 would hide a shared directory's files from others
        _sync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    _sync(path.parent)  # the rename itself


def remove_drafts(path: Path) -> None:
    """Those of `path` whose writers were killed: who lives holds the lock of its draft.

    Of this host's writers: some file systems' locks hold on one node alone, and there others are not seen.
    """
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*{glob.escape(_suffix())}"):
        with suppress(OSError), draft.open("r+b") as file:  # another's, gone, or no locks
            if claim(file.fileno(), exclusive=True, start=_BEYOND, size=1):
                draft.unlink()


def _locked_draft(path: Path) -> tuple[int, Path]:
    """A new one, and what holds its lock until it is closed, by the kernel where we are killed."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_suffix(), dir=path.parent)
        ours = True
        with suppress(OSError):  # a file system without locks, where nobody removes it, either
            ours = claim(handle, exclusive=True, start=_BEYOND, size=1)
        if ours and os.path.exists(name):  # else it was taken for a dead one's before it was locked
            return handle, Path(name)
        os.close(handle)


def _suffix() -> str:
    """Of a draft's name: whose it is."""
    return f"@{socket.gethostname()}.draft"


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold the file lock `lock`, waiting for whoever has it; the kernel frees a dead holder's."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

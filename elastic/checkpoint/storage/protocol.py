"""Where a checkpoint is, whatever that is: its name, what is asked of it, what is said of its errors. Needs
no torch. Everything raises OSError, also what a driver raises that is none."""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

PIECE = 1 << 20
"""Bytes of one write to a disk: whoever syncs a small file meanwhile, the master's journal say, waits for
those that are on their way."""
LOOKS = 16
"""Questions to a storage at a time."""
URL = re.compile(r"[A-Za-z][\w+.-]*(::.+)?://")
_LOCAL = re.compile(r"(file|local)://")


class Damaged(OSError):
    """A file is not what was written, or its disk cannot give it: another try would find the same."""


def lasting(error: Exception) -> bool:
    """What is wrong is wrong with a file; else with the way to it, and may be over in a moment."""
    own = Damaged | FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    return not isinstance(error, OSError) or isinstance(error, own)


class File(Protocol):
    """A file that is read."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def read(self, start: int, end: int) -> memoryview:
        """Those bytes, to be read only; may be called by several threads at a time.

        Raises OSError; `Damaged` where it is the file's own fault.
        """
        ...


class Storage(Protocol):
    """The folders of a checkpoint's steps, and the files in them."""

    url: str

    def listing(self) -> dict[int, set[str]]:
        """The names of each step's files, as they are now; empty where there is nothing yet."""
        ...

    def open(self, step: int, name: str) -> File: ...

    def has(self, step: int, name: str, size: int, end: memoryview) -> bool:
        """Whether `write` has been done with a file of that size whose last bytes are those."""
        ...

    def write(self, step: int, name: str, pieces: Iterable[memoryview], size: int) -> None:
        """A large file, for good, under its name only once all of it is there.

        pieces: its bytes in order, up to `size`; those beyond are not written. Of a multiple of 4096
        bytes each where they are to go to a disk directly.
        """
        ...

    def publish(self, step: int, name: str, data: bytes, *, over: bool = False) -> None:
        """A small file, whole or not at all, for good.

        over: in the place of another; else an object store refuses it (FileExistsError) where another
        has been quicker.
        """
        ...

    def delete(self, step: int, names: Iterable[str]) -> None:
        """For good; one that is gone already is no error."""
        ...

    def drop(self, step: int) -> None:
        """Remove the folder of a step, if it is empty."""
        ...


def canonical(path: str | os.PathLike[str]) -> str:
    """What everybody calls a checkpoint: an absolute path, or a URL."""
    text = os.fspath(path)
    if found := _LOCAL.match(text):
        text = text[found.end() :]
    elif URL.match(text):
        return text.rstrip("/")
    return os.path.abspath(text)


def folder(path: str | os.PathLike[str]) -> Path | None:
    """The folder that a checkpoint is; None where it lies behind a URL."""
    where = canonical(path)
    return None if URL.match(where) else Path(where)


def words(error: Exception) -> str:
    """One line of what is wrong with a storage, without the file's name, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(said.split())[:500] + _ADVICE.get(number or 0, "")


_ADVICE = {
    errno.ENOSPC: ": make room there",
    errno.EDQUOT: ": make room there",
    errno.EACCES: ": let this user write there",
    errno.EPERM: ": let this user write there",
    errno.EROFS: ": let this user write there",
    errno.EIO: ": look at its disk",
}


def ends(storage: Storage, step: int, name: str, size: int, end: memoryview) -> bool:
    """A file of that size and with that end has its name."""
    try:
        file = storage.open(step, name)
        return file.size == size and file.read(size - len(end), size) == end
    except OSError:
        return False  # who writes it anew is told what there is to be told

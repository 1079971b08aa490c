"""Where a checkpoint is: a folder of a file system, or whatever fsspec speaks. Needs no torch.

Everything raises OSError, also what a driver raises that is none.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic.proto import manifest
from elastic.proto.errors import CheckpointError, ElasticError

PIECE = 1 << 20
"""Bytes of one write to a disk: whoever syncs a small file meanwhile, the master's journal say, waits for
those that are on their way."""
AT_ONCE = 2
"""Pieces of a file on their way to a disk."""
LOOKS = 16
"""Questions to a storage at a time."""
PART = 64 << 20
"""Bytes of one part of an object."""
SMALL = 1 << 20
"""Bytes of a read for which zeroed memory costs nothing."""
_libc = ctypes.CDLL(None, use_errno=True)
_URL = re.compile(r"[A-Za-z][\w+.-]*(::.+)?://")
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
    elif _URL.match(text):
        return text.rstrip("/")
    return os.path.abspath(text)


def connect(url: str, options: str = "{}") -> Storage:
    """The storage of a checkpoint, by its canonical name; options: JSON, for its driver.

    Nothing is asked of it yet. Raises `CheckpointError` where there is no driver for it.
    """
    given = json.loads(options)
    if not _URL.match(url):
        if given:
            raise CheckpointError(
                f"storage_options are for URLs: {url} is a folder, and takes none"
            )
        return Folder(Path(url))
    from fsspec.core import url_to_fs  # not needed for folders

    try:
        with _driver():
            fs, root = url_to_fs(url, **given)
    except OSError as error:
        cause = error.__cause__  # fsspec: "Install s3fs to access S3"
        raise CheckpointError(f"{url} cannot be used: {cause or error}") from error
    return Objects(url, fs, root.rstrip("/"))


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


def _ends(storage: Storage, step: int, name: str, size: int, end: memoryview) -> bool:
    """A file of that size and with that end has its name."""
    try:
        file = storage.open(step, name)
        return file.size == size and file.read(size - len(end), size) == end
    except OSError:
        return False  # who writes it anew is told what there is to be told


# --- a folder ------------------------------------------------------------------------------------


class _Opened:
    """Read, not mapped: a disk that fails and a file that is cut are errors then, and no SIGBUS."""

    def __init__(self, path: Path) -> None:
        with _disk():
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read(self, start: int, end: int) -> memoryview:
        data = _room(end - start)
        at = 0
        while at < len(data):
            with _disk():
                count = os.preadv(self._fd, [data[at:]], start + at)
            if not count:
                raise Damaged(f"it ends after {start + at} bytes")
            at += count
        return data


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """What a disk cannot give is damaged."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise Damaged(error.errno, error.strerror) from error
        raise


def _room(size: int) -> memoryview:
    """Memory that may be written; a chunk's is not zeroed first."""
    if size <= SMALL:
        return memoryview(bytearray(max(0, size)))
    import numpy as np  # what only looks at manifests does without

    return np.empty(size, np.uint8).data


class Folder:
    """A file system: direct writes, drafts and renames, folders synced."""

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root

    def _path(self, step: int, name: str = "") -> Path:
        return Path(self._root, manifest.folder(step), name)

    def listing(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return {}
        for name in names:
            step = manifest.step_of(name)
            if step is not None:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    try:
                        found[step] = set(os.listdir(self._path(step)))
                    except PermissionError:
                        found[step] = {manifest.NAME}  # who reads it is told why that cannot be
        return found

    def open(self, step: int, name: str) -> File:
        return _Opened(self._path(step, name))

    def has(self, step: int, name: str, size: int, end: memoryview) -> bool:
        if not _ends(self, step, name, size, end):
            return False
        _sync(self._path(step))  # whoever gave it its name may have died of it
        return True

    def write(self, step: int, name: str, pieces: Iterable[memoryview], size: int) -> None:
        with self._draft(step, name) as fd:
            _reserve(fd, size)
            _put(fd, pieces)
            os.ftruncate(fd, size)

    def publish(self, step: int, name: str, data: bytes, *, over: bool = False) -> None:
        with self._draft(step, name) as fd:
            _put(fd, [memoryview(data)])

    @contextlib.contextmanager
    def _draft(self, step: int, name: str) -> Iterator[int]:
        """A new file, that has its name only once all of it is synced: whoever looks meanwhile, and
        whoever has the one before open, is not disturbed."""
        path = self._path(step, name)
        _make(path.parent)
        draft = path.with_name(manifest.draft(name, socket.gethostname()))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            fd = os.open(draft, flags | os.O_DIRECT, 0o644)
        except OSError:  # tmpfs and some network file systems have no direct writes
            fd = os.open(draft, flags, 0o644)
        try:
            yield fd
            os.fsync(fd)
            os.rename(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()  # half of a file is of no use, and takes room
            raise
        finally:
            os.close(fd)
        _sync(path.parent)

    def delete(self, step: int, names: Iterable[str]) -> None:
        for name in names:
            self._path(step, name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            _sync(self._path(step))

    def drop(self, step: int) -> None:
        try:
            self._path(step).rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise


def _reserve(fd: int, size: int) -> None:
    """Room for a file of that size, where that can be had: a disk that is too full says so before anything
    is written, and of a file that does not grow, several pieces can be on their way at a time.

    Not `os.posix_fallocate`, which writes zeros where the file system has no such thing.
    """
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def _put(fd: int, pieces: Iterable[memoryview]) -> None:
    """Write pieces one after the other, while the next ones are made."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting: deque[Future[None]] = deque()
        at = 0
        for piece in pieces:
            if len(waiting) == AT_ONCE:
                waiting.popleft().result()
            waiting.append(pool.submit(_put_piece, fd, piece, at))
            at += len(piece)
        for one in waiting:
            one.result()


def _put_piece(fd: int, piece: memoryview, at: int) -> None:
    while piece:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            done = os.pwrite(fd, piece, at)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # some file systems say only now that they have no direct writes, or not of that size
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if not flags & os.O_DIRECT:
            os.fdatasync(fd)  # or gigabytes gather, and whoever else syncs waits for them
        piece, at = piece[done:], at + done


def _make(folder: Path) -> None:
    """A folder that is there after a crash too, with every one above it that was missing."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *missing):
        _sync(path.parent)


def _sync(folder: Path) -> None:
    """What names are in it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- an object store -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Object:
    fs: Any
    path: str
    size: int

    def read(self, start: int, end: int) -> memoryview:
        if start >= end:
            return memoryview(b"")
        with _driver():
            data = self.fs.cat_file(self.path, start=start, end=end)
        if len(data) != end - start:
            raise Damaged(f"it ends after {start + len(data)} bytes")
        return memoryview(bytearray(data))  # torch takes what may be written to


class Objects:
    """What fsspec speaks. An object is there, whole, or not: nothing is renamed, which would be a copy.
    Listings are made anew each time."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.url = url
        self._fs = fs
        self._root = root

    def _path(self, step: int, name: str = "") -> str:
        return "/".join(filter(None, (self._root, manifest.folder(step), name)))

    def listing(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        with _driver(), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            for path in self._fs.find(self._root):
                folder, _, name = path[len(self._root) :].strip("/").partition("/")
                step = manifest.step_of(folder)
                if step is not None and name and "/" not in name:
                    found.setdefault(step, set()).add(name)
        return found

    def open(self, step: int, name: str) -> File:
        path = self._path(step, name)
        with _driver():
            self._fs.invalidate_cache()
            return _Object(self._fs, path, int(self._fs.info(path)["size"]))

    def has(self, step: int, name: str, size: int, end: memoryview) -> bool:
        return _ends(self, step, name, size, end)

    def write(self, step: int, name: str, pieces: Iterable[memoryview], size: int) -> None:
        with _driver():
            file = self._create(self._path(step, name))
            try:
                for piece in pieces:
                    file.write(piece[: size - file.tell()])
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                    file.closed = True  # or its end would make an object of what is there
                raise

    def _create(self, path: str) -> Any:
        try:
            return self._fs.open(path, "wb", block_size=PART)
        except FileNotFoundError:  # no object store, but something that has folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(path, "wb", block_size=PART)

    def publish(self, step: int, name: str, data: bytes, *, over: bool = False) -> None:
        with _driver():
            self._fs.pipe_file(self._path(step, name), data, mode="overwrite" if over else "create")

    def delete(self, step: int, names: Iterable[str]) -> None:
        def remove(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

        with _driver(), ThreadPoolExecutor(LOOKS) as pool:
            deque(pool.map(remove, [self._path(step, name) for name in names]), maxlen=0)

    def drop(self, step: int) -> None:
        """There are folders only in what fsspec speaks that is none of objects."""
        with contextlib.suppress(Exception):
            self._fs.rmdir(self._path(step))


@contextlib.contextmanager
def _driver() -> Iterator[None]:
    """A driver's own errors, and those of what it is made of, as OSError."""
    try:
        yield
    except (OSError, ElasticError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error

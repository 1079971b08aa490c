"""A checkpoint's storage that is a folder of a file system."""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

from elastic.checkpoint.storage.protocol import Damaged, File, ends
from elastic.proto import manifest

AT_ONCE = 2
"""Pieces of a file on their way to a disk."""
SMALL = 1 << 20
"""Bytes of a read for which zeroed memory costs nothing."""
_libc = ctypes.CDLL(None, use_errno=True)


MOST_OPEN = 256
"""Files to read that stay open; of a step of a thousand ranks there are more than a process may have open."""
_tokens = SimpleQueue[None]()
"""One for each that may be; what the collector frees in the middle of anything puts one back."""
for _ in range(MOST_OPEN):
    _tokens.put(None)


class _Opened:
    """Read, not mapped: a disk that fails and a file that is cut are errors then, and no SIGBUS."""

    def __init__(self, path: Path) -> None:
        self._path = path
        fd = self._open()
        self.size = os.fstat(fd).st_size
        try:
            _tokens.get_nowait()
            self._fd = fd
        except Empty:
            self._fd = -1
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            _tokens.put(None)

    def _open(self) -> int:
        with _disk():
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no pipe waits

    def read(self, start: int, end: int) -> memoryview:
        data = _room(end - start)
        fd = self._fd if self._fd >= 0 else self._open()
        try:
            self._read(fd, start, data)
        finally:
            if fd != self._fd:
                os.close(fd)
        return data

    def _read(self, fd: int, start: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            with _disk():
                count = os.preadv(fd, [data[at:]], start + at)
            if not count:
                raise Damaged(f"it ends after {start + at} bytes")
            at += count


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
        if not ends(self, step, name, size, end):
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
            waiting.append(pool.submit(put, fd, piece, at))
            at += len(piece)
        for one in waiting:
            one.result()


def put(fd: int, piece: memoryview, at: int) -> None:
    """Write all of it, from byte `at` on, to the disk; a disk that is nearly full takes less than it is given.
    OSError."""
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

"""A file system that opens, and then never answers: who asks it for more sits in the kernel, in state D, as with a
dead network file system. A read of its file `data` ends with SIGKILL alone; a look into it with nothing at all.
"""

import contextlib
import ctypes
import os
import queue
import select
import struct
import subprocess
import threading
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest

FILE = "data"
_HEADER = struct.Struct("<IIQQIII4x")
"""fuse_in_header: length, opcode, unique, node, uid, gid, pid."""
_ANSWER = struct.Struct("<IiQ")
"""fuse_out_header: length, error, unique."""
_INIT = struct.Struct("<IIIIHHI")
"""What protocol 7.22 has of fuse_init_out: version, readahead, flags, requests in the background, write."""
_OPEN = struct.Struct("<QI4x")
_ENTRY = struct.Struct("<QQQQII" + "6Q10I")
"""fuse_entry_out: node, generation, for how long the name and the attributes hold, and fuse_attr."""
_TIMES = (0, 0, 0)
_KNOWN = 1 << 20  # seconds
_DATA = (2, 0, _KNOWN, _KNOWN, 0, 0, 2, 4096, 8, *_TIMES, *_TIMES, 0o100444, 1, 0, 0, 0, 4096, 0)
"""A file of one page, that everybody may read."""
_ASYNC_READ = 1
"""Whoever reads waits for its page, in state D."""
_EIO, _ENOTTY, _ENOSYS = -5, -25, -38
_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_DETACH = 2
_DEADLINE = 10.0


class _Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    OPEN = 14
    RELEASE = 18
    FLUSH = 25
    INTERRUPT = 36
    IOCTL = 39
    BATCH_FORGET = 42


class StuckFolder:
    """Where it is mounted."""

    def __init__(self, path: Path, device: int, error: int) -> None:
        self.path = path
        self._device, self._error = device, error
        self._victims: queue.Queue[int] = queue.Queue()

    def victim(self, timeout: float) -> int:
        """Wait for somebody who now waits for ever; returns its pid."""
        return self._victims.get(timeout=timeout)

    def answer_until(self, ended: int) -> None:
        """What leads to a read; ended: a pipe that closes."""
        while True:
            ready, _, _ = select.select([self._device, ended], [], [])
            if ended in ready:
                return
            try:
                request = os.read(self._device, 1 << 17)
            except (BlockingIOError, FileNotFoundError):
                continue  # who asked is gone
            _, op, unique, *_, pid = _HEADER.unpack_from(request)
            match op:
                case _Op.FORGET | _Op.BATCH_FORGET:
                    pass  # nobody waits
                case _Op.LOOKUP if request[_HEADER.size :] == FILE.encode() + b"\0":
                    _answer(self._device, unique, _ENTRY.pack(*_DATA))
                case _Op.OPEN:
                    _answer(self._device, unique, _OPEN.pack(0, 0))
                case _Op.FLUSH | _Op.RELEASE:
                    _answer(self._device, unique)
                case _Op.IOCTL:  # Python asks whether it is a terminal
                    _answer(self._device, unique, error=_ENOTTY)
                case _ if self._error:
                    _answer(self._device, unique, error=self._error)
                case _:
                    self._victims.put(pid)


@contextlib.contextmanager
def stuck_folder(path: Path, *, error: int = 0) -> Iterator[StuckFolder]:
    """Skips the test where it cannot be mounted. Whoever waits goes on at the end, with an error.

    error: a negative number of errno's, that a read or a look gets in place of no answer.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        pytest.skip("no /dev/fuse")
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        flags = _MS_NOSUID | _MS_NODEV
        if libc.mount(b"stuck", bytes(path), b"fuse", flags, options) != 0:
            pytest.skip(f"no FUSE mount: {os.strerror(ctypes.get_errno())}")
        unique, _ = _request(device)
        _answer(device, unique, _INIT.pack(7, 22, 0, _ASYNC_READ, 1, 1, 4096))
        _refuse_interrupts(device, path)
        folder = StuckFolder(path, device, error)
        ended, end = os.pipe()
        server = threading.Thread(target=folder.answer_until, args=(ended,), daemon=True)
        server.start()
        try:
            yield folder
        finally:
            os.close(end)
            server.join()
            os.close(ended)
    finally:
        os.close(device)  # ends the connection, and with it every wait
        libc.umount2(bytes(path), _MNT_DETACH)


def _refuse_interrupts(device: int, path: Path) -> None:
    """From then on whoever waits is in state D from the first; a signal's request would else end its sleep in S."""
    looking = subprocess.Popen(
        ["ls", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    first, _ = _request(device)
    looking.terminate()
    unique, op = _request(device)
    assert op == _Op.INTERRUPT, f"request {op} after a signal"
    _answer(device, unique, error=_ENOSYS)
    _answer(device, first, error=_EIO)
    looking.wait(_DEADLINE)


def _request(device: int) -> tuple[int, int]:
    """Its unique number and operation."""
    ready, _, _ = select.select([device], [], [], _DEADLINE)
    assert ready, "nobody asked the file system"
    _, op, unique, *_ = _HEADER.unpack_from(os.read(device, 1 << 17))
    return unique, op


def _answer(device: int, unique: int, body: bytes = b"", *, error: int = 0) -> None:
    with contextlib.suppress(FileNotFoundError):  # who asked is gone
        os.write(device, _ANSWER.pack(_ANSWER.size + len(body), error, unique) + body)

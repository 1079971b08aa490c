"""A file system that takes a request and never answers: who asks it sits in the kernel, in state D,
and no signal ends it, as with a dead network file system."""

import contextlib
import ctypes
import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

_HEADER = struct.Struct("<IIQQIII4x")
"""fuse_in_header: length, opcode, unique, node, uid, gid, pid."""
_INIT_ANSWER = struct.Struct("<IiQ IIIIHHI")
"""fuse_out_header (length, error, unique) and what protocol 7.22 has for fuse_init_out."""
_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_DETACH = 2


class StuckFolder:
    """Where it is mounted."""

    def __init__(self, path: Path, device: int) -> None:
        self.path = path
        self._device = device

    def victim(self, timeout: float) -> int:
        """Wait for somebody who looks in, and who now waits for ever; returns its pid."""
        return int(_HEADER.unpack_from(_request(self._device, timeout))[6])


@contextlib.contextmanager
def stuck_folder(path: Path) -> Iterator[StuckFolder]:
    """Skips the test where it cannot be mounted. Whoever waits goes on at the end, with an error."""
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no /dev/fuse")
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        flags = _MS_NOSUID | _MS_NODEV
        if libc.mount(b"stuck", bytes(path), b"fuse", flags, options) != 0:
            pytest.skip(f"no FUSE mount: {os.strerror(ctypes.get_errno())}")
        unique = _HEADER.unpack_from(_request(device, 10.0))[2]
        size = _INIT_ANSWER.size
        os.write(device, _INIT_ANSWER.pack(size, 0, unique, 7, 22, 0, 0, 1, 1, 4096))
        yield StuckFolder(path, device)
    finally:
        os.close(device)  # ends the connection, and with it every wait
        libc.umount2(bytes(path), _MNT_DETACH)


def _request(device: int, timeout: float) -> bytes:
    ready, _, _ = select.select([device], [], [], timeout)
    assert ready, "nobody asked the file system"
    return os.read(device, 1 << 17)

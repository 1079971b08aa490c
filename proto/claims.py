"""Locks on a file that end with their holder, whatever ends it."""

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # struct flock, with 64-bit offsets


def claim(fd: int, *, exclusive: bool, start: int = 0, size: int = 0) -> bool:
    """Lock bytes of the file behind `fd`, for as long as its open file description is there; whether that could be had
    at once. size 0: to the end. Bytes may lie beyond the file's. Raises `OSError`."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, size, 0))
    except BlockingIOError:
        return False
    return True

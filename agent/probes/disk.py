"""A folder's disk: write, fsync, read back, compare. A request that the disk never answers leaves this
process in the kernel, which is the caller's to see."""

import contextlib
import errno
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.agent.probes.program import Fault, ask, begin, parser, tell

BYTES = {"quick": 4 << 20, "full": 256 << 20}
BLOCK = 1 << 20

_NO_TMPFILE = (errno.EISDIR, errno.EOPNOTSUPP, errno.ENOENT, errno.EINVAL)
"""How file systems (NFS, overlays) and old kernels say that they have no files without names."""


def measure(folder: Path, level: str) -> dict[str, float]:
    """Raises Fault. The file has no name, or loses it at once: a killed probe leaves nothing."""
    try:
        if not folder.is_dir():
            raise Fault("there is no such folder")
        room = os.statvfs(folder)
        figures = {
            "free_bytes": float(room.f_bavail * room.f_frsize),
            "free_files": float(room.f_favail),
        }
        with _file(folder) as fd:
            return {**figures, **_round_trip(fd, BYTES[level])}
    except OSError as error:
        raise Fault(
            f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"
        ) from error


def _round_trip(fd: int, size: int) -> dict[str, float]:
    block = random.Random(0).randbytes(BLOCK)
    began = time.perf_counter()
    for at in range(0, size, BLOCK):
        _write(fd, _turned(block, at), at)
    written = time.perf_counter()
    os.fsync(fd)
    synced = time.perf_counter()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that what is read comes from the disk
    read_s = 0.0
    for at in range(0, size, BLOCK):
        before = time.perf_counter()
        got = os.pread(fd, BLOCK, at)
        read_s += time.perf_counter() - before
        if got != _turned(block, at):
            raise Fault(f"what was read at byte {at} is not what was written")
    return {
        "write_gb_s": size / 1e9 / (synced - began),  # fsync and all
        "fsync_s": synced - written,
        "read_gb_s": size / 1e9 / read_s,
    }


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count


def _turned(block: bytes, at: int) -> bytes:
    """A block of its own for each place."""
    by = at // BLOCK % len(block)
    return block[by:] + block[:by]


@contextlib.contextmanager
def _file(folder: Path) -> Iterator[int]:
    try:
        fd = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        fd, name = tempfile.mkstemp(prefix=".elastic-probe-", dir=folder)
        os.unlink(name)
    try:
        yield fd
    finally:
        os.close(fd)


def main(argv: list[str]) -> None:
    arguments = parser("disk", __doc__)
    arguments.add_argument("folder", type=Path)
    args = arguments.parse_args(argv)
    tell(begin(args.parent), ask("disk", lambda: measure(args.folder, args.level)))


if __name__ == "__main__":
    main(sys.argv[1:])

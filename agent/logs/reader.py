"""Reads a rank's log files: for elasticctl through the master, or straight from a job's folder."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

from elastic.proto.errors import UsageError

CHUNK = 1 << 18


def log_file(run_dir: Path | None, rank: int, attempt: int | None, stream: str) -> Path:
    """The file of a stream (stdout or stderr); the newest attempt that has one if None is given.

    Raises UsageError, which says what to do.
    """
    if stream not in ("stdout", "stderr"):
        raise UsageError(f"there is no stream {stream[:20]!r}: stdout or stderr")
    if run_dir is None:
        raise UsageError("this job keeps no logs (--log-dir /dev/null)")
    found = attempts(run_dir)
    wanted = found if attempt is None else [a for a in found if a == attempt]
    for number in reversed(wanted):
        path = run_dir / f"attempt_{number}" / str(rank) / f"{stream}.log"
        if path.is_file():
            return path
    what = "" if attempt is None else f" of attempt {attempt}"
    raise UsageError(
        f"there is no {stream}.log{what} of rank {rank} here: streams go to files with "
        "--redirects 3 or --tee 3"
    )


def attempts(run_dir: Path) -> list[int]:
    """Numbers of the attempts in a job's folder, oldest first."""
    with contextlib.suppress(OSError):
        names = (re.fullmatch(r"attempt_(\d+)", entry.name) for entry in run_dir.iterdir())
        return sorted(int(match[1]) for match in names if match)
    return []


async def read(path: Path, tail: int, follow: bool) -> AsyncIterator[bytes]:
    """The file's bytes, from `tail` bytes before its end if that is not 0; follows for ever."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - tail) if tail else 0
        with contextlib.suppress(OSError):  # what was given back to the disk is a hole
            start = max(start, os.lseek(file.fileno(), start, os.SEEK_DATA))
        file.seek(start)
        while True:
            while data := file.read(CHUNK):
                yield data
            if not follow:
                return
            await asyncio.sleep(0.1)

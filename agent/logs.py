"""Where a rank's streams go: console, files, or both; torchrun's layout under the run's folder.

`<run dir>/attempt_<n>/<rank>/{stdout.log,stderr.log,error.json}`, n being the round less one. By the
global rank, so that nodes that share a file system never write to one file; on one node that is
the local rank, as in torchrun.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from elastic.agent.settings import LogSettings

log = logging.getLogger(__name__)

OUT, ERR = 1, 2
POLL = 0.1
"""Seconds between looks at teed files, as in torchrun."""
LAST_WORDS = 5.0
"""Seconds that the console gets to take what is left when the ranks have ended."""
LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is copied all the same."""
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStreams:
    """Open descriptors for a rank; they are the caller's to close."""

    stdout: int
    stderr: int
    folder: Path | None
    error_file: str
    """Path, or empty without logs."""


def of_rank(spec: int | Mapping[int, int], local_rank: int) -> int:
    """Which streams (bits 1 and 2) a --redirects or --tee value means for a local rank."""
    return spec if isinstance(spec, int) else spec.get(local_rank, 0)


class AttemptLogs:
    """One round's log files on this node."""

    def __init__(self, settings: LogSettings, number: int, role: str) -> None:
        self._settings = settings
        self._role = role
        self._tails: list[_Tail] = []
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._files: list[Path] = []
        self.folder: Path | None = None
        if settings.run_dir is not None:
            folder = settings.run_dir / f"attempt_{number - 1}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _prune(settings.run_dir, folder, settings.keep)
                for name, words in (
                    ("stdout", settings.stdout_filters),
                    ("stderr", settings.stderr_filters),
                ):
                    if words:  # there even if no line is chosen, as in torchrun
                        (folder / f"filtered_{name}.log").touch()
            except OSError as error:
                _go_without(error)
            else:
                self.folder = folder

    def open(self, rank: int, local_rank: int) -> RankStreams:
        """Make the rank's folder and open its streams; on the console where that cannot be done."""
        shown = self._settings.local_ranks is None or local_rank in self._settings.local_ranks
        if self.folder is not None:
            try:
                return self._open_files(self.folder / str(rank), rank, local_rank, shown)
            except OSError as error:
                _go_without(error)
        return RankStreams(
            stdout=os.dup(1) if shown else _devnull(),
            stderr=os.dup(2) if shown else _devnull(),
            folder=None,
            error_file="",
        )

    def _open_files(self, folder: Path, rank: int, local_rank: int, shown: bool) -> RankStreams:
        folder.mkdir(exist_ok=True)
        tee = of_rank(self._settings.tee, local_rank)
        files = tee | of_rank(self._settings.redirects, local_rank)
        with contextlib.ExitStack() as opened:
            ends = []
            for bit, name, console in ((OUT, "stdout", 1), (ERR, "stderr", 2)):
                if files & bit:
                    path = folder / f"{name}.log"
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    ends.append(os.open(path, flags, 0o644))
                    self._files.append(path)
                    if tee & bit and shown:
                        self._tail(path, rank, local_rank, name, console)
                else:
                    ends.append(os.dup(console) if shown else _devnull())
                opened.callback(os.close, ends[-1])
            opened.pop_all()  # all of them are the caller's now
        return RankStreams(
            stdout=ends[0],
            stderr=ends[1],
            folder=folder,
            error_file=str(folder / "error.json"),
        )

    def _tail(self, path: Path, rank: int, local_rank: int, name: str, console: int) -> None:
        template = self._settings.prefix
        prefix = f"[{self._role}{local_rank}]:"
        if template is not None:
            prefix = Template(template).safe_substitute(
                role_name=self._role, rank=rank, local_rank=local_rank
            )
        filters = (
            self._settings.stdout_filters if name == "stdout" else self._settings.stderr_filters
        )
        filtered = self.folder / f"filtered_{name}.log" if filters and self.folder else None
        self._tails.append(_Tail(path, prefix, console, filtered, filters))

    def follow(self) -> None:
        """Start to copy teed lines to the console and to keep files within their limit.

        In a thread: a console that takes nothing must not stop the agent.
        """
        if self._files:
            self._thread = threading.Thread(target=self._run, name="tee", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(POLL if self._tails else 50 * POLL):
            for tail in self._tails:
                tail.copy()
            looks += 1
            if looks % 50 == 0 and self._settings.limit:
                for path in self._files:
                    _bound(path, self._settings.limit)
        for tail in self._tails:
            tail.finish()

    async def close(self) -> None:
        """Copy what is left; the ranks have ended. Waits for a console that hangs only so long."""
        if self._thread is None:
            return
        self._over.set()
        await asyncio.to_thread(self._thread.join, LAST_WORDS)
        if self._thread.is_alive():
            log.warning("the console takes no output: the rest is in %s only", self.folder)


class _Tail:
    """One teed file, on its way to the console."""

    def __init__(
        self, path: Path, prefix: str, console: int, filtered: Path | None, words: tuple[str, ...]
    ) -> None:
        self._source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix = prefix.encode()
        self._console = console
        self._filtered = filtered
        self._words = tuple(word.encode() for word in words)
        self._rest = b""

    def copy(self) -> None:
        """Copy what came since; as torchrun, a carriage return ends a line too."""
        with contextlib.suppress(OSError):
            while data := os.read(self._source, 1 << 20):
                text = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                *lines, self._rest = text.split(b"\n")
                if len(self._rest) > LONGEST_LINE:
                    lines, self._rest = [*lines, self._rest], b""
                self._emit(lines)

    def _emit(self, lines: list[bytes]) -> None:
        if not lines:
            return
        _write(self._console, b"".join(self._prefix + line + b"\n" for line in lines))
        chosen = [line for line in lines if any(word in line for word in self._words)]
        if chosen and self._filtered is not None:
            with contextlib.suppress(OSError), open(self._filtered, "ab") as file:
                file.write(b"".join(self._prefix + line + b"\n" for line in chosen))

    def finish(self) -> None:
        self.copy()
        self._emit([self._rest] if self._rest else [])
        os.close(self._source)


def _go_without(error: OSError) -> None:
    """A full disk costs the files of a round, and not the round."""
    log.warning("what ranks write goes to no file in this round: %s", error)


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a console that went away costs nobody a rank
        while data:
            data = data[os.write(fd, data) :]


def _devnull() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def tail(folder: Path | None, size: int) -> str:
    """The last `size` bytes of what a rank wrote to stderr, as far as it went to a file."""
    if folder is None:
        return ""
    with contextlib.suppress(OSError), open(folder / "stderr.log", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size).decode(errors="replace")
    return ""


def _prune(run_dir: Path, used: Path, keep: int) -> None:
    """Remove the oldest attempts beyond `keep`, but neither the first, which shows how it began, nor
    the one in use."""
    found = [
        (int(match[1]), path)
        for path in run_dir.iterdir()
        if path != used and (match := re.fullmatch(r"attempt_(\d+)", path.name))
    ]
    for _, path in sorted(found)[1 : max(1, len(found) - keep + 2)]:
        shutil.rmtree(path, ignore_errors=True)


def _bound(path: Path, limit: int) -> None:
    """Give the disk back what a file holds before its last `limit` bytes; its size stays."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        surplus = (os.fstat(file.fileno()).st_size - limit) // _BLOCK * _BLOCK
        if surplus > 0:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(file.fileno(), _PUNCH, ctypes.c_long(0), ctypes.c_long(surplus))

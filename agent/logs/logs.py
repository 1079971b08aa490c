"""Where a rank's streams go: console, files, or both; torchrun's layout under the run's folder.

`<run dir>/attempt_<n>/<rank>/{stdout.log,stderr.log,error.json}`, n being the round less one. By the
global rank, so that nodes that share a file system never write to one file; on one node that is
the local rank, as in torchrun.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from elastic.agent.logs.tee import POLL, Shown, Tail, tee
from elastic.agent.settings import LogSettings

log = logging.getLogger(__name__)

LEAST_SPACE = 1 << 16
"""Bytes; a disk with less is full."""
OUT, ERR = 1, 2
BOUND_EVERY = 2.0
"""Seconds between looks at the length of files."""
PATIENCE = 5.0
"""Seconds for which a file system may keep a round's end waiting."""
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
        self._shown: dict[int, Shown] = {}
        """What goes to the console too, by its descriptor."""
        self._filtered: list[tuple[Tail, Path]] = []
        """What goes to a file for chosen lines, and that file."""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._files: list[Path] = []
        self.folder: Path | None = None
        if settings.run_dir is not None:
            folder = settings.run_dir / f"attempt_{number - 1}"
            try:
                if _is_full(settings.run_dir):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
                folder.mkdir(parents=True, exist_ok=True)
                _prune(settings.run_dir, folder, settings.keep)
                for name, words in (
                    ("stdout", settings.stdout_filters),
                    ("stderr", settings.stderr_filters),
                ):
                    if words:  # there even if no line is chosen, as in torchrun
                        _filtered(folder, name).touch()
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

    @property
    def full(self) -> Path | None:
        """The folder, where ranks write to files in it and its disk has no space left."""
        return self.folder if self.folder and self._files and _is_full(self.folder) else None

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
        self._shown.setdefault(console, Shown([])).tails.append(Tail(path, prefix))
        words = self._settings.stdout_filters if name == "stdout" else self._settings.stderr_filters
        if words:
            self._filtered.append((Tail(path, prefix, words), _filtered(path.parents[1], name)))

    def follow(self) -> None:
        """Start to copy teed lines and to keep files within their limit."""
        for console, shown in self._shown.items():
            tee(console).show(shown)
        if self._filtered or (self._files and self._settings.limit):
            self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(POLL if self._filtered else BOUND_EVERY):
            self._copy()
            if time.monotonic() - looked >= BOUND_EVERY:
                self._bound()
                looked = time.monotonic()
        self._copy()
        for tail, path in self._filtered:
            _append(path, tail.end())
        self._bound()

    def _copy(self) -> None:
        for tail, path in self._filtered:
            while data := tail.read():
                _append(path, data)

    def _bound(self) -> None:
        if limit := self._settings.limit:
            for path in {*self._files, *(path for _, path in self._filtered)}:
                _bound(path, limit)

    async def close(self) -> None:
        """Copy what is left; the ranks have ended. No console and no file holds up the next round."""
        self._over.set()
        await asyncio.to_thread(self._settle)

    def _settle(self) -> None:
        for console, shown in self._shown.items():
            tee(console).settle(shown)
        if self._thread is not None:
            self._thread.join(PATIENCE)


def _is_full(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    return blocks * disk.f_frsize < LEAST_SPACE


def _go_without(error: OSError) -> None:
    """A full disk costs the files of a round, and not the round."""
    log.warning("what ranks write goes to no file in this round: %s", error)


def _filtered(folder: Path, name: str) -> Path:
    return folder / f"filtered_{name}.log"


def _append(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError), open(path, "ab") as file:
        file.write(data)


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

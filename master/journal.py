"""The job's events on disk, in SQLite. Replaying them is the master's recovery.

Tables: `meta` (version), `events` (what was folded), `snapshot` (a state that stands for all
events before it) and `notes` (what `elasticctl events` shows). Times are wall-clock seconds of
Unix and job seconds.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from elastic.master.events import Event
from elastic.master.state import Job
from elastic.proto import codec, version
from elastic.proto.errors import CodecError, JournalError, JournalFull, ProtocolMismatch

log = logging.getLogger(__name__)

SNAPSHOT_EVERY = 2000
"""Events after which a snapshot takes their place."""

SNAPSHOT_RETRY = 100
"""Events after which a snapshot that could not be written is tried again."""

KEEP_NOTES = 20_000

COPY_TRIES = 20
"""Looks at a journal, each of which a checkpoint may spoil."""

LATEST = 1e11
"""No clock of ours says more seconds than that."""

_SCHEMA = """
create table if not exists meta (key text primary key, value text not null);
create table if not exists events (
    seq integer primary key, wall real not null, job real not null, body text not null,
    checksum integer not null);
create table if not exists snapshot (
    id integer primary key check (id = 0), seq integer not null, wall real not null,
    job real not null, body text not null, checksum integer not null);
create table if not exists notes (
    seq integer primary key autoincrement, wall real not null, job real not null,
    kind text not null, reason text not null, detail text not null);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    wall: float
    job: float
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    sequence: int
    wall: float
    job: float
    kind: str
    reason: str
    detail: str
    """JSON."""


class Journal:
    """An open journal. One writer; readers, in other processes, may look at any time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._since_snapshot = 0
        self._release: weakref.finalize[..., Journal] | None = None
        try:
            if read_only:
                self._db = sqlite3.connect(
                    f"file:{quote(str(self._copy()))}?mode=ro", uri=True, isolation_level=None
                )
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._claim()
                self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
        except (sqlite3.Error, OSError) as error:
            if self._release is not None:
                self._release()
            raise _explain(path, error) from error
        try:
            if not read_only:
                self._db.execute("pragma journal_mode=wal")
                self._db.executescript(_SCHEMA)
                self._db.execute(
                    "insert or ignore into meta values ('version', ?)", (str(version.JOURNAL),)
                )
            self._check()
        except (sqlite3.Error, ProtocolMismatch) as error:
            self.close()
            raise _explain(path, error) from error

    def _copy(self) -> Path:
        """The files as they are now, in a folder of our own, for as long as this is open.

        SQLite reads a journal that has a log only where it can write beside it. A reader may not do
        that to a job of somebody else, and should not: that one's master could not write what it
        made. Only a checkpoint changes the database; what is added to the log meanwhile hurts not.
        """
        folder = Path(tempfile.mkdtemp(prefix="elastic-journal-"))
        self._release = weakref.finalize(self, shutil.rmtree, folder)
        copy = folder / self.path.name
        for _ in range(COPY_TRIES):
            before = self.path.stat()
            shutil.copyfile(self.path, copy)
            log_copy = Path(f"{copy}-wal")
            log_copy.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{self.path}-wal", log_copy)
            after = self.path.stat()
            if (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
                return copy
        raise OSError(errno.EBUSY, "it changes while it is read")

    def _claim(self) -> None:
        """Two masters on one journal would each undo what the other decides.

        The folder is locked, not the file: closing a second descriptor of a database drops
        SQLite's own locks. Ends with this process, however it ends.
        """
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._release = weakref.finalize(self, os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release()
            raise JournalError(
                f"another master writes the journal {self.path}: give this job a name of its own "
                "(--rdzv-id), or end the other"
            ) from error
        except OSError as error:  # a file system without such locks: go on without one
            log.debug("cannot lock %s: %s", self.path.parent, error)

    def _check(self) -> None:
        fault = self._db.execute("pragma quick_check(1)").fetchone()[0]
        if fault != "ok":
            raise sqlite3.DatabaseError(fault)
        row = self._db.execute("select value from meta where key = 'version'").fetchone()
        theirs = version.parse(row[0] if row else "")
        if theirs is None:
            raise sqlite3.DatabaseError("it has no version")
        version.check(f"the journal {self.path}", theirs, version.JOURNAL)

    def load(self) -> tuple[Job, float, float, list[Entry]]:
        """The snapshot, its wall and job time, and the events after it."""
        job, wall, job_time, seq = Job(), 0.0, 0.0, 0
        try:
            row = self._db.execute("select seq, wall, job, body, checksum from snapshot").fetchone()
            if row is not None:
                seq, wall, job_time, body, checksum = row
                self._verify("the snapshot", checksum, wall, job_time, body)
                job = codec.loads(Job, body)
            rows = self._db.execute(
                "select seq, wall, job, body, checksum from events where seq > ? order by seq",
                (seq,),
            ).fetchall()
            entries = []
            for number, at, job_at, body, checksum in rows:
                self._verify(f"entry {number}", checksum, at, job_at, body)
                entries.append(Entry(wall=at, job=job_at, event=codec.loads(Event, body)))
        except (sqlite3.Error, CodecError) as error:
            raise _explain(self.path, error) from error
        self._since_snapshot = len(entries)
        return job, wall, job_time, entries

    def _verify(self, what: str, checksum: int, wall: float, job: float, body: str) -> None:
        if not _are_times(wall, job) or checksum != _checksum(wall, job, body):
            raise sqlite3.DatabaseError(f"{what} was changed on the disk")

    def append(self, entry: Entry, *, fence: bool) -> None:
        """Write one event; with `fence` it is on the disk before this returns."""
        body = codec.dumps(entry.event)
        try:
            self._db.execute(f"pragma synchronous={'full' if fence else 'normal'}")
            self._db.execute(
                "insert into events (wall, job, body, checksum) values (?, ?, ?, ?)",
                (entry.wall, entry.job, body, _checksum(entry.wall, entry.job, body)),
            )
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        self._since_snapshot += 1

    def compact(self, job: Job, wall: float, job_time: float) -> None:
        """Let a snapshot take the place of the events, once there are many.

        Where it cannot be written the events stay, so nothing is lost and nothing is raised.
        """
        if self._since_snapshot < SNAPSHOT_EVERY:
            return
        body = codec.dumps(job)
        try:
            self._db.execute("begin immediate")
            seq = self._db.execute("select max(seq) from events").fetchone()[0]
            self._db.execute(
                "insert or replace into snapshot values (0, ?, ?, ?, ?, ?)",
                (seq, wall, job_time, body, _checksum(wall, job_time, body)),
            )
            self._db.execute("delete from events where seq < ?", (seq,))
            self._db.execute("commit")
        except sqlite3.Error as error:
            log.warning("no snapshot yet: %s", _explain(self.path, error))
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("rollback")  # else all that follows would be in this transaction
            self._since_snapshot = SNAPSHOT_EVERY - SNAPSHOT_RETRY
        else:
            self._since_snapshot = 0

    def note(self, *, wall: float, job: float, kind: str, reason: str, detail: str = "{}") -> int:
        """Keep a line for people; returns its sequence number."""
        reason = reason[:2000].encode(errors="replace").decode()
        detail = detail if len(detail) <= 8000 else "{}"
        try:
            cursor = self._db.execute(
                "insert into notes (wall, job, kind, reason, detail) values (?, ?, ?, ?, ?)",
                (wall, job, kind, reason, detail),
            )
            sequence = cursor.lastrowid or 0
            if sequence % 1000 == 0:
                self._db.execute("delete from notes where seq <= ?", (sequence - KEEP_NOTES,))
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        return sequence

    def notes(self, after: int) -> Iterator[Note]:
        """Lines after sequence number `after`, oldest first."""
        try:
            rows = self._db.execute(
                "select seq, wall, job, kind, reason, detail from notes where seq > ? order by seq",
                (after,),
            ).fetchall()
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        for seq, wall, job, kind, reason, detail in rows:
            if not (_are_times(wall, job) and _are_texts(kind, reason, detail)):
                damage = sqlite3.DatabaseError(f"note {seq} was changed on the disk")
                raise _explain(self.path, damage) from damage
            yield Note(sequence=seq, wall=wall, job=job, kind=kind, reason=reason, detail=detail)

    def close(self) -> None:
        self._db.close()
        if self._release is not None:
            self._release()


def _are_times(*values: object) -> bool:
    return all(isinstance(value, int | float) and abs(value) < LATEST for value in values)


def _are_texts(kind: object, reason: object, detail: object) -> bool:
    """`detail` is a JSON document."""
    try:
        json.loads(str(detail))
    except (ValueError, RecursionError):
        return False
    return isinstance(kind, str) and isinstance(reason, str) and isinstance(detail, str)


def _checksum(wall: float, job: float, body: str) -> int:
    return zlib.crc32(f"{float(wall)!r} {float(job)!r} {body}".encode())


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _explain(path: Path, error: Exception) -> JournalError:
    """One line that says what to do."""
    if isinstance(error, ProtocolMismatch):
        return JournalError(str(error))
    text = " ".join(str(error).split())[:300]
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, OSError):
        code = sqlite3.SQLITE_FULL if error.errno in _NO_SPACE else sqlite3.SQLITE_CANTOPEN
        text = error.strerror or text
    if code == sqlite3.SQLITE_FULL:
        return JournalFull(f"no space left for the journal {path}: free some on its disk")
    if code == sqlite3.SQLITE_IOERR:
        return JournalError(f"the disk under the journal {path} fails ({text}): look at the disk")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalError(f"another program holds the journal {path} ({text}): end it")
    if code in (
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_READONLY,
    ):
        return JournalError(f"the journal {path} cannot be opened ({text}): look at its folder")
    return JournalError(
        f"the journal {path} cannot be used ({text}): put back a good copy, or move it away "
        "to begin the job anew"
    )

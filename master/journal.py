"""The job's events on disk, in SQLite. Replaying them is the master's recovery.

Tables: `meta` (version), `events` (what was folded), `snapshot` (a state that stands for all
events before it) and `notes` (what `elasticctl events` shows). Times are wall-clock seconds of
Unix and job seconds.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.master import codec
from elastic.master.events import Event
from elastic.master.job import Job
from elastic.proto import version
from elastic.proto.errors import JournalError

SNAPSHOT_EVERY = 2000
"""Events after which a snapshot takes their place."""

KEEP_NOTES = 20_000

_SCHEMA = """
create table if not exists meta (key text primary key, value text not null);
create table if not exists events (
    seq integer primary key, wall real not null, job real not null, body text not null);
create table if not exists snapshot (
    id integer primary key check (id = 0), seq integer not null, wall real not null,
    job real not null, body text not null);
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
    """An open journal. One writer; readers may open the same file at any time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._since_snapshot = 0
        try:
            if read_only:
                self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
                self._db.execute("pragma journal_mode=wal")
                self._db.executescript(_SCHEMA)
                self._db.execute(
                    "insert or ignore into meta values ('version', ?)", (str(version.JOURNAL),)
                )
            self._check()
        except (sqlite3.Error, OSError) as error:
            raise _explain(path, error) from error

    def _check(self) -> None:
        fault = self._db.execute("pragma quick_check(1)").fetchone()[0]
        if fault != "ok":
            raise sqlite3.DatabaseError(fault)
        row = self._db.execute("select value from meta where key = 'version'").fetchone()
        major, minor = (int(part) for part in row[0].split("."))
        version.check(f"journal {self.path}", version.Version(major, minor), version.JOURNAL)

    def load(self) -> tuple[Job, float, float, list[Entry]]:
        """The snapshot, its wall and job time, and the events after it."""
        try:
            row = self._db.execute("select seq, wall, job, body from snapshot").fetchone()
            seq, wall, job_time, body = row if row else (0, 0.0, 0.0, None)
            job = codec.loads(Job, body) if body is not None else Job()
            rows = self._db.execute(
                "select wall, job, body from events where seq > ? order by seq", (seq,)
            ).fetchall()
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        entries = [Entry(wall=w, job=j, event=codec.loads(Event, b)) for w, j, b in rows]
        self._since_snapshot = len(entries)
        return job, wall, job_time, entries

    def append(self, entry: Entry, *, fence: bool) -> None:
        """Write one event; with `fence` it is on the disk before this returns."""
        body = codec.dumps(entry.event)
        try:
            self._db.execute(f"pragma synchronous={'full' if fence else 'normal'}")
            self._db.execute(
                "insert into events (wall, job, body) values (?, ?, ?)",
                (entry.wall, entry.job, body),
            )
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        self._since_snapshot += 1

    def compact(self, job: Job, wall: float, job_time: float) -> None:
        """Let a snapshot take the place of the events, once there are many."""
        if self._since_snapshot < SNAPSHOT_EVERY:
            return
        try:
            self._db.execute("begin")
            seq = self._db.execute("select max(seq) from events").fetchone()[0]
            self._db.execute(
                "insert or replace into snapshot values (0, ?, ?, ?, ?)",
                (seq, wall, job_time, codec.dumps(job)),
            )
            self._db.execute("delete from events where seq < ?", (seq,))
            self._db.execute("commit")
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        self._since_snapshot = 0

    def note(self, *, wall: float, job: float, kind: str, reason: str, detail: str = "{}") -> int:
        """Keep a line for people; returns its sequence number."""
        try:
            cursor = self._db.execute(
                "insert into notes (wall, job, kind, reason, detail) values (?, ?, ?, ?, ?)",
                (wall, job, kind, reason[:2000], detail[:8000]),
            )
            sequence = cursor.lastrowid or 0
            if sequence % 1000 == 0:
                self._db.execute("delete from notes where seq <= ?", (sequence - KEEP_NOTES,))
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        return sequence

    def notes(self, after: int) -> Iterator[Note]:
        """Lines after sequence number `after`, oldest first."""
        rows = self._db.execute(
            "select seq, wall, job, kind, reason, detail from notes where seq > ? order by seq",
            (after,),
        )
        for seq, wall, job, kind, reason, detail in rows:
            yield Note(sequence=seq, wall=wall, job=job, kind=kind, reason=reason, detail=detail)

    def close(self) -> None:
        self._db.close()


def _explain(path: Path, error: Exception) -> JournalError:
    text = str(error)
    if "full" in text:
        return JournalError(f"no space left for the journal {path}: free some on its disk")
    if "malformed" in text or "not a database" in text or isinstance(error, sqlite3.DatabaseError):
        return JournalError(
            f"the journal {path} cannot be used ({text}): put back a good copy, or move it away "
            "to begin the job anew"
        )
    return JournalError(f"the journal {path} cannot be opened: {text}")

"""Events on disk: what was written is there, and what is broken is said in one line."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.master import journal as journals
from elastic.master.events import Attached, MasterStarted, NodeId, Progressed
from elastic.master.job import Job
from elastic.master.journal import Entry, Journal
from elastic.proto.errors import JournalError
from tests.master.builders import attached

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.db"


def entry(step: int) -> Entry:
    return Entry(wall=1000.0 + step, job=float(step), event=Progressed(1, step))


def fill(journal: Journal, *steps: int) -> None:
    for step in steps:
        journal.append(entry(step), fence=step % 2 == 0)


def steps(path: Path) -> list[int]:
    journal = Journal(path)
    try:
        return [e.event.step for e in journal.load()[3] if isinstance(e.event, Progressed)]
    finally:
        journal.close()


def complaint(path: Path) -> str:
    """What opening and loading it says."""
    with pytest.raises(JournalError) as caught:
        steps(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_what_was_appended_is_loaded(path: Path) -> None:
    journal = Journal(path)
    assert journal.load() == (Job(), 0.0, 0.0, [])
    fill(journal, 1, 2, 3)
    assert journal.load() == (Job(), 0.0, 0.0, [entry(1), entry(2), entry(3)])
    journal.close()
    assert steps(path) == [1, 2, 3]


def test_a_fence_is_on_the_disk_before_append_returns(path: Path) -> None:
    journal = Journal(path)
    for fence, wanted in ((True, 2), (False, 1)):
        journal.append(entry(1), fence=fence)
        assert journal._db.execute("pragma synchronous").fetchone() == (wanted,)
    assert journal._db.execute("pragma journal_mode").fetchone() == ("wal",)
    journal.close()


def test_a_snapshot_stands_for_the_events_before_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SNAPSHOT_EVERY", 10)
    journal = Journal(path)
    for step in range(1, 26):
        fill(journal, step)
        journal.compact(Job(last_round=step), 1000.0 + step, float(step))
    journal.close()
    journal = Journal(path)
    job, wall, job_time, entries = journal.load()
    assert (job, wall, job_time) == (Job(last_round=20), 1020.0, 20.0)
    assert entries == [entry(step) for step in range(21, 26)]
    for step in range(26, 31):
        fill(journal, step)
        journal.compact(Job(last_round=step), 1000.0 + step, float(step))
    assert journal.load()[0].last_round == 30, "events of an earlier master count"
    journal.close()


def test_a_snapshot_that_cannot_be_written_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SNAPSHOT_EVERY", 2)
    monkeypatch.setattr(journals, "SNAPSHOT_RETRY", 2)
    journal = Journal(path)
    fill(journal, 1, 2)
    journal._db.execute(
        "create trigger full before insert on snapshot begin select raise(abort, 'full'); end"
    )
    journal.compact(Job(), 1.0, 1.0)
    fill(journal, 3)
    reader = sqlite3.connect(path)
    assert reader.execute("select count(*) from events").fetchone() == (3,), "and it is committed"
    reader.close()
    journal._db.execute("drop trigger full")
    journal.compact(Job(), 1.0, 1.0)
    assert len(journal.load()[3]) == 3, "not tried at every event"
    fill(journal, 4)
    journal.compact(Job(last_round=4), 1.0, 1.0)
    assert journal.load()[0].last_round == 4
    journal.close()


def test_notes(path: Path) -> None:
    journal = Journal(path)
    numbers = [journal.note(wall=1.0, job=float(i), kind="Tick", reason=f"r{i}") for i in range(5)]
    assert [note.reason for note in journal.notes(numbers[2])] == ["r3", "r4"]
    journal.note(wall=1.0, job=1.0, kind="Tick", reason="\ud800 x" * 2000, detail="[" * 9000)
    (last,) = journal.notes(numbers[-1])
    assert last.reason.startswith("? x")
    assert last.detail == "{}", "never half a document"
    journal.close()


def test_notes_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "KEEP_NOTES", 100)
    journal = Journal(path)
    journal._db.execute("begin")
    for _ in range(2000):
        journal.note(wall=1.0, job=1.0, kind="Tick", reason="r")
    journal._db.execute("commit")
    assert len(list(journal.notes(0))) == 100
    journal.close()


def test_another_process_reads_while_the_master_writes(path: Path) -> None:
    journal = Journal(path)
    fill(journal, 1, 2)
    script = (
        "import sys; from pathlib import Path; from elastic.master.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), read_only=True)\n"
        "print(len(journal.load()[3]), len(list(journal.notes(0))))\n"
    )
    journal._db.execute("begin immediate")  # in the middle of a write
    journal.note(wall=1.0, job=1.0, kind="Tick", reason="unfinished")
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=True,
    )  # fmt: skip
    journal._db.execute("rollback")
    assert done.stdout.split() == ["2", "0"]
    fill(journal, 3)
    journal.close()
    reader = Journal(path, read_only=True)
    assert len(reader.load()[3]) == 3, "of a job whose master is gone"
    with pytest.raises(JournalError, match="readonly"):
        reader.append(entry(4), fence=False)
    reader.close()


def test_only_one_master_writes(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(JournalError, match="another master writes"):
        Journal(path)
    Journal(path, read_only=True).close()
    journal.close()
    Journal(path).close()


WRITER = """
import os, signal, sys
from pathlib import Path
from elastic.master.events import Progressed
from elastic.master.journal import Entry, Journal
journal = Journal(Path(sys.argv[1]))
for step in range(1, 51):
    journal.append(Entry(wall=0.0, job=float(step), event=Progressed(1, step)), fence=False)
journal._db.execute("begin")
journal._db.execute("insert into events select null, wall, job, body, checksum from events")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_a_log_that_is_taken_over(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(path)], cwd=ROOT, timeout=150, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert path.with_name("journal.db-wal").stat().st_size > 0
    reader = Journal(path, read_only=True)
    assert len(reader.load()[3]) == 50
    reader.close()
    assert steps(path) == list(range(1, 51))


# Damage.


@pytest.fixture
def written(path: Path) -> Path:
    journal = Journal(path)
    journal.append(Entry(wall=1.0, job=0.0, event=MasterStarted("u")), fence=True)
    nodes = tuple(attached(f"node{i}").nodes[0] for i in range(300))
    journal.append(Entry(wall=2.0, job=1.0, event=Attached(nodes)), fence=True)
    fill(journal, *range(300))
    journal.close()
    return path


def test_a_truncated_file(written: Path) -> None:
    for size in (written.stat().st_size // 2, 5000, 1000):
        os.truncate(written, size)
        assert "put back a good copy, or move it away" in complaint(written)


def test_a_file_that_is_no_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("these are the days of our lives\n" * 100)
    assert "not a database" in complaint(path)


def test_a_database_of_something_else(path: Path) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path)
    other.execute("create table events (breakfast text)")
    other.close()
    assert "cannot be used" in complaint(path)


@pytest.mark.parametrize("text", [b"node17", b'"step":17'])
def test_a_changed_byte_in_an_entry(written: Path, text: bytes) -> None:
    content = written.read_bytes()
    at = content.index(text) + len(text) - 1
    written.write_bytes(content[:at] + b"8" + content[at + 1 :])
    assert "was changed on the disk" in complaint(written)


def test_pages_of_noise(written: Path) -> None:
    content = written.read_bytes()
    written.write_bytes(content[:4096] + bytes(range(256)) * 16 + content[8192:])
    complaint(written)


@pytest.mark.parametrize(
    ("value", "said"),
    [("9.0", "speaks version 9.0"), ("1.7", "speaks version 1.7"), ("soon", "no version")],
)
def test_a_version_too_far(written: Path, value: str, said: str) -> None:
    database = sqlite3.connect(written)
    database.execute("update meta set value = ?", (value,))
    database.commit()
    database.close()
    assert said in complaint(written)


def test_an_event_that_this_release_does_not_know(written: Path) -> None:
    body = '{"":"FutureEvent"}'
    database = sqlite3.connect(written)
    checksum = journals._checksum(1.0, 2.0, body)
    database.execute(
        "insert into events (wall, job, body, checksum) values (1.0, 2.0, ?, ?)", (body, checksum)
    )
    database.commit()
    database.close()
    assert "no event of this release" in complaint(written)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be opened" in complaint(tmp_path / "file" / "journal.db")


def test_no_journal_to_read(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "journal.db", read_only=True)


# No space.


def fill_the_disk(journal: Journal) -> tuple[int, str]:
    """How many entries went in, and what the first that did not said."""
    for step in range(100_000):
        try:
            journal.append(entry(step), fence=step % 7 == 0)
        except JournalError as error:
            return step, str(error)
    raise AssertionError("the disk never filled")


def test_a_full_disk_loses_nothing_and_writing_goes_on_once_there_is_space(
    small_disk: Path,
) -> None:
    ballast = small_disk / "ballast"
    path = small_disk / "journal.db"
    journal = Journal(path)
    ballast.write_bytes(b"x" * 65536)
    count, said = fill_the_disk(journal)
    assert said == f"no space left for the journal {path}: free some on its disk"
    with pytest.raises(JournalError, match="no space left"):
        journal.append(entry(count), fence=True)
    journal._since_snapshot = journals.SNAPSHOT_EVERY
    journal.compact(replace(Job(), uid="x" * 100_000), 1.0, 1.0)  # no space for this either
    assert len(journal.load()[3]) == count
    ballast.unlink()
    journal.append(entry(count), fence=True)
    journal.close()
    assert steps(path) == list(range(count + 1))


LIMITED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.master.test_journal import fill_the_disk
from elastic.master.journal import Journal
journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
print(*fill_the_disk(journal))
"""


def test_a_file_that_may_not_grow(path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(ROOT)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    count, said = done.stdout.strip().split(" ", 1)
    assert str(path) in said
    assert "\n" not in said
    assert steps(path) == list(range(int(count)))


def test_node_ids_are_kept_as_they_are(path: Path) -> None:
    journal = Journal(path)
    odd = attached("näme/with \x00 and ';--")
    journal.append(Entry(wall=0.0, job=0.0, event=odd), fence=False)
    (back,) = journal.load()[3]
    assert back.event == odd
    assert odd.nodes[0].node_id == NodeId("näme/with \x00 and ';--")
    journal.close()

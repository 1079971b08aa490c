"""Full disks, and journals that were damaged."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job, processes
from tests.e2e.harness.disk import fill


def test_no_space_for_a_new_journal(job: Job, small_disk: Path) -> None:
    fill(small_disk)
    node = job.start("--state-dir", str(small_disk), log_level="WARNING")
    assert node.exit_code() == 1, job.dump()
    assert "no space left for the journal" in node.said(), node.said()
    job.assert_nothing_left()
    assert "Traceback" not in node.said()


def test_no_space_for_the_journal_while_ranks_train(job: Job, small_disk: Path) -> None:
    """Ranks go on; what happens meanwhile is decided once there is space again."""
    node = job.start("--state-dir", str(small_disk))
    number = job.wait_for_steps(2)
    ballast = fill(small_disk)
    processes.kill(job.rank(number, 0))
    job.wait_for("a word about it", lambda: "no space left for the journal" in node.said() or None)
    job.wait_for_more_steps_of(number, 1)
    assert job.round() == number
    ballast.unlink()
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)


def test_a_master_that_comes_back_to_a_full_disk_waits_and_ranks_train_on(
    job: Job, small_disk: Path
) -> None:
    node = job.start("--state-dir", str(small_disk))
    number = job.wait_for_steps(2)
    ballast = fill(small_disk)
    processes.kill(node.master())
    job.wait_for("a word about it", lambda: "no space left for the journal" in node.said() or None)
    job.wait_for_more_steps(number, 2)
    ballast.unlink()
    processes.kill(job.rank(number, 0))
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)
    assert node.said().count("no space left") == 1, node.said()


def test_no_space_for_logs(job: Job, small_disk: Path) -> None:
    """A round starts without log files rather than not at all."""
    node = job.start(
        "--log-dir", str(small_disk), "--state-dir", str(job.folder / "logs"), "--tee", "3"
    )
    number = job.wait_for_steps(2)
    assert list(small_disk.glob("job/attempt_0/*/stdout.log")), job.dump()
    ballast = fill(small_disk)
    for count in range(100_000):  # and no inode either
        try:
            (small_disk / f"i{count}").touch()
        except OSError:
            break
    processes.kill(job.rank(number, 0))
    job.wait_for_steps(2, after=number)
    assert "No space left on device" in node.said(), job.dump()
    ballast.unlink()
    job.finish()
    job.ends(0)


@pytest.mark.parametrize("how", ["--redirects", "--tee"])
def test_the_disk_fills_under_the_logs_of_ranks_that_print(
    job: Job, small_disk: Path, how: str
) -> None:
    """Their writes fail, which is not the script's fault; they train on, without files."""
    where = ("--log-dir", str(small_disk), "--state-dir", str(job.folder / "logs"))
    node = job.start(*where, how, "3", script=("--print",))
    number = job.wait_for_steps(2)
    fill(small_disk)
    job.wait_for_steps(2, after=number, count=10)
    job.finish()
    job.ends(0)
    assert f"no space left for its logs in {small_disk}" in node.said(), job.dump()
    assert set(job.report()["restarts_by_cause"]) == {"no space for logs"}, job.dump()


def _cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(1, len(data))])


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(40):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _noise(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(5000))


def _empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def _folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [_cut, _flip, _noise, _empty, _folder], ids=lambda d: d.__name__[1:]
)
def test_a_damaged_journal(job: Job, damage: Callable[[Path, random.Random], None]) -> None:
    """One line that names the file and says what to do; or, where nothing is lost, the job goes on."""
    first = job.start()
    job.wait_for_steps(2)
    first.signal(signal.SIGTERM)
    job.ends(1)
    journal = job.folder / "logs" / "job" / "journal.db"
    for extra in journal.parent.glob("journal.db-*"):
        extra.unlink()
    good = journal.read_bytes()
    for seed in range(3):
        if journal.is_dir():
            journal.rmdir()
        journal.write_bytes(good)
        damage(journal, random.Random(seed))
        node = job.start(log_level="WARNING", name=f"try{seed}")
        started = len(job.told("start"))
        job.wait_for(
            "ranks, or the end",
            lambda: node.process.poll() is not None or len(job.told("start")) > started or None,  # noqa: B023
        )
        if node.process.poll() is None:
            assert job.round() == 2, "it began anew, and nobody was told"
            node.signal(signal.SIGTERM)
            assert node.exit_code() == 1, job.dump()
            continue
        assert node.exit_code() == 1, job.dump()
        assert f"the journal {journal}" in node.said(), job.dump()
    job.ends(1)
    shutil.rmtree(job.folder / "logs")


def _rewind(folder: Path) -> None:
    """What was written since the last checkpoint of SQLite's is gone."""
    (folder / "journal.db-wal").write_bytes(b"")


def _halve(folder: Path) -> None:
    wal = folder / "journal.db-wal"
    os.truncate(wal, wal.stat().st_size // 2)


def _wipe(folder: Path) -> None:
    for path in folder.glob("journal.db*"):
        path.unlink()


@pytest.mark.parametrize("damage", [_rewind, _halve, _wipe], ids=lambda d: d.__name__[1:])
def test_a_journal_is_damaged_while_the_job_runs(job: Job, damage: Callable[[Path], None]) -> None:
    """No other job begins in place of the one that trains."""
    node = job.start()
    job.wait_for_steps(2)
    master = node.master()
    processes.kill(master, number=signal.SIGSTOP)
    damage(job.folder / "logs" / "job")
    processes.kill(master)
    job.wait_for("ranks, or the end", lambda: node.process.poll() is not None or _is_back(job))
    if node.process.poll() is None:
        job.finish()
        job.ends(0)
        assert job.round() == 1, job.dump()
        return
    job.ends(1)
    assert "has lost what was written to it" in node.said(), job.dump()
    assert "job begins" not in node.said().partition("master died")[2], job.dump()


def _is_back(job: Job) -> bool:
    return any("master is back in epoch 2" in event for event in job.events())


def test_a_master_that_ends_with_an_error_is_the_only_one_that_speaks(job: Job) -> None:
    """Its agent ends in order, ranks have their time, and nobody speaks of a signal."""
    node = job.start(script=("--on-term", "work"), log_level="WARNING")
    job.wait_for_steps(2)
    master = node.master()
    processes.kill(node.guardian, master, number=signal.SIGSTOP)
    for path in (job.folder / "logs" / "job").glob("journal.db*"):
        path.unlink()
        path.mkdir()
    processes.kill(master)
    processes.kill(node.guardian, number=signal.SIGCONT)
    job.ends(1)
    assert {line.rank for line in job.told("saved")} == {0, 1}, job.dump()
    ours = [line for line in node.said().splitlines() if line.startswith("elastic-run: ")]
    assert len(ours) == 2, job.dump()
    assert "the master died (signal 9) and is started again" in ours[0]
    assert "journal.db" in ours[1]

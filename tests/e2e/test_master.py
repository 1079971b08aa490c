"""The master dies, again and again, and at bad moments; the clock jumps."""

import ast
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Job, processes
from tests.e2e.harness.freezer import Freezer


def test_five_masters_die_while_ranks_train(job: Job) -> None:
    kill_masters(job, 5)


@pytest.mark.soak
def test_fifty_masters_die_while_ranks_train(job: Job) -> None:
    kill_masters(job, 50)


def kill_masters(job: Job, times: int) -> None:
    """No rank is started again, and nothing is lost from the journal."""
    node = job.start("--fault-budget", "0", script=("--step-time", "0.005"))
    number = job.wait_for_steps(2)
    for count in range(1, times + 1):
        before = job.events()
        master = node.master()
        processes.kill(master)
        job.wait_for_event(f"master is back in epoch {count + 1}")
        job.wait_for("it to be attached", lambda: "attached" in job.events()[-1] or None)
        assert job.events()[: len(before)] == before, job.dump()
        job.wait_for_more_steps(number, 2)
    job.finish()
    job.ends(0)
    assert {line.round for line in job.told("start")} == {number}, job.dump()
    assert len(job.told("start")) == 2, job.dump()
    _assert_complete(job.folder / "logs" / "job" / "journal.db")


def _assert_complete(journal: Path) -> None:
    with closing(sqlite3.connect(journal)) as database:
        for table in ("events", "notes"):
            numbers = [row[0] for row in database.execute(f"select seq from {table} order by seq")]
            assert numbers == list(range(numbers[0], numbers[-1] + 1)), table


def test_a_master_that_dies_once_the_job_has_a_result(job: Job) -> None:
    """Its next life only tells who has not heard: a job that drains does not go on after all."""
    node = job.start("--drain-timeout", "3", script=("--on-term", "ignore"))
    number = job.wait_for_steps(2)
    job.ctl("drain", "--reason", "maintenance")
    job.wait_for("the signal", lambda: job.told("term", round=number) or None)
    processes.kill(node.master())
    job.ends(213)
    assert job.round() == number, job.dump()
    assert job.report()["result"]["exit_code"] == 213


def test_a_job_that_was_drained_goes_on_at_once(job: Job) -> None:
    """On the same port, though connections of the life before linger there for a minute."""
    for count in range(3):
        nodes = [job.start(nodes="1:2", nproc=1, name=f"n{count}{letter}") for letter in "ab"]
        number = job.wait_for_steps(2, after=job.round() if count else 0)
        job.ctl("drain")
        for node in nodes:
            assert node.exit_code() == 213, job.dump()
        assert job.round() == number
    job.ends(*[213] * 6)


def test_a_node_that_waited_for_long_survives_the_masters_death(job: Job) -> None:
    """It had nothing to hear for longer than it would wait for a master that is away."""
    node = job.start(nodes="1:1", nproc=1)
    number = job.wait_for_steps(1)
    joins = ("--rdzv-conf", "is_host=false", "--join-timeout", "2")
    spare = job.start(*joins, nodes="1:1", nproc=1)
    job.wait_for_event("node1 attached")
    job.wait_for_more_steps(number, 1, count=150)  # 3 s and more
    processes.kill(node.master())
    job.wait_for("both to be back", lambda: "node1 attached" in _since_it_died(job) or None)
    job.finish()
    job.ends(0, 0)
    assert "no master answers" not in spare.said(), job.dump()


def _since_it_died(job: Job) -> str:
    return " ".join(job.events()).rpartition("master is back")[2]


def test_a_master_that_dies_as_soon_as_it_is_back(job: Job) -> None:
    node = job.start()
    number = job.wait_for_steps(2)
    agent = node.agent()
    for _ in range(3):
        before = {p.pid for p in processes.children(node.guardian)}
        processes.kill(*(before - {agent}))
        job.wait_for(
            "a new master",
            lambda: {p.pid for p in processes.children(node.guardian)} - before or None,  # noqa: B023
        )
    node.master()
    job.wait_for_more_steps(number, 2)
    processes.kill(job.rank(number, 0))
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)
    assert len({line.round for line in job.told("start")}) == 2, job.dump()


def test_a_master_that_dies_while_a_round_forms(job: Job) -> None:
    first = job.start(nodes="2", name="node0")
    job.wait_for_event("1 of at least 2 nodes here")
    processes.kill(first.master())
    job.start(nodes="2", name="node1")
    job.wait_for_event("round 1")
    processes.kill(first.master())  # which has formed a round, and may not have told anybody
    number = job.wait_for_steps(4)
    processes.kill(job.rank(number, 3), first.master())
    job.wait_for_steps(4, after=number)
    job.finish()
    job.ends(0)


# --- it hangs ---


def test_a_master_that_hangs_is_ended_and_the_next_one_recovers_who_died_meanwhile(
    job: Job,
) -> None:
    """Stopped, say. All that ranks do meanwhile is train on."""
    node = job.start("--lease", "1", "--fault-budget", "1", log_level="WARNING")
    number = job.wait_for_steps(2)
    master = node.master()
    processes.kill(master, number=signal.SIGSTOP)
    processes.kill(job.rank(number, 0))
    job.wait_for_steps(2, after=number)
    assert not processes.alive(master)
    job.finish()
    job.ends(0)
    line = f"the master has done nothing for 20 s, though its process {master} is there (state T"
    assert node.said().count(line) == 1, job.dump()
    assert job.report()["epoch"] == 2
    _assert_complete(job.folder / "logs" / "job" / "journal.db")


def test_a_master_that_does_not_go_away_has_none_beside_it(job: Job, freezer: Freezer) -> None:
    """As in the kernel's state D: the next one begins once it is gone."""
    node = job.start("--lease", "1")
    number = job.wait_for_steps(2)
    master, agent = node.master(), node.agent()
    freezer.freeze(master)
    job.wait_for("a word of it", lambda: f"process {master} is there" in node.said() or None)
    job.wait_for_more_steps(number, 2, count=150)  # 3 s and more
    assert {p.pid for p in processes.children(node.guardian)} == {master, agent}, job.dump()
    freezer.thaw()
    job.wait_for_event("master is back in epoch 2")
    job.finish()
    job.ends(0)
    assert job.round() == number, job.dump()
    assert node.said().count(f"process {master} is there") == 1, job.dump()


# --- the clock ---

SHIFT = """
import os, time
real, path = time.time, os.path.join({folder!r}, "offset")

def shifted():
    try:
        with open(path) as file:
            return real() + float(file.read() or 0)
    except OSError:
        return real()

time.time = shifted
"""


def test_the_clock_jumps_by_an_hour_to_and_fro(job: Job) -> None:
    """Every process of ours sees the jumps, also the master that comes after one."""
    site = job.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SHIFT.format(folder=str(job.folder)))
    path = {"PYTHONPATH": f"{site}:{ROOT}"}
    flags = ("--fault-budget", "0", "--below-min-timeout", "500")
    node = job.start(*flags, nodes="2", environ=path)
    job.wait_for_event("1 of at least 2 nodes here")
    offset = job.folder / "offset"
    epoch = 1

    def jump(seconds: float) -> None:
        nonlocal epoch
        offset.write_text(str(seconds))
        processes.kill(node.master())
        epoch += 1
        job.wait_for_event(f"master is back in epoch {epoch}")

    jump(3600)
    job.start(*flags, nodes="2", environ=path)
    number = job.wait_for_steps(4)
    for seconds in (0, -3600, 3600):
        offset.write_text(str(-seconds))
        job.wait_for_more_steps(number, 4)
        jump(seconds)
        job.wait_for_more_steps(number, 4)
    job.finish()
    job.ends(0)
    assert job.round() == number == 1, job.dump()


def test_no_decision_looks_at_the_wall_clock() -> None:
    """Only what people read, the gap between two masters, and torch's timers may know the time of day:
    these come as such, and are at once counted from now. On Kubernetes a status is read by others."""
    allowed = {
        "master/shell.py", "master/commands.py", "master/notify.py", "agent/call.py", "agent/file_timer.py",
        "elastic/job_master.py",
    }  # fmt: skip
    found = set()
    for folder in ("master", "agent", "proto", "elastic"):
        for path in (ROOT / folder).glob("*.py"):
            tree = ast.parse(path.read_text())
            names = {
                f"{node.value.id}.{node.attr}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            }
            if names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}:
                found.add(str(path.relative_to(ROOT)))
    assert found <= allowed

"""`elasticctl` and folders as others leave them: not readable, not writable, broken."""

import asyncio
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.master import events as ev
from elastic.master.journal import SNAPSHOT_EVERY, Journal
from elastic.master.policy import Policy
from elastic.master.shell import Shell
from elastic.proto import job_folder
from elastic.proto import master_pb2 as pb
from elastic.proto.job_folder import JOURNAL, MASTER, METRICS, REPORT
from elastic.proto.process import began
from tests.elastic.asking import Answer, Ask, columns
from tests.master.builders import BUG, attached, failed, store
from tests.master.serving import Agent, MasterProcess, master, noted, ready, reserved

NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody can reach; pytest's own are for their user alone."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    yield base
    for folder in base.iterdir():
        folder.chmod(0o700)
    shutil.rmtree(base)


@pytest.fixture
def over(shared: Path) -> Path:
    """The folder of a job that succeeded."""

    async def run() -> None:
        async with master(shared / "over") as address, Agent(address) as agent:
            await agent.ordered(pb.Directive.RUN)
            await agent.report(pb.NodeReport.FINISHED, 1)
            await agent.ordered(pb.Directive.EXIT)

    asyncio.run(run())
    return shared / "over"


@pytest.fixture
def killed(shared: Path) -> Path:
    """The folder of a job whose master was killed in round 1."""

    async def run(address: str) -> None:
        await process.said("job begins")
        await ready(address)
        async with Agent(address) as agent:
            await agent.ordered(pb.Directive.RUN)
            await noted(address, "round 1")
        await noted(address, "node-a left")  # with which the round ended

    with reserved() as address, MasterProcess(shared / "killed", address) as process:
        asyncio.run(run(address))
    return shared / "killed"


@pytest.fixture
def as_another(ask: Ask, tmp_path: Path) -> Ask:
    """As a user whom permissions bind; for root, as somebody else."""
    Journal(tmp_path / JOURNAL).close()
    for verb in ("status", "events", "logs"):
        ask("--dir", tmp_path, verb)  # somebody else may not find what would be imported only now

    def run(*args: str | Path) -> Answer:
        if os.geteuid():
            return ask(*args)
        os.seteuid(NOBODY)
        try:
            return ask(*args)
        finally:
            os.seteuid(0)

    return run


def one_line(answer: Answer) -> str:
    """What it says of what it cannot do."""
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (1, "", 1), answer
    return answer.err


# --- not readable ---------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_read_hides_no_other(over: Path, as_another: Ask) -> None:
    shutil.copytree(over, over.with_name("closed")).chmod(0)
    assert columns(as_another("--dir", over.parent, "status").lines[1])[1] == "succeeded"


def test_a_folder_that_cannot_be_read(over: Path, as_another: Ask) -> None:
    over.chmod(0)
    for verb in ("status", "events", "logs"):
        said = one_line(as_another("--dir", over, verb))
        assert f"{over} cannot be read: Permission denied" in said


def test_logs_that_cannot_be_read(over: Path, as_another: Ask) -> None:
    log = over / "attempt_0" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line\n")
    assert as_another("--dir", over, "logs").out == "a line\n"
    log.chmod(0)
    assert "Permission denied" in one_line(as_another("--dir", over, "logs"))
    (over / "attempt_0").chmod(0)
    said = one_line(as_another("--dir", over, "logs"))
    (over / "attempt_0").chmod(0o700)
    assert "Permission denied" in said


# --- not writable ---------------------------------------------------------------------------------


def closed(folder: Path) -> Path:
    """To be read by everyone, and written to by nobody."""
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def test_a_job_of_somebody_else_that_is_over(over: Path, as_another: Ask) -> None:
    answer = as_another("--dir", closed(over), "status")
    assert (answer.code, answer.err) == (0, "")
    assert columns(answer.lines[1])[1:4] == ["succeeded", "1", "1"]
    assert "its node finished" in as_another("--dir", over, "events").out


def test_a_job_of_somebody_else_that_was_killed(killed: Path, as_another: Ask) -> None:
    answer = as_another("--dir", closed(killed), "status")
    assert answer.code == 0
    assert columns(answer.lines[1])[1:4] == ["dead", "1", "1"]
    assert "round 1: " in as_another("--dir", killed, "events").out


def test_a_folder_is_left_as_it_was(killed: Path, ask: Ask) -> None:
    """A file that a reader left there could be one that the job's own user may not write."""
    before = {
        path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in killed.iterdir()
    }
    for verb in ("status", "events"):
        assert ask("--dir", killed, verb).code == 0
    assert before == {
        path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in killed.iterdir()
    }


# --- whose master is there, or seems to be --------------------------------------------------------


def note_that_it_is(folder: Path, pid: int, since: str) -> None:
    """The master of a job whose master was killed: a process that listens nowhere."""
    note = job_folder.read_note(folder)
    assert note is not None
    assert note.began
    job_folder.write_note(folder, replace(note, pid=pid, began=since))


def test_another_process_of_the_masters_number_is_not_the_master(killed: Path, ask: Ask) -> None:
    note = job_folder.read_note(killed)
    assert note is not None
    note_that_it_is(killed, os.getpid(), note.began)
    answer = ask("--dir", killed, "status")
    assert (answer.code, columns(answer.lines[1])[1:4]) == (0, ["dead", "1", "1"]), answer
    assert "is there" not in answer.err
    assert "Round 1 ended" in ask("--dir", killed, "why").out


@pytest.mark.parametrize("said", [True, False], ids=["of now", "of before it said when it began"])
def test_of_a_master_that_does_not_answer_the_past_is_told(
    killed: Path, ask: Ask, said: bool
) -> None:
    note_that_it_is(killed, os.getpid(), began(os.getpid()) if said else "")
    for verb, shown in (("why", "Round 1 ended"), ("events", "round 1: ")):
        answer = ask("--dir", killed, verb)
        assert answer.code == 0, answer
        assert shown in answer.out
        assert len(answer.err.splitlines()) == 1
        assert f"Its process {os.getpid()} is there. Here is what {killed} says." in answer.err
    for args in (("status",), ("events", "--follow"), ("logs", "--follow"), ("restart",)):
        assert "no master answers" in one_line(ask("--dir", killed, *args))
    assert f"{killed} has no logs" in ask("--dir", killed, "logs").err


def test_a_report_without_its_journal(over: Path, ask: Ask) -> None:
    whole = json.loads(ask("--dir", over, "-o", "json", "status").out)
    (over / JOURNAL).write_text("these are the days of our lives\n" * 100)
    answer = ask("--dir", over, "-o", "json", "status")
    assert (answer.code, len(answer.err.splitlines())) == (0, 1)
    assert "not a database" in answer.err
    assert json.loads(answer.out) == {**whole, "world_size": 0, "nodes": []}
    assert columns(ask("--dir", over, "status").lines[1])[1:4] == ["succeeded", "1", "0"]
    assert "not a database" in one_line(ask("--dir", over, "events"))


STEP = '{"kind": "step", "iteration": 7, "losses": {"lm loss": 2.5}, "tokens_per_second": 1234.5, "mfu": 0.41}'


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (STEP, {"LOSS": "2.5", "TOKENS/S": "1,234", "MFU": "41.0%"}),
        ('{"kind": "step", "losses": {"lm loss": "NaN"}}', {"LOSS": "nan"}),
        ('{"kind": "step", "losses": {"x": [1]}, "mfu": {}}', {}),
        ('{"kind": "step", "losses": 3, "mfu": 1%s}' % ("0" * 400), {}),
        ('{"kind": "probe", "losses": {"lm loss": 1}}', {}),
    ],
)
def test_what_a_script_said_of_its_newest_step(
    over: Path, ask: Ask, line: str, shown: dict[str, str]
) -> None:
    (over / METRICS).write_text(f"{line}\n")
    head, row, *_ = ask("--dir", over, "status").lines
    cells = dict(zip(columns(head), columns(row), strict=True))
    assert {name: cells[name] for name in ("LOSS", "TOKENS/S", "MFU") if name in cells} == shown
    told = json.loads(ask("--dir", over, "-o", "json", "status").out)["metrics"]
    assert told == (json.loads(line) if '"step"' in line else None)


# --- broken ---------------------------------------------------------------------------------------

REPORTS = [
    '{"result": 5}',
    '{"result": {}}',
    "[]",
    "5",
    "[" * 100_000,
    "\udcff",
    '{"result": {"outcome": "failed", "exit_code": 1, "reason": "so"}}',
    None,  # a report whose times are not numbers
]


@pytest.mark.parametrize("text", REPORTS, ids=range(len(REPORTS)))
def test_a_broken_report(over: Path, ask: Ask, text: str | None) -> None:
    report = over / REPORT
    (over / MASTER).unlink()  # it names a process that lives: this one
    if text is None:
        text = json.dumps({**json.loads(report.read_text()), "seconds": float("inf")})
    report.write_bytes(text.encode(errors="surrogateescape"))
    answer = ask("--dir", over, "status")
    assert answer.code == 0, answer.err
    assert columns(answer.lines[1])[1:4] == ["succeeded", "1", "1"]
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    "fields",
    [{"pid": float("inf")}, {"address": "\ud800:1"}, {"run_id": "a\udcffb"}, {"epoch": "soon"}, []],
    ids=str,
)
def test_a_broken_note_of_the_master(over: Path, ask: Ask, fields: Any) -> None:
    """With the report gone, nobody would know that the job is over without asking its master."""
    (over / REPORT).unlink()
    note = json.loads((over / MASTER).read_text()) | {"pid": 1 << 22}
    note = {**note, **fields} if fields else fields
    (over / MASTER).write_text(json.dumps(note))
    answer = ask("--dir", over, "status")
    assert answer.code == 0, answer.err
    assert columns(answer.lines[1])[1:4] == ["succeeded", "1", "1"]


def change(folder: Path, statement: str, *values: object) -> None:
    database = sqlite3.connect(folder / JOURNAL)
    with database:
        database.execute(statement, values)
    database.close()


@pytest.mark.parametrize(
    "value",
    [
        "reason = cast(x'80ff' as text)",
        "reason = x'80'",
        "wall = 'soon'",
        "wall = 9e999",
        "wall = 1e18",
        "job = 'soon'",
        "detail = '{'",
    ],
)
def test_a_broken_note_in_the_journal(over: Path, ask: Ask, value: str) -> None:
    change(over, f"update notes set {value} where seq = 2")
    for args in (("events",), ("events", "--follow"), ("events", "-o", "json")):
        assert "journal" in one_line(ask("--dir", over, *args))
    assert ask("--dir", over, "status").code == 0


@pytest.mark.parametrize("value", ["body = cast(x'80ff' as text)", "wall = 'soon'", "job = x'00'"])
def test_a_broken_event_in_the_journal(killed: Path, ask: Ask, value: str) -> None:
    change(killed, f"update events set {value} where seq = 2")
    answer = ask("--dir", killed, "status")
    assert (answer.code, answer.out) == (1, "")
    assert "journal" in answer.err.splitlines()[-1]
    assert "Traceback" not in answer.err


def test_an_attempt_that_is_no_folder(over: Path, ask: Ask) -> None:
    (over / "attempt_0").write_text("")
    assert "Not a directory" in one_line(ask("--dir", over, "logs"))


def test_a_name_that_is_no_text(over: Path, ask: Ask) -> None:
    odd = over.rename(over.parent / os.fsdecode(b"j\xffb"))
    (odd / MASTER).unlink()
    assert columns(ask("--dir", odd, "status").lines[1])[1] == "succeeded"


def test_why_tells_of_a_failure_of_which_the_events_are_gone(shared: Path, ask: Ask) -> None:
    """A snapshot stands for them, as after half an hour of steps."""
    folder = shared / "long"
    folder.mkdir()
    policy = Policy(max_nodes=1, max_restarts=3)

    async def run() -> None:
        with closing(Journal(folder / JOURNAL)) as journal:
            shell = Shell(journal, policy, "launch")
            await shell.begin(lambda effect: None, None, asyncio.Event())
            shell.fold(attached("a"))
            shell.fold(ev.Progressed(1, 1))
            shell.fold(failed("a", 1, BUG))
            shell.fold(store("a", "a:2"))
            for step in range(2, SNAPSHOT_EVERY + 10):
                shell.fold(ev.Progressed(2, step))
            assert len(journal.load()[3]) < 100

    asyncio.run(run())
    found = json.loads(ask("--dir", folder, "why", "-o", "json").out)
    assert (found["round"], found["failed"], found["label"]) == (1, True, "script_error")
    assert found["next_round"] == 2
    said = ask("--dir", folder, "why").out
    assert said.startswith("Round 1 ended after ")
    assert "rank 0 on a, at train.py:3 in step" in said
    assert "started again as round 2" in said

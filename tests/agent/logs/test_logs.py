"""A round's log files: how many rounds' are kept, how long they get, what the console shows of them."""

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.logs.logs import AttemptLogs
from elastic.agent.logs.tee import Tail
from elastic.agent.settings import LogSettings
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
LINES, ROUNDS = 500, 8


@pytest.mark.parametrize(("keep", "kept"), [(1, [0, 4]), (2, [0, 4]), (3, [0, 3, 4])])
def test_the_first_attempt_and_the_one_in_use_are_kept(
    tmp_path: Path, keep: int, kept: list[int]
) -> None:
    settings = LogSettings(run_dir=tmp_path, redirects=3, keep=keep)
    for number in range(1, 6):
        streams = AttemptLogs(settings, number, "role").open(0, 0)
        for fd in (streams.stdout, streams.stderr):
            os.close(fd)
        assert (tmp_path / f"attempt_{number - 1}" / "0" / "stdout.log").exists()
    assert sorted(tmp_path.iterdir()) == [tmp_path / f"attempt_{number}" for number in kept]


# --- how long they get ---------------------------------------------------------------------------

LIMIT = 1 << 20


def bounded(path: Path) -> bool:
    """Whether the disk holds no more of a file than its limit, and the file is as long as it was."""
    found = path.stat()
    return found.st_size > LIMIT and found.st_blocks * 512 <= LIMIT + 8192


@pytest.mark.parametrize("words", [(), ("word",)], ids=["redirects", "filters"])
def test_files_keep_their_limit_while_ranks_write(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Those that ranks write, and those that we write of them."""
    nobody = frozenset[int]() if not words else None
    tee = 1 if words else 0
    settings = LogSettings(
        run_dir=tmp_path,
        redirects=3,
        tee=tee,
        local_ranks=nobody,
        stdout_filters=words,
        limit=LIMIT,
    )
    logs = AttemptLogs(settings, 1, "role")
    streams = logs.open(0, 0)
    logs.follow()
    paths = [tmp_path / "attempt_0" / "0" / "stdout.log"]
    if words:
        paths.append(tmp_path / "attempt_0" / "filtered_stdout.log")
    try:
        os.write(streams.stdout, (b"a word " * 16 + b"\n") * (8 << 13))
        wait_for("bounded files", lambda: all(bounded(path) for path in paths))
    finally:
        os.close(streams.stdout)
        os.close(streams.stderr)
        asyncio.run(logs.close())


# --- what the console shows ----------------------------------------------------------------------


def test_a_line_ends_once_however_its_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.touch()
    tail, shown = Tail(path, "[r0]:"), b""
    for written in (b"one\r", b"\ntwo\r\n", b"10 %\r", b"20 %\r", b"\n\nend"):
        with path.open("ab") as file:
            file.write(written)
        shown += tail.read()
    shown += tail.end()
    assert shown.decode().replace("[r0]:", "").splitlines() == [
        "one", "two", "10 %", "20 %", "", "end",
    ]  # fmt: skip


class Program:
    """Rounds with teed files in a process of its own, and the reader's end of its console."""

    def __init__(self, folder: Path, read: int, write: int) -> None:
        self.read = read
        self._folder = folder
        command = ("-m", "tests.agent.logs.logs_program", str(folder), str(ROUNDS), str(LINES))
        self.process = subprocess.Popen(
            (sys.executable, *command), stdout=write, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        os.close(write)

    def result(self) -> dict[str, Any]:
        assert self.process.wait(60) == 0
        return json.loads((self._folder / "result.json").read_text())  # type: ignore[no-any-return]

    def file(self, number: int) -> str:
        return (self._folder / "logs" / f"attempt_{number}" / "0" / "stdout.log").read_text()


def _stopped_terminal() -> tuple[int, int]:
    read, write = pty.openpty()
    termios.tcflow(write, termios.TCOOFF)  # as by ^S
    return read, write


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Program]:
    """Its parameter makes the console."""
    made = Program(tmp_path, *request.param())
    yield made
    made.process.kill()
    made.process.wait()
    os.close(made.read)


WRITTEN = [
    "".join(f"out {number} {line}\n" for line in range(LINES)) for number in range(1, ROUNDS + 1)
]


@pytest.mark.parametrize(
    "program", [pty.openpty, _stopped_terminal], indirect=True, ids=["unread", "stopped"]
)
def test_a_console_that_takes_nothing_costs_a_round_nothing(program: Program) -> None:
    found = program.result()
    assert sum(found["closing"]) < 2.0, found
    assert found["finish"] < 3.0, found
    assert len(set(found["threads"][4:])) == 1, found
    assert len(set(found["files"][4:])) == 1, found
    assert [program.file(number) for number in range(ROUNDS)] == WRITTEN


def _read_all(fd: int) -> bytes:
    """To the end, which a terminal shows as an error."""
    found = b""
    with contextlib.suppress(OSError):
        while data := os.read(fd, 1 << 16):
            found += data
    return found


@pytest.mark.parametrize("program", [pty.openpty, os.pipe], indirect=True, ids=["terminal", "pipe"])
def test_a_console_that_is_read_shows_every_line_in_its_order(program: Program) -> None:
    with ThreadPoolExecutor(1) as reader:
        shown = reader.submit(_read_all, program.read)
        program.result()
        lines = shown.result().decode().replace("\r\n", "\n").splitlines()
    assert lines == [f"[role0]:{line}" for text in WRITTEN for line in text.splitlines()]

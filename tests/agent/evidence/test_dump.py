import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.evidence import dump
from elastic.agent.evidence.dump import Target, Unanswered
from elastic.proto import looks

from . import programs
from .programs import PATIENCE, program

HERE = Path(__file__).parent
WAIT = "def waits():\n print('ready', flush=True)\n sys.stdin.read()\nwaits()\n"
SPIN = "import ctypes\nprint('ready', flush=True)\nctypes.PyDLL(None).sleep(1000)\n"


@pytest.fixture
def target() -> Iterator[Target]:
    """Of a memfd that a program inherits by the same number."""
    fd = os.memfd_create("dump")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    yield Target(fd=fd, number=fd)
    os.close(fd)


def ask(pid: int, target: Target, timeout: float = PATIENCE) -> str:
    async def run() -> str:
        deadline = asyncio.get_running_loop().time() + timeout
        return await dump.ask(pid, target, deadline=deadline)

    return asyncio.run(run())


@contextlib.contextmanager
def answering(code: str, target: Target) -> Iterator[int]:
    fd = target.number
    with program(programs.ANSWERS + code, fds=(fd,), args=(str(fd),)) as pid:
        yield pid


def test_a_rank_answers_more_than_once(target: Target) -> None:
    with answering(WAIT, target) as pid:
        for _ in range(50):
            (main,) = dump.parse(ask(pid, target), pid)
            assert main.tid == pid
            assert [frame.function for frame in main.frames] == ["waits", "<module>"]


def test_one_that_holds_the_gil_answers(target: Target) -> None:
    with answering(SPIN, target) as pid:
        (main,) = dump.parse(ask(pid, target), pid)
    assert [frame.function for frame in main.frames] == ["<module>"]


def test_a_text_is_whole_also_with_many_deep_threads(target: Target) -> None:
    code = (
        "go = threading.Event()\n"
        "def deep(n):\n"
        " deep(n - 1) if n else go.wait()\n"
        "for _ in range(90): threading.Thread(target=deep, args=(60,), daemon=True).start()\n"
    )
    with answering(code + WAIT, target) as pid:
        text = ask(pid, target)
        assert text.count("(most recent call first)") == 91
        assert text.rstrip().endswith("in <module>")
        main, *others = dump.parse(text, pid)
    assert main.frames[0].function == "waits"
    assert sum(len(thread.frames) for thread in (main, *others)) <= looks.ALL_FRAMES


def test_of_more_threads_than_it_writes_the_main_one_is_left_out(target: Target) -> None:
    code = (
        "go = threading.Event()\n"
        "for _ in range(120): threading.Thread(target=go.wait, daemon=True).start()\n"
    )
    with answering(code + WAIT, target) as pid:
        text = ask(pid, target)
    threads = dump.parse(text, pid)
    assert "\n...\n" in text
    assert "Current thread" not in text
    assert threads
    assert not any(thread.tid for thread in threads)


def test_who_has_no_handler_lives_on(target: Target) -> None:
    with program(programs.WAITS, fds=(target.number,)) as pid:
        with pytest.raises(Unanswered, match="no handler"):
            ask(pid, target)
        programs.wait_for_state(pid, "S")


def test_who_runs_another_program_by_now_lives_on(target: Target) -> None:
    code = "import os\nos.set_inheritable(int(sys.argv[1]), True)\n"
    execs = f"os.execv(sys.executable, [sys.executable, '-c', {programs.WAITS!r}])\n"
    with answering(code + execs, target) as pid:
        with pytest.raises(Unanswered, match="no handler"):
            ask(pid, target)
        programs.wait_for_state(pid, "S")


def test_a_file_that_took_the_number_is_not_written_to(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    file.write_text("1,2\n")
    code = f"import os\nf = os.open({str(file)!r}, os.O_WRONLY)\nos.dup2(f, int(sys.argv[1]))\n"
    with answering(code + WAIT, target) as pid, pytest.raises(Unanswered, match="closed"):
        ask(pid, target)
    assert file.read_text() == "1,2\n"


def test_who_is_gone_is_said_to_be(target: Target) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(Unanswered, match="gone"):
        ask(process.pid, target)


def test_a_stopped_one_is_not_asked_twice_and_answers_once_it_goes_on(target: Target) -> None:
    with answering(WAIT, target) as pid:
        os.kill(pid, signal.SIGSTOP)
        programs.wait_for_state(pid, "T")
        for _ in range(3):
            with pytest.raises(Unanswered, match="did not answer"):
                ask(pid, target, timeout=0.05)
        os.kill(pid, signal.SIGCONT)
        assert ask(pid, target).count("Current thread") == 1
        assert ask(pid, target).count("Current thread") == 1


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_what_python_writes_is_read(version: str) -> None:
    """Recorded by tests/agent/evidence/record.py."""
    threads = dump.parse((HERE / "dumps" / f"python-{version}.txt").read_text(), 77)
    assert [thread.tid for thread in threads] == [77, 0, 0]
    main, deep, worker = threads
    assert [frame.function for frame in main.frames] == ["ask", "step", "main", "<module>"]
    assert main.frames[0].file == r"/home/anna/tr\xe4in/loop.py"
    assert main.frames[0].line == 10
    marked = version != "3.13"  # which says nothing of the 101st frame and on
    assert len(deep.frames) == 100 + marked
    assert (deep.frames[-1].function == "<more>") == marked
    assert worker.frames[0].function == "wait"


SINCE_3_14 = r"""
Thread 0x00007fa975aa36c0 [pt_data_pin [0]] (most recent call first):
  File "/usr/lib/python/threading.py", line 359 in wait
  File "/usr/lib/python/threading.py", line ??? in wait
  <invalid frame>

Thread 0x00007fa975aa36c1 [python] (most recent call first):
  File ???, line 3 in f
plus 151 frames

Current thread 0x00007fa977636b80 [python] (most recent call first):
  Garbage-collecting
  File "/home/a/", line 1 in x/loop.py", line 10 in ask
  File "<stdin>", line 26 in <module>

Thread 0x00007fa975aa36c2 (most recent call first):
  <no Python frame>
"""
"""By its source: Python/traceback.c."""


def test_what_later_pythons_write_is_read() -> None:
    main, pin, deep, current = dump.parse(SINCE_3_14, 77)
    assert (main.tid, main.frames) == (77, ())
    assert pin.name == "pt_data_pin [0]"
    assert [frame.line for frame in pin.frames] == [359, 0]
    assert [frame.function for frame in deep.frames] == ["f", "<more>"]
    assert [frame.function for frame in current.frames] == ["ask", "<module>"]


def test_what_is_no_dump_has_no_threads() -> None:
    assert dump.parse("", 77) == ()
    assert dump.parse('  File "x", line 3 in f\nnot enough\x00', 77) == ()


def test_one_thread_alone_is_the_main_one() -> None:
    """So writes a Python without a GIL."""
    text = 'Stack (most recent call first):\n  File "x.py", line 3 in f\n'
    (main,) = dump.parse(text, 77)
    assert (main.tid, main.frames[0].function) == (77, "f")

"""A terminal that takes nothing, as by ^S or in a dead ssh session."""

import os
import pty
import signal
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from tests.e2e.harness import Job, processes


@pytest.fixture
def stopped() -> Iterator[int]:
    read, write = pty.openpty()
    termios.tcflow(write, termios.TCOOFF)
    yield write
    os.close(read)
    os.close(write)


@pytest.fixture
def unread() -> Iterator[int]:
    read, write = pty.openpty()
    yield write
    os.close(read)
    os.close(write)


def test_a_stopped_terminal_holds_up_no_restart(job: Job, stopped: int) -> None:
    node = job.start("--tee", "3", script=("--print",), console=stopped)
    number = job.wait_for_steps(2)
    took = []
    for count in range(4):
        began = time.monotonic()
        processes.kill(job.rank(number, count % 2))
        number = job.wait_for_steps(2, after=number)
        took.append(time.monotonic() - began)
    assert min(took) < 5, job.dump()  # which is what the console held up each of them, once
    processes.kill(node.agent(), node.master())
    number = job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)
    for rank in range(2):
        path = job.folder / "logs" / "job" / f"attempt_{number - 1}" / str(rank) / "stdout.log"
        steps = [line.fields["step"] for line in job.told("step", round=number, rank=rank)]
        assert path.read_text() == "".join(f"step {n} of rank {rank}\n" for n in steps)


def test_a_terminal_that_nobody_reads_holds_up_no_signal(job: Job, unread: int) -> None:
    """What the ranks print has filled it up."""
    job.start("--tee", "3", script=("--print", "--step-time", "0.001"), console=unread)
    number = job.wait_for_steps(2, count=400)
    processes.kill(job.rank(number, 1))
    job.wait_for_steps(2, after=number, count=400)
    job.nodes[0].signal(signal.SIGTERM)
    job.ends(1)


_AT_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_a_terminal_that_stops_writers_in_the_background(job: Job, unread: int) -> None:
    """`stty tostop`: agent and master are no part of the launcher's process group."""
    settings = termios.tcgetattr(unread)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(unread, termios.TCSANOW, settings)
    job.start(prefix=(sys.executable, "-c", _AT_A_TERMINAL), console=unread)
    number = job.wait_for_steps(2)
    processes.kill(job.rank(number, 1))
    job.wait_for_steps(2, after=number)
    assert not [process for process in job.left() if process.state == "T"], job.dump()
    job.finish()
    job.ends(0)


def test_what_a_rank_raises_moves_nobodys_cursor(job: Job) -> None:
    """An exception's text is anybody's, and launchers of other nodes show it too."""
    node = job.start(nproc=1, script=("--fault", "step:escape:0:1"))
    job.ends(1)
    told = r"raised ValueError: \x1b[31m red \x1b]0;title\x07"
    ours = [line for line in node.said().splitlines() if line.startswith("elastic-run: ")]
    assert any(told in line for line in ours), job.dump()
    assert all(line.isprintable() for line in ours), job.dump()
    for verb in ("status", "events"):
        answer = job.ctl(verb)
        assert told in answer, answer
        assert answer.replace("\n", "").isprintable(), answer

import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from elastic.agent import children
from elastic.agent.evidence import spy
from elastic.agent.evidence.dump import Target
from elastic.agent.evidence.look import Looker, ask, mostly
from elastic.proto import codec, looks
from elastic.proto.looks import Look
from tests.e2e.harness.freezer import Freezer

from . import programs
from .programs import PATIENCE, program
from .test_tcp import tells


def look(
    ranks: Mapping[int, int],
    *,
    native: Collection[int] = (),
    timeout: float = PATIENCE,
) -> tuple[Look, ...]:
    async def run() -> tuple[Look, ...]:
        looker = Looker()
        deadline = asyncio.get_running_loop().time() + timeout
        found = await looker.look(ranks, native=native, deadline=deadline)
        while looker.pids:  # py-spy that was cut off is still to be reaped
            await asyncio.sleep(0.01)
        return found

    return asyncio.run(run())


def answer(found: Look, target: Target) -> Look:
    async def run() -> Look:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        return await ask(found, target, deadline=deadline)

    return asyncio.run(run())


def functions(found: Look) -> list[str]:
    return [frame.function for frame in looks.telling(found)]


@pytest.mark.parametrize(
    ("holds", "told"),
    [
        ((True, True), True),
        ((True, False, True), True),
        ((True, False, False), False),
        ((False,), False),
    ],
)
def test_who_holds_the_gil_does_at_two_of_three_moments(
    holds: tuple[bool, ...], told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What calls a library again and again is between two calls now and then. holds: what py-spy tells, each time."""
    left = a_stand_in_tells(holds, tmp_path, monkeypatch)
    with program(programs.WAITS) as pid:
        programs.wait_for_state(pid, "S")  # who runs is asked again
        (found,) = look({0: pid})
    assert found.threads[0].gil is told, found
    assert json.loads(left.read_text()) == []


@pytest.mark.parametrize(
    ("moments", "told"),
    [
        ("R+ R+", "R+"),
        ("S+ R+ R+", "R+"),  # it waited for the GIL at the first
        ("R- R+ S+", "R+"),
        ("R- S- R+", "R-"),
        ("S+ S+", "S+"),  # sleeps with it
        ("R+ S- D-", "R-"),
    ],
)
def test_a_look_is_what_most_of_its_moments_are(moments: str, told: str) -> None:
    """A state, and whether the main thread has the GIL."""
    found = mostly([moment(word, at) for at, word in enumerate(moments.split())])
    assert replace(found, at=0.0) == moment(told, 0)
    assert moments.split()[int(found.at)][1] == told[1]


def moment(word: str, at: int) -> Look:
    threads = (looks.Thread(tid=7, frames=(), gil=word[1] == "+"),)
    return Look(rank=0, pid=7, at=float(at), state=word[0], how="py-spy", threads=threads)


BACKWARD = looks.Frame(function="_engine_run_backward", file="torch/autograd/graph.py")
JOIN = looks.Frame(function="Thread.join", file="lib/python3.11/threading.py")
READS = looks.Frame(function="inner", file="train.py")


@pytest.mark.parametrize(("innermost", "alone"), [(BACKWARD, False), (JOIN, False), (READS, True)])
def test_who_waits_for_a_thread_of_its_own_is_read_again(
    innermost: looks.Frame, alone: bool
) -> None:
    """Which runs meanwhile, whether it could be seen to or not."""
    threads = (looks.Thread(tid=7, frames=(innermost, READS)), looks.Thread(tid=8, frames=()))
    assert looks.tells_alone(Look(rank=0, pid=7, at=0.0, state="S", threads=threads)) is alone


def test_who_has_not_run_since_is_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most ranks of a job that hangs sleep, and py-spy would take the processor from those that are to be seen."""
    left = a_stand_in_tells((False, False), tmp_path, monkeypatch)

    async def looks_at(looker: Looker, pid: int) -> tuple[tuple[looks.Thread, ...], int]:
        programs.wait_until_it_sleeps(pid)
        (found,) = await looker.look({0: pid}, deadline=asyncio.get_running_loop().time() + 60)
        assert found.how == "py-spy", found
        return found.threads, len(json.loads(left.read_text()))

    async def run(pid: int) -> None:
        looker = Looker()
        first = await looks_at(looker, pid)
        assert first[1] == 1
        assert await looks_at(looker, pid) == first
        os.kill(pid, signal.SIGSTOP)
        programs.wait_for_state(pid, "T")
        os.kill(pid, signal.SIGCONT)
        assert await looks_at(looker, pid) == (first[0], 0)

    with program(programs.WAITS) as pid:
        asyncio.run(run(pid))


def a_stand_in_tells(
    holds: tuple[bool, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """In place of py-spy; where it keeps what it has not told yet of who holds the GIL."""
    stand_in, left = folder / "py-spy", folder / "left"
    stand_in.write_text(f"#!{sys.executable} -I\n{PY_SPY}")
    stand_in.chmod(0o755)
    left.write_text(json.dumps(holds))
    monkeypatch.setattr(spy, "executable", lambda: str(stand_in))
    return left


PY_SPY = """
import json, pathlib, sys
left = pathlib.Path(__file__).with_name("left")
holds, *others = json.loads(left.read_text())
left.write_text(json.dumps(others))
frame = {"name": "score", "filename": "train.py", "line": 3}
thread = {"os_thread_id": int(sys.argv[-1]), "thread_name": "main", "active": True, "owns_gil": holds, "frames": [frame]}
print(json.dumps([thread]))
"""


def test_a_look_at_a_waiting_rank_has_its_stacks_and_what_the_kernel_says() -> None:
    with program(programs.WAITS) as pid:
        programs.wait_for_state(pid, "S")
        (found,) = look({3: pid})
    assert (found.rank, found.pid, found.state, found.how) == (3, pid, "S", "py-spy"), found
    assert functions(found) == ["inner", "Trainer.step", "<module>"]
    assert looks.telling(found)[0].line == 5
    helper = next(thread for thread in found.threads if thread.name == "helper")
    assert looks.bare(helper.frames[0].function) == "wait"
    assert found.threads[0].tid == pid
    assert found.threads[0].state == "S"
    assert found.wchan == "" or "read" in found.wchan
    assert found.main_cpu_seconds <= found.cpu_seconds
    assert codec.loads(Look, codec.dumps(found)) == found


def test_ranks_of_a_node_are_told_apart() -> None:
    loops = "print('ready', flush=True)\nwhile True: pass"
    with (
        program(programs.WAITS) as first,
        program(loops) as second,
        program(programs.WAITS) as third,
    ):
        found = look({0: first, 1: second, 2: third})
    assert [one.rank for one in found] == [0, 1, 2]
    assert [functions(one)[0] for one in found] == ["inner", "<module>", "inner"]


def test_a_stopped_rank_is_looked_at_and_stays_stopped() -> None:
    with program(programs.WAITS) as pid:
        os.kill(pid, signal.SIGSTOP)
        programs.wait_for_state(pid, "T")
        (found,) = look({0: pid}, native=[0])
        after = programs.state(pid)
    assert (found.state, found.how, found.native, after) == ("T", "py-spy", False, "T"), found
    assert functions(found)[0] == "inner"


def test_a_rank_in_d_state_is_looked_at(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data")
    with program(programs.VFORKS, args=(str(tmp_path / "data"),)) as pid:
        programs.wait_for_state(pid, "D")
        (found,) = look({0: pid}, native=[0])
    assert (found.state, found.how, found.native) == ("D", "py-spy", False), found
    assert functions(found) == ["read_data", "<module>"]
    assert len(found.children) == 1, found.children
    assert found.kernel_stack or found.wchan, "the kernel tells root, and us of our own"


def test_one_that_no_signal_ends_holds_nobody_up(freezer: Freezer) -> None:
    with program(programs.WAITS) as pid, program(programs.WAITS) as other:
        freezer.freeze(pid)
        try:
            programs.wait_for_state(pid, "D")
            frozen, running = look({0: pid, 1: other})
        finally:
            (freezer.group / "freezer.state").write_text("THAWED")  # else nothing ends it
    assert (frozen.state, running.state) == ("D", "S")
    assert functions(running)[0] == "inner"
    assert functions(frozen)[0] == "inner", frozen.problem


def test_who_has_ended_is_said_to_have() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    programs.wait_for_state(process.pid, "Z")
    (zombie,) = look({0: process.pid})
    process.wait()
    (gone,) = look({0: process.pid})
    assert (zombie.state, zombie.how, gone.state, gone.how) == ("Z", "none", "", "none")
    assert zombie.problem
    assert gone.problem


@pytest.mark.parametrize("ends_after", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_one_that_ends_meanwhile_leaves_a_look(ends_after: float) -> None:
    async def run(pids: dict[int, int]) -> tuple[Look, ...]:
        loop = asyncio.get_running_loop()
        loop.call_later(ends_after, os.kill, pids[0], signal.SIGKILL)
        return await Looker().look(pids, deadline=loop.time() + PATIENCE)

    with program(programs.WAITS) as pid, program(programs.WAITS) as other:
        ending, staying = asyncio.run(run({0: pid, 1: other}))
    assert functions(staying)[0] == "inner"
    assert ending.how == "none" or functions(ending)[0] == "inner"
    assert (ending.how == "none") == bool(ending.problem), ending


def test_children_are_told_of_and_looked_at_closely_only_for_the_rank_that_is_named() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {programs.WAITS!r}],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "dead = subprocess.Popen(['true'])\n"
        "child.stdout.readline()\n"
        "os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with program(code) as pid:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            programs.wait_for_state(int(child), "S", "Z")
        (far,) = look({0: pid})
        (close,) = look({0: pid}, native=[0])
    assert sorted(child.state for child in far.children) == ["S", "Z"]
    assert not any(child.frames for child in far.children)
    alive = next(child for child in close.children if child.state == "S")
    assert [frame.function for frame in alive.frames] == ["inner", "Trainer.step", "<module>"]
    assert close.native, close.problem
    assert any(looks.is_native(frame) for frame in close.threads[0].frames)
    python = [f.function for f in close.threads[0].frames if not looks.is_native(f)]
    assert python == functions(far)


def test_a_stack_too_deep_for_py_spy_is_asked_for() -> None:
    fd = os.memfd_create("dump")
    try:
        with program(programs.DEEP, fds=(fd,), args=("dump", str(fd))) as pid:
            append(fd)
            (alone,) = look({0: pid})
            asked = answer(alone, Target(fd=fd, number=fd))
    finally:
        os.close(fd)
    assert (alone.how, alone.threads) == ("none", ())
    assert alone.problem.startswith("py-spy: ")
    assert asked.how == "faulthandler", asked.problem
    assert functions(asked)[0] == "f"


def append(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)


def test_a_deadline_that_is_over_is_kept() -> None:
    with program(programs.WAITS) as pid:
        programs.wait_for_state(pid, "S")
        (found,) = look({0: pid}, timeout=0.0)
    assert (found.how, found.state) == ("none", "S"), found
    assert found.problem


@pytest.mark.parametrize("timeout", [0.01 * n for n in range(1, 21)])
def test_a_close_look_that_is_cut_off_leaves_nobody_stopped(timeout: float) -> None:
    with program(programs.WAITS) as pid:
        (found,) = look({0: pid}, native=[0], timeout=timeout)
        programs.wait_for_state(pid, "S")
    assert found.native or found.problem


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls by their numbers there")
def test_where_no_memory_may_be_read_ranks_are_asked() -> None:
    """A sandbox that forbids it: a seccomp filter, in a process of its own."""
    fd = os.memfd_create("dump")
    append(fd)
    code = (
        programs.ANSWERS + "def waits():\n print('ready', flush=True)\n sys.stdin.read()\nwaits()"
    )
    try:
        with program(code, fds=(fd,), args=(str(fd),)) as pid:
            done = subprocess.run(
                [sys.executable, "-c", SANDBOXED, str(pid), str(fd)],
                pass_fds=[fd], capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
    finally:
        os.close(fd)
    assert done.returncode == 0, done.stderr
    alone, asked = (codec.loads(Look, line) for line in done.stdout.splitlines())
    assert alone.how == "none"
    assert "permi" in alone.problem.lower(), alone.problem
    assert asked.how == "faulthandler", asked.problem
    assert functions(asked) == ["waits", "<module>"]


SANDBOXED = """
import asyncio, sys
from elastic.agent.evidence.dump import Target
from elastic.agent.evidence.look import Looker, ask
from elastic.proto import codec
from tests.e2e.harness import sandbox

async def main():
    pid, fd = map(int, sys.argv[1:])
    deadline = asyncio.get_running_loop().time() + 60
    (alone,) = await Looker().look({0: pid}, deadline=deadline)
    asked = await ask(alone, Target(fd=fd, number=fd), deadline=deadline)
    for look in (alone, asked):
        print(codec.dumps(look))
sandbox.enter()
asyncio.run(main())
"""


def test_bytes_that_a_rank_writes_are_seen(tmp_path: Path) -> None:
    """Also while its main thread waits for the one that writes them."""
    writes = (
        "import sys, threading\n"
        "def write():\n"
        "    with open(sys.argv[1], 'wb', buffering=0) as file:\n"
        "        for line in sys.stdin:\n"
        "            file.write(bytes(1 << 20))\n"
        "            print('written', flush=True)\n"
        "thread = threading.Thread(target=write)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    command = [sys.executable, "-c", writes, str(tmp_path / "written")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        moved = []
        for _ in range(2):
            print("more", file=rank.stdin, flush=True)
            assert rank.stdout.readline() == "written\n"
            (found,) = look({0: rank.pid})
            moved.append(found.io_bytes)
        rank.stdin.close()
    assert 1 << 20 <= moved[1] - moved[0] < 2 << 20


PART = 4 << 20
"""Bytes."""
SENDS = f"""
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
while link.recv(1):
    link.sendall(bytes({PART}))
"""
RECEIVES = f"""
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
while link.recv({PART}, socket.MSG_WAITALL):
    link.sendall(b"!")
"""


def take(link: socket.socket) -> None:
    """A part of an upload."""
    link.sendall(b"?")
    assert len(link.recv(PART, socket.MSG_WAITALL)) == PART


def give(link: socket.socket) -> None:
    link.sendall(bytes(PART))
    assert link.recv(1) == b"!"


def fill(link: socket.socket) -> None:
    """Have it send more than the kernel takes for one that does not read."""
    link.sendall(b"?")


def looks_after(
    code: str, *steps: Callable[[socket.socket], None], by_child: bool = False
) -> list[Look]:
    """One after each of these, which are given our end of a program's connection. by_child: a child's child is what
    connects. It sleeps when it is looked at."""

    async def run(pid: int, link: socket.socket) -> list[Look]:
        looker, loop, found = Looker(), asyncio.get_running_loop(), list[Look]()
        for step in steps:
            step(link)
            programs.wait_until_it_sleeps(children.tree(pid)[-1])
            found += await looker.look({0: pid}, deadline=loop.time() + PATIENCE)
        return found

    for _ in range(2 * by_child):
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, *sys.argv[1:]])"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        program(code, args=(str(server.getsockname()[1]),)) as pid,
        server.accept()[0] as link,
    ):
        return asyncio.run(run(pid, link))


@tells
@pytest.mark.parametrize("by_child", [False, True])
@pytest.mark.parametrize(("code", "move"), [(SENDS, take), (RECEIVES, give)])
def test_bytes_that_move_over_sockets_are_seen(
    code: str, move: Callable[[socket.socket], None], by_child: bool
) -> None:
    """Of a rank's own, and of those of the processes that it began."""
    for before, after in pairwise(looks_after(code, move, move, move, by_child=by_child)):
        own = after.io_bytes - before.io_bytes
        theirs = after.helpers_io_bytes - before.helpers_io_bytes
        moved, others = (theirs, own) if by_child else (own, theirs)
        assert abs(moved - PART) < 1 << 20, "but for what is under way at one of them"
        assert others == 0


@tells
@pytest.mark.parametrize("by_child", [False, True])
def test_who_sends_to_one_that_never_reads_moves_no_bytes(by_child: bool) -> None:
    code = SENDS.replace(str(PART), str(64 << 20))
    before, after = looks_after(code, fill, lambda _: None, by_child=by_child)
    assert after.io_bytes == before.io_bytes
    assert after.helpers_io_bytes == before.helpers_io_bytes


@pytest.mark.parametrize("ended", [True, False])
def test_what_processes_that_a_rank_began_have_done_is_seen(ended: bool, tmp_path: Path) -> None:
    """A compiler's time, or what tar writes. Once it has been waited for, its bytes are the rank's."""
    works = (
        "import sys, time\n"
        "while time.process_time() < 0.3: pass\n"
        "with open(sys.argv[1], 'wb', buffering=0) as file: file.write(bytes(8 << 20))\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {works!r}, sys.argv[1]],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        + "child.communicate()\n" * ended
        + "print('ready', flush=True)\n"
        + "sys.stdin.read()\n"
    )
    with program(code, args=(str(tmp_path / "written"),)) as pid:
        (found,) = look({0: pid})
    assert 0.25 <= found.helpers_cpu_seconds < PATIENCE
    assert (found.io_bytes if ended else found.helpers_io_bytes) >= 8 << 20

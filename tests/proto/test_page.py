"""The progress page: what is written is read, by another process too, whatever happens meanwhile."""

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto import page
from elastic.proto.errors import PageError, ProtocolMismatch

ROOT = Path(__file__).parents[2]


def new() -> tuple[int, page.PageWriter]:
    fd = page.create()
    writer = page.PageWriter.claim(fd, os.getpid())
    assert writer is not None
    return fd, writer


def seen(fd: int) -> page.Progress:
    return page.read(page.open_page(fd))


def test_new_page_says_nothing() -> None:
    progress = seen(page.create())
    assert progress == page.Progress(
        owner=0, claims=0, phase="", phase_ns=0, step=None, step_ns=0, ticks=0, tick_ns=0
    )


def test_what_is_written_is_read() -> None:
    fd, writer = new()
    before = time.monotonic_ns()
    writer.tick()
    writer.tick()
    writer.step(0)
    writer.phase("evaluate")
    after = time.monotonic_ns()
    progress = seen(fd)
    assert (progress.owner, progress.claims) == (os.getpid(), 1)
    assert (progress.ticks, progress.step, progress.phase) == (2, 0, "evaluate")
    for stamp in (progress.tick_ns, progress.step_ns, progress.phase_ns):
        assert before <= stamp <= after


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_phase_is_the_last_one_cut_at_a_character(names: list[str]) -> None:
    fd, writer = new()
    for name in names:
        writer.phase(name)
    phase = seen(fd).phase
    whole = names[-1].encode(errors="replace").decode()
    assert whole.startswith(phase) or whole.rstrip("\0") == phase
    assert len(phase.encode()) <= page.PHASE_BYTES
    os.close(fd)


def test_a_step_that_no_optimizer_has_shown_is_a_sign_of_life() -> None:
    """Of two signs of the same step one counts."""
    fd, writer = new()
    writer.step(1)
    writer.step(2)
    assert seen(fd).ticks == 2
    assert seen(fd).tick_ns >= seen(fd).step_ns
    writer.tick()
    writer.step(3)
    writer.tick()
    writer.tick()
    writer.step(4)
    assert seen(fd).ticks == 5


@pytest.mark.parametrize("number", [-1, 2**62])
def test_impossible_step(number: int) -> None:
    with pytest.raises(ValueError, match="a step is"):
        new()[1].step(number)


def test_offsets_are_those_of_the_table() -> None:
    fd, writer = new()
    writer.tick()
    writer.step(7)
    writer.phase("one")
    writer.phase("two")
    raw = os.pread(fd, page.SIZE, 0)
    assert raw[:8] == b"ELASTICP"
    assert struct.unpack_from("=HHI", raw, 8) == (1, 1, 4096)
    owner, ticks, tick_ns, step, step_ns, claims, changes = struct.unpack_from("=7q", raw, 16)
    assert (owner, ticks, step, claims, changes) == (os.getpid(), 1, 8, 1, 2)
    assert 0 < tick_ns <= step_ns
    assert page.ticks(page.open_page(fd)) == (1, tick_ns, struct.unpack_from("=q", raw, 128)[0])
    assert raw[136:139] == b"two"
    assert raw[200:203] == b"one"
    assert page.OWNER_OFFSET == 16


def test_second_process_gets_nothing_while_the_first_lives() -> None:
    fd = page.create()
    code = (
        "import os, sys; from elastic.proto.page import PageWriter; "
        "print(PageWriter.claim(int(sys.argv[1]), os.getpid()) is not None, flush=True); input()"
    )

    def claimant() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", code, str(fd)],
            pass_fds=[fd],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def said(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with claimant() as first, claimant() as second:
        answers = sorted([said(first), said(second)])
        assert answers == ["False", "True"]
        assert seen(fd).owner in (first.pid, second.pid)
        first.send_signal(signal.SIGKILL)
        second.send_signal(signal.SIGKILL)
    with claimant() as third:
        assert said(third) == "True"  # the dead own nothing
        assert seen(fd).claims == 2
        third.send_signal(signal.SIGKILL)


def test_phase_is_never_torn_while_it_is_written() -> None:
    """A writer in another process alternates two long names; a reader sees one of them, whole."""
    fd, _ = new()
    code = (
        "import sys; from elastic.proto.page import PageWriter, open_page\n"
        "writer = PageWriter(open_page(int(sys.argv[1]), write=True), 0)\n"
        "while True:\n    writer.phase('a' * 56); writer.phase('b' * 56); writer.tick()"
    )
    mapped = page.open_page(fd)
    with subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=[fd], cwd=ROOT) as writer:
        try:
            phases = set()
            deadline = time.monotonic() + 60
            while (now := page.read(mapped)).ticks < 20_000 and time.monotonic() < deadline:
                phases.add(now.phase)
        finally:
            writer.kill()
    assert page.read(mapped).ticks >= 20_000
    assert phases - {""} <= {"a" * 56, "b" * 56}


@given(st.binary(max_size=64) | st.binary(min_size=4096, max_size=4096))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(PageError):
        page.read(data)


@given(st.binary(min_size=4080, max_size=4080))
def test_any_bytes_behind_a_header(data: bytes) -> None:
    page.read(struct.pack("=8sHHI", page.MAGIC, 1, 0, 4096) + data)


def test_versions() -> None:
    def header(major: int, minor: int, size: int = 4096) -> bytes:
        return struct.pack("=8sHHI", page.MAGIC, major, minor, size).ljust(4096, b"\0")

    page.read(header(1, 0))
    page.read(header(1, 2))
    for major, minor in ((1, 3), (2, 0), (0, 0)):
        with pytest.raises(ProtocolMismatch, match="the progress page speaks version"):
            page.read(header(major, minor))
    with pytest.raises(PageError):
        page.read(header(1, 0, 8192))


def test_no_page_behind_the_descriptor() -> None:
    read, write = os.pipe()
    os.close(read)
    for fd in (write, 1 << 20):
        with pytest.raises(PageError, match="is no progress page"):
            page.PageWriter.claim(fd, os.getpid())
    os.close(write)


def test_nobody_can_shrink_it() -> None:
    fd = page.create()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)

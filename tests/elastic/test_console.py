"""A console that nobody reads must not stop whoever writes to it."""

import contextlib
import logging
import os
from collections.abc import Iterator

import pytest

from elastic.console import KEPT, LONGEST, ConsoleHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):
            os.close(fd)


def fill(write: int) -> int:
    """Bytes that went in until it was full."""
    count = 0
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            count += os.write(write, b"." * 4096)
    os.set_blocking(write, True)
    return count


def say(handler: ConsoleHandler, text: str) -> None:
    handler.emit(logging.LogRecord("elastic", logging.INFO, "", 0, text, (), None))


def test_lines_wait_for_a_reader_and_keep_their_order(pipe: tuple[int, int]) -> None:
    read, write = pipe
    handler = ConsoleHandler(write)
    full = fill(write)
    for word in ("one", "two\nlines", "thrée"):
        say(handler, word)  # would block for ever
    assert os.read(read, full) == b"." * full
    say(handler, "four")
    assert os.read(read, 1 << 16).decode() == "one\ntwo\nlines\nthrée\nfour\n"


def test_what_is_kept_is_bounded_and_the_newest(pipe: tuple[int, int]) -> None:
    read, write = pipe
    handler = ConsoleHandler(write)
    full = fill(write)
    for number in range(KEPT + 5):
        say(handler, f"line {number}")
    os.read(read, full)
    handler.flush()
    lines = os.read(read, 1 << 20).decode().splitlines()
    assert lines == [f"line {number}" for number in range(5, KEPT + 5)]


def test_a_long_line_is_cut_and_a_closed_end_is_no_error(pipe: tuple[int, int]) -> None:
    read, write = pipe
    handler = ConsoleHandler(write)
    say(handler, "x" * 100_000)
    assert len(os.read(read, 1 << 20)) == LONGEST
    os.close(read)
    say(handler, "nobody hears")
    handler.flush()

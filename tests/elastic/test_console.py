"""A console that nobody reads must not stop whoever writes to it."""

import contextlib
import logging
import os
import pty
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.console import KEPT, LONGEST, ConsoleHandler

pytestmark = pytest.mark.timeout(60)  # a write that blocks would do so for ever


class Pipe:
    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self._filled = 0

    def stop(self) -> None:
        """It takes nothing any more: it is full."""
        os.set_blocking(self.write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._filled += os.write(self.write, b"." * 4096)
        os.set_blocking(self.write, True)

    def go(self) -> None:
        take(self.read, self._filled)

    def shown(self, text: str) -> bytes:
        return text.encode()


class Terminal:
    def __init__(self) -> None:
        self.read, self.write = pty.openpty()

    def stop(self) -> None:
        """As by ^S."""
        termios.tcflow(self.write, termios.TCOOFF)

    def go(self) -> None:
        termios.tcflow(self.write, termios.TCOON)

    def shown(self, text: str) -> bytes:
        return text.encode().replace(b"\n", b"\r\n")


Console = Pipe | Terminal


@pytest.fixture(params=[Pipe, Terminal])
def console(request: pytest.FixtureRequest) -> Iterator[Console]:
    made: Console = request.param()
    yield made
    for fd in (made.read, made.write):
        with contextlib.suppress(OSError):
            os.close(fd)


def take(read: int, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += os.read(read, min(1 << 16, count - len(found)))
    return found


def flushed(handler: ConsoleHandler, console: Console, count: int) -> bytes:
    """What somebody reads while the handler writes what it has kept."""
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(take, console.read, count)
        handler.flush()
        return read.result()


def say(handler: ConsoleHandler, text: str) -> None:
    handler.emit(logging.LogRecord("elastic", logging.INFO, "", 0, text, (), None))


def test_lines_wait_for_a_reader_and_keep_their_order(console: Console) -> None:
    handler = ConsoleHandler(console.write)
    console.stop()
    for word in ("one", "two\nlines", "thrée"):
        say(handler, word)  # would block for ever
    console.go()
    say(handler, "four")
    expected = console.shown("one\ntwo\nlines\nthrée\nfour\n")
    assert take(console.read, len(expected)) == expected


def test_what_is_kept_is_bounded_and_the_newest(console: Console) -> None:
    handler = ConsoleHandler(console.write)
    console.stop()
    for number in range(KEPT + 5):
        say(handler, f"line {number}")
    console.go()
    expected = console.shown("".join(f"line {number}\n" for number in range(5, KEPT + 5)))
    assert flushed(handler, console, len(expected)) == expected


def test_a_console_that_nobody_reads_takes_lines_once_somebody_does(console: Console) -> None:
    """Without a stop: its buffer fills up, in the midst of a line perhaps."""
    handler = ConsoleHandler(console.write)
    lines = [f"{number} ".ljust(900, "x") for number in range(400)]
    for line in lines:
        say(handler, line)
    expected = console.shown("".join(f"{line}\n" for line in lines))
    assert flushed(handler, console, len(expected)) == expected


def test_a_console_that_stays_stuck_keeps_nobody_at_the_end(console: Console) -> None:
    handler = ConsoleHandler(console.write)
    console.stop()
    say(handler, "never shown")
    handler.flush()


def test_the_ranks_descriptor_still_blocks(console: Console) -> None:
    ConsoleHandler(console.write)
    assert os.get_blocking(console.write)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_leaves_its_parents_lines_to_the_parent(console: Console) -> None:
    handler = ConsoleHandler(console.write)
    console.stop()
    say(handler, "once")
    if (child := os.fork()) == 0:
        console.go()
        handler.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(handler, "twice")
    handler.flush()
    expected = console.shown("once\ntwice\n")
    assert take(console.read, len(expected)) == expected


def test_a_long_line_is_cut_and_a_closed_end_is_no_error(console: Console) -> None:
    handler = ConsoleHandler(console.write)
    expected = console.shown("x" * (LONGEST - 1) + "\n")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(take, console.read, len(expected))
        say(handler, "x" * 100_000)
        handler.flush()
        assert read.result() == expected
    os.close(console.read)
    say(handler, "nobody hears")
    handler.flush()

"""What a rank tells of itself, in processes of its kind."""

import socket
import subprocess
import sys

import pytest

from elastic.agent.recorder import DATAGRAM
from elastic.proto import codec, looks
from elastic.proto.looks import Told

SERVES = """
import re, socket, sys, threading
from elastic.agent import recorder
end = socket.socket(fileno=int(sys.argv[1]))
threading.Thread(target=recorder._serve, args=(end,), daemon=True).start()
def deep(n):
    if n:
        deep(n - 1)
def busy():
    while True:
        deep(50)
        exec("def f(x):\\n    return [i for i in range(5)]\\nf(1)", {})
def hold():
    re.match(r"(a+)+$", "a" * 64 + "b")
"""
BUSY = "for _ in range(3): threading.Thread(target=busy, daemon=True).start()\nbusy()\n"
DEEP = """
sys.setrecursionlimit(100_000)
def waits(n):
    waits(n - 1) if n else sys.stdin.read()
for _ in range(30): threading.Thread(target=waits, args=(500,), daemon=True).start()
waits(5000)
"""


def asked(code: str, times: int, *, patience: float = 60.0) -> list[Told]:
    """What it answers; TimeoutError where it does not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVES + code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        ours.settimeout(patience)
        try:
            found = []
            for _ in range(times):
                ours.send(b"?")
                said = ours.recv(DATAGRAM)
                assert said, f"it is gone: {process.wait()}"
                found.append(codec.loads(Told, said))
            return found
        finally:
            process.kill()
            process.communicate()


def test_one_that_is_busy_answers_and_lives() -> None:
    """A signal that is handled in C would end it, some hundred times in."""
    found = asked(BUSY, 2000)
    mains = [told.threads[0] for told in found]
    assert all(main.frames[-1].function == "<module>" for main in mains)
    assert sum(any(frame.function == "busy" for frame in main.frames) for main in mains) > 1900
    assert len(found[-1].threads) == 4


def test_an_answer_fits_whatever_the_stacks() -> None:
    told = asked(DEEP, 20)[-1]
    assert [frame.function for frame in (told.threads[0].frames[0], told.threads[0].frames[-1])] == [
        "waits", "<module>",
    ]  # fmt: skip
    assert sum(len(thread.frames) for thread in told.threads) <= 2 * looks.TOLD_FRAMES


def test_one_that_holds_the_gil_does_not_answer() -> None:
    with pytest.raises(TimeoutError):
        asked("hold()", 2, patience=1.0)

"""Real processes to look at."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

from elastic.agent import tasks

PATIENCE = 60.0


@contextlib.contextmanager
def program(code: str, *, fds: tuple[int, ...] = (), args: tuple[str, ...] = ()) -> Iterator[int]:
    """Python that runs `code` until it has written a line; its pid. Its standard input stays open."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=fds,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), "the program ended before it was ready"
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def state(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def wait_for_state(pid: int, *states: str) -> None:
    """Looks often, since nothing tells of most of a process's states."""
    looks = 0
    while (now := state(pid)) not in states:
        assert looks < 100 * PATIENCE, f"{pid} is in state {now!r}, not in {states}"
        looks += 1
        select.select([], [], [], 0.01)


def wait_until_it_sleeps(pid: int) -> None:
    """For what does not come, and not for the GIL a moment before that."""
    counts = [0, 1]
    while counts[-1] != counts[-2]:
        wait_for_state(pid, "S")
        counts.append(tasks.switches(pid))
        select.select([], [], [], 0.05)


WAITS = """
import sys, threading
def inner():
    print("ready", flush=True)
    sys.stdin.read()
class Trainer:
    def step(self):
        inner()
event = threading.Event()
threading.Thread(target=event.wait, name="helper", daemon=True).start()
Trainer().step()
"""

DEEP = """
import sys
sys.setrecursionlimit(100_000)
if "dump" in sys.argv[1:2]:
    import faulthandler
    from elastic.proto.looks import DUMP_SIGNAL
    faulthandler.register(DUMP_SIGNAL, file=int(sys.argv[2]), all_threads=True, chain=False)
def f(n):
    if n:
        f(n - 1)
    else:
        print("ready", flush=True)
        sys.stdin.read()
f(9_000)
"""

ANSWERS = """
import faulthandler, sys, threading
from elastic.proto.looks import DUMP_SIGNAL
faulthandler.register(DUMP_SIGNAL, file=int(sys.argv[1]), all_threads=True, chain=False)
"""

VFORKS = """
import os, sys
def read_data():
    print("ready", flush=True)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
read_data()
"""
"""In D state: the parent of a vfork waits so until its child executes, and this one's opens a pipe first
that nobody else has open."""

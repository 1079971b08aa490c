import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic.agent import children


@pytest.mark.parametrize("by", ["watch", "reap"])
@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_process_shared_and_had_not_unlinked_goes_with_it(
    killed: bool, by: str
) -> None:
    """One that ended by itself may have left it to others."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Path(f"/dev/shm/torch_{os.getpid()}_77_0").touch()
            os.write(writer, b".")
            if killed:
                signal.pause()
        finally:
            os._exit(0)
    os.close(writer)
    shared = Path(f"/dev/shm/torch_{pid}_77_0")
    try:
        assert os.read(reader, 1) == b"."
        if killed:
            children.kill_tree(pid)
        if by == "watch":
            asyncio.run(watched(pid))
        else:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert children.reap(pid)
        assert shared.exists() != killed
    finally:
        shared.unlink(missing_ok=True)
        os.close(reader)


async def watched(pid: int) -> None:
    await asyncio.wait_for(children.watch(pid), 60)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("pass", None),
        # Half of a letter: a name is cut at fifteen bytes.
        (
            "import setproctitle; setproctitle.setthreadtitle('a' * 14 + 'é'); raise SystemExit(3)",
            3,
        ),
    ],
)
def test_how_a_process_ends_shows_before_it_is_reaped(script: str, code: int | None) -> None:
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert children.ending(process.pid) == code
    assert children.ending(process.pid) is None


def test_a_process_whose_first_thread_has_ended_runs_on() -> None:
    script = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        assert children.ending(process.pid) is None
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 60
        while " Z " not in stat.read_text():
            assert time.monotonic() < deadline, stat.read_text()
            os.sched_yield()
        assert children.ending(process.pid) is None
        process.kill()

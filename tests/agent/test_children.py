import os
import signal
from pathlib import Path

import pytest

from elastic.agent import children


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_process_shared_and_had_not_unlinked_goes_with_it(killed: bool) -> None:
    """One that ended by itself may have left it to others."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        Path(f"/dev/shm/torch_{os.getpid()}_77_0").touch()
        os.write(writer, b".")
        if killed:
            signal.pause()
        os._exit(0)
    shared = Path(f"/dev/shm/torch_{pid}_77_0")
    os.read(reader, 1)
    try:
        if killed:
            children.kill_tree(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert children.reap(pid)
        assert shared.exists() != killed
    finally:
        shared.unlink(missing_ok=True)
        os.close(reader)
        os.close(writer)

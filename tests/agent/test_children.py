import asyncio
import os
import signal
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

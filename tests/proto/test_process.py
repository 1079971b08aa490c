"""Which process a pid that was written down means."""

import os
import subprocess
import sys

from elastic.proto import process
from elastic.proto.job_folder import MasterNote


def test_no_two_processes_began_at_the_same_time_with_one_number() -> None:
    own = process.began(os.getpid())
    assert own == process.began(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        assert process.began(one.pid) not in ("", own)
    assert process.began(one.pid) == ""


def test_a_master_lives_where_its_own_process_is_there() -> None:
    pid, own = os.getpid(), process.began(os.getpid())
    assert lives(pid, own)
    assert lives(pid, ""), "an older version did not say when"
    assert not lives(pid, process.began(os.getppid()))
    assert not lives(pid, own.replace("-", "", 1)), "of another boot"
    assert not lives(1 << 22, own)
    assert not lives(1 << 22, "")


def lives(pid: int, began: str) -> bool:
    return MasterNote(address="a:1", run_id="job", pid=pid, began=began).lives()

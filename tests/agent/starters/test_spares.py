"""Spare ranks, on the CPU: forked ahead, lost, ordered, given up. What a GPU adds is its context."""

import array
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic.agent.starters import spare, warmup
from elastic.agent.starters.spec import StartSpec
from elastic.checkpoint.memory import lanes
from elastic.checkpoint.save.ahead import Ahead
from elastic.proto import slot

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os, sys
registered = None
if "SLOT" in os.environ:
    from elastic.checkpoint.memory import host, lanes
    view = host.shared(os.open(os.environ["SLOT"], os.O_RDWR))
    registered = len(lanes.registered(view) or ())
with open(os.path.join(os.path.dirname(__file__), "rank.json"), "w") as file:
    told = {"argv": sys.argv[1:], "rank": os.environ["RANK"], "seen": os.environ["SEEN"]}
    late = [name for name in sys.modules if name.startswith("leaves_thread")]
    compiled = len(sys.modules["torch._dynamo.utils"].get_compilation_metrics())
    frames = sys.modules["torch._dynamo.convert_frame"].FRAME_COUNTER
    profile = sys.modules["torch._dynamo.pgo"]._CODE_STATE is not None
    threads = len(os.listdir("/proc/self/task"))
    json.dump({**told, "name": __name__, "torch": "torch" in sys.modules, "pid": os.getpid(),
        "registered": registered, "late": late, "threads": threads,
        "compiled": compiled, "frames": frames, "profile": profile, "rehearsed": sys.modules["rehearsed"].done}, file)
sys.exit(5)
"""
REHEARSED = """
import os
import threading
import torch
done = []
def act(argument, device):
    done.append((argument, device, "ELASTIC_PAGE_FD" in os.environ))
    print("to nowhere")
    torch.rand(1)
    raise RuntimeError("which harms nobody")
def hangs(argument, device):
    open(os.path.join(os.path.dirname(__file__), "hangs"), "w").close()
    threading.Event().wait()
def dies(argument, device):
    os._exit(3)
"""
THREAD = (
    "import os, threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)


def test_a_spare_dies_another_one_becomes_the_rank_and_a_third_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "leaves_thread.py").write_text(THREAD)
    (tmp_path / "rehearsed.py").write_text(REHEARSED)
    (tmp_path / "leaves_thread_and_reads_rank.py").write_text(f"{THREAD}os.environ.get('RANK')\n")
    environ = {name: one for name, one in os.environ.items() if name not in warmup.WATCHED}
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.starters.spares_program", str(script)],
        cwd=ROOT,
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = "a spare rank has not rehearsed: RuntimeError: which harms nobody\n"
    assert done.stderr.count(said) == 1  # of five spares
    assert done.stderr.count("spare ranks rehearse no more") == 2
    seen = json.loads(done.stdout)
    pid = seen.pop("pid")
    assert seen == {
        "forked where the driver is slow": [True, False],  # but not once its round is over
        "after one that hung": True,
        "killed in its rehearsal": True,  # of which nothing is said
        "after one that died": True,
        "taken after its death": False,
        "took no orders": -signal.SIGKILL,
        "known while it gets its orders": True,
        "registered": [2, 1],
        "given back": [1, 0],
        "exit": 5,
        "kept": True,
        "given up": True,
        "forked again": False,
        "left": False,
    }, done.stderr
    assert json.loads((tmp_path / "rank.json").read_text()) == {
        "argv": ["x"],
        "rank": "3",
        "seen": "by the rank",
        "name": "__main__",
        "torch": True,
        "pid": pid,
        "registered": 3,
        "late": ["leaves_thread"],
        "compiled": 1,  # the compiler is warm
        "frames": 0,  # and the script's first graph is the first
        "profile": False,
        "threads": 2,  # ours, and that module's
        "rehearsed": [["what", "cpu", False]],
    }


class Resting(lanes.Host):
    """Notes how long it was let rest after each part; nobody else would end that."""

    def __init__(self) -> None:
        self.rested: list[float] = []

    def register(self, data: memoryview, rest: lanes.Rest | None = None) -> None:
        assert rest is not None
        began = time.monotonic()
        rest(60.0)
        self.rested.append(time.monotonic() - began)


def test_orders_end_the_pause_after_a_part() -> None:
    lane, told = Resting(), list[str]()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        slot_fd = slot.create((40 << 20) + slot.PAGE)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [slot_fd]))]
        ours.sendmsg([spare.SLOTS], rights)
        os.close(slot_fd)
        orders = threading.Timer(0.2, ours.send, (b"orders",))
        orders.start()
        assert spare.prepare(theirs, lambda: Ahead(lane), told.append) == (b"orders", [])
        orders.join()
    assert len(lane.rested) == 1
    assert lane.rested[0] < 30
    assert told == ["registering slots"]


@pytest.mark.parametrize("name", warmup.WATCHED)
def test_who_watches_the_compiler_sees_nothing_of_a_spare(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    spec = StartSpec(
        kind="spare", target="cpu", args=("os:abort", ""), environ={}, cwd="/", python="python"
    )
    assert warmup.rehearsal(spec) == f"{name} is set"

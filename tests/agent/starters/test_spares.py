"""Spare ranks, on the CPU: forked ahead, lost, ordered, given up. What a GPU adds is its context."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

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
    graphs = sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"]
    threads = len(os.listdir("/proc/self/task"))
    json.dump({**told, "name": __name__, "torch": "torch" in sys.modules, "pid": os.getpid(),
        "registered": registered, "late": late, "graphs": graphs, "threads": threads,
        "rehearsed": sys.modules["rehearsed"].done}, file)
sys.exit(5)
"""
REHEARSED = """
import os
import torch
done = []
def act(argument, device):
    done.append((argument, device, "ELASTIC_PAGE_FD" in os.environ))
    print("to nowhere")
    torch.rand(1)
    raise RuntimeError("which harms nobody")
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
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.starters.spares_program", str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a spare rank has not rehearsed: RuntimeError: which harms nobody\n" in done.stderr
    seen = json.loads(done.stdout)
    pid = seen.pop("pid")
    assert seen == {
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
        "graphs": 1,  # the compiler is warm
        "threads": 2,  # ours, and that module's
        "rehearsed": [["what", "cpu", False]],
    }

"""A forked rank is what a spawned one is: the same scripts, both ways, and what they print."""

import json
import os
import re
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.small_agent import STARTUP, SmallAgent, rank_spec

pytestmark = pytest.mark.xdist_group("starters")  # one standby for all of them

STARTERS = ("spawner", "standby")


@pytest.fixture(scope="module")
def agent() -> Iterator[SmallAgent]:
    agent = SmallAgent()
    for starter in (*STARTERS, "nursery"):
        assert agent.launch(starter)["threads"] == 1
    yield agent
    agent.close()


@pytest.fixture(scope="module", params=STARTERS)
def starter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def both(agent: SmallAgent, **spec: Any) -> list[dict[str, Any]]:
    return [agent.start(starter, **spec) for starter in STARTERS]


def same(agent: SmallAgent, **spec: Any) -> dict[str, Any]:
    """Run it both ways; what can be seen of it from outside must be the same."""
    spawned, forked = both(agent, **spec)
    assert forked["exit"] == spawned["exit"]
    for key in ("stdout", "stderr"):
        assert without_addresses(forked[key]) == without_addresses(spawned[key]), key
    return spawned


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


def script(folder: Path, text: str, name: str = "script.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


LOOK = """
import gc, json, os, signal, sys, threading
import torch
import __main__

def descriptors():
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
        except FileNotFoundError:
            pass
    return {k: v for k, v in sorted(found.items()) if not v.startswith("/proc")}

main = {k: repr(v) for k, v in vars(__main__).items() if k.startswith("__")}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "main": main,
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "executable": sys.executable,
    "flags": repr(sys.flags),
    "cwd": os.getcwd(),
    "environ": dict(os.environ),
    "handlers": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "mask": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "ignored": status["SigIgn"].strip(), "caught": status["SigCgt"].strip(),
    "umask": status["Umask"].strip(),
    "fds": descriptors(),
    "leader": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
    "oom": open("/proc/self/oom_score_adj").read(),
    "affinity": sorted(os.sched_getaffinity(0)),
    "streams": [
        [s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, type(s.buffer).__name__]
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "threads": [t.name for t in threading.enumerate()],
    "native": threading.main_thread().native_id == os.getpid(),
    "collects": gc.isenabled(),
    "ident": threading.main_thread().ident == threading.get_ident(),
}, indent=1, sort_keys=True))
"""


def test_script_sees_the_same_process(agent: SmallAgent, tmp_path: Path) -> None:
    same(agent, target=script(tmp_path, LOOK), args=["--a", "b c", ""], cpus=[0])


def test_relative_script_behind_a_link(agent: SmallAgent, tmp_path: Path) -> None:
    script(tmp_path, LOOK, "real/script.py")
    (tmp_path / "link.py").symlink_to("real/script.py")
    found = same(agent, target="link.py", cwd=str(tmp_path))
    assert json.loads(found["stdout"])["path"][0] == str(tmp_path / "real")


def test_module_sees_the_same_process(agent: SmallAgent, tmp_path: Path) -> None:
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, LOOK, "package/part.py")
    same(agent, kind="module", target="package.part", args=["x"], cwd=str(tmp_path))


def test_run_path_sees_the_same_process(agent: SmallAgent, tmp_path: Path) -> None:
    same(agent, kind="run_path", target=script(tmp_path, LOOK), args=["x"])


def test_folder_with_main(agent: SmallAgent, tmp_path: Path) -> None:
    script(tmp_path, LOOK, "program/__main__.py")
    same(agent, target=str(tmp_path / "program"))


ENDS = {
    "nothing": "",
    "prints": "print('out'); import sys; print('err', file=sys.stderr)",
    "exit 3": "raise SystemExit(3)",
    "exit none": "import sys; sys.exit(None)",
    "exit text": "import sys; sys.exit('a reason')",
    "exit 300": "import sys; sys.exit(300)",
    "exit object": "import sys; sys.exit(['list'])",
    "os exit": "import os; os._exit(5)",
    "raises": "def f():\n    raise ValueError('wrong')\nf()",
    "raises chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError(2, 'x') from e",
    "raises group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
    "raises in library": "import json\njson.loads('[')",
    "syntax": "x = (\n",
    "encoding": "# coding: latin-1\nprint(ascii('\\u00e9'))",
    "interrupt": "raise KeyboardInterrupt",
    "own interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "segfault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "pipe": "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
    "atexit": "import atexit\natexit.register(print, 'bye')\nraise RuntimeError('x')",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "atexit exits": "import atexit, sys\natexit.register(sys.exit, 4)",
    "threads": (
        "import threading\ngo = threading.Event()\n"
        "t = threading.Thread(target=lambda: (go.wait(), print('thread')))\nt.start()\n"
        "import atexit; atexit.register(print, 'exit')\nthreading.Timer(0.05, go.set).start()"
    ),
    "thread raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start()",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1 / 0",
    "excepthook raises": "import sys\ndef hook(*a):\n    raise TypeError('h')\nsys.excepthook = hook\n1 / 0",
    "excepthook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n1 / 0",
    "unraisable": "class A:\n    def __del__(self):\n        raise ValueError('d')\na = A()\ndel a",
    "finaliser": "class A:\n    def __del__(self):\n        print('gone')\na = A()",
    "closed stdout": "import sys\nsys.stdout.close()",
    "warns": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
    "partial line": "import sys\nsys.stdout.write('no newline')\nimport os\nos._exit(0)",
    "recursion": (
        "import sys\nsys.tracebacklimit = 2\ndef f(n):\n    return f(n + 1)\n"
        "try:\n    f(0)\nexcept RecursionError:\n    print('deep')"
    ),
    "os fork": "import os, sys\npid = os.fork()\nif not pid:\n    sys.exit(7)\nprint(os.waitpid(pid, 0)[1])",
    "pickles main": (
        "import pickle\nclass A: pass\n"
        "print(pickle.loads(pickle.dumps(A())).__class__ is A, A.__module__)"
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_script_ends_the_same(agent: SmallAgent, tmp_path: Path, name: str) -> None:
    same(agent, target=script(tmp_path, ENDS[name] + "\n"))


def test_python_is_asked_to_tell_where_it_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    agent = SmallAgent()
    for starter in STARTERS:
        agent.launch(starter)
    spawned, forked = both(agent, target=script(tmp_path, ENDS["segfault"] + "\n"))
    agent.close()
    assert spawned["stderr"].startswith("Fatal Python error: Segmentation fault")
    told = without_addresses(spawned["stderr"])
    assert without_addresses(forked["stderr"]).startswith(told), "the same, and frames below it"
    assert forked["exit"] == spawned["exit"] == -signal.SIGSEGV


@pytest.mark.parametrize("name", ["raises", "interrupt", "exit text", "syntax"])
def test_module_ends_the_same(agent: SmallAgent, tmp_path: Path, name: str) -> None:
    script(tmp_path, ENDS[name] + "\n", "part.py")
    same(agent, kind="module", target="part", cwd=str(tmp_path))


def test_missing_script_and_module(agent: SmallAgent, tmp_path: Path) -> None:
    assert same(agent, target=str(tmp_path / "none.py"))["exit"] == 2
    assert same(agent, kind="module", target="no_such_module")["exit"] == 1


def test_random_numbers(agent: SmallAgent, tmp_path: Path) -> None:
    """Every fresh process has its own, torch's included; a seed means the same in all of them."""
    text = """
import random, numpy, torch, json
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]
torch.manual_seed(1)
threads = torch.get_num_threads(), torch.get_num_interop_threads()
print(json.dumps([drawn, threads, torch.rand(1).item()]))
"""
    path = script(tmp_path, text)
    runs = [
        json.loads(run["stdout"]) for run in both(agent, target=path) + both(agent, target=path)
    ]
    assert all(len({run[0][i] for run in runs}) == 4 for i in range(4))
    assert all(run[1:] == runs[0][1:] for run in runs)


@pytest.mark.parametrize("threads", ["1", "2", None])
def test_thread_count(agent: SmallAgent, tmp_path: Path, threads: str | None) -> None:
    text = """
import torch
torch.randn(400, 400) @ torch.randn(400, 400)
print(torch.get_num_threads())
"""
    environ = {"OMP_NUM_THREADS": threads}
    found = same(agent, target=script(tmp_path, text), environ=environ)
    assert found["exit"] == 0


def test_threads_of_the_spec(agent: SmallAgent, tmp_path: Path) -> None:
    path = script(tmp_path, "import torch; print(torch.get_num_threads())")
    assert agent.start("standby", target=path, threads=2)["stdout"] == "2\n"


LOADER = """
import sys, torch, os
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return i * 10

if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    print([batch.tolist() for batch in loader])
    layer = torch.nn.Linear(3, 1)
    layer(torch.ones(2, 3)).sum().backward()
    print(layer.bias.grad)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader(agent: SmallAgent, tmp_path: Path, method: str) -> None:
    found = agent.start("standby", target=script(tmp_path, LOADER), args=[method])
    assert found["stdout"].startswith("[[0, 10, 20, 30], [40, 50, 60, 70]]\n"), found["stderr"]
    assert found["exit"] == 0


def test_program_and_what_cannot_start(agent: SmallAgent, tmp_path: Path) -> None:
    run = agent.start("spawner", kind="program", target="sh", args=["-c", "echo $0 $MY", "x"])
    assert (run["exit"], run["stdout"]) == (0, "x\n")
    missing = agent.start("spawner", kind="program", target="no-such-program")
    assert missing["exit"] == 127
    assert missing["stderr"] == "elastic: cannot start no-such-program: No such file or directory\n"
    denied = agent.start("spawner", kind="program", target=script(tmp_path, "", "plain"))
    assert denied["exit"] == 126
    assert denied["stderr"].count("\n") == 1
    for found in both(agent, target="x.py", cwd=str(tmp_path / "none")):
        assert found["exit"] == 126
        assert found["stderr"].startswith("elastic: cannot start: [Errno 2]")


def test_standby_says_why_it_will_not(agent: SmallAgent, tmp_path: Path) -> None:
    path = script(tmp_path, "")
    for spec, word in (
        ({"environ": {"PYTHONHASHSEED": "1"}}, "PYTHONHASHSEED"),
        ({"python": "/usr/bin/env"}, "/usr/bin/env"),
        ({"kind": "program"}, "scripts only"),
    ):
        found = agent.start("standby", target=path, **spec)
        assert found["error"] == "Unfit"
        assert word in found["text"]


def test_title_is_the_command_line(agent: SmallAgent, tmp_path: Path) -> None:
    text = "print(open('/proc/self/cmdline').read().replace('\\0', ' ').strip())"
    same(agent, target=script(tmp_path, text), args=["--flag", "v"])


def test_preload(agent: SmallAgent, tmp_path: Path) -> None:
    script(tmp_path, "VALUE = 1\n", "good_one.py")
    script(tmp_path, "import os\nRANK = os.environ.get('RANK')\n", "reads_rank.py")
    script(tmp_path, "import os\nCOPY = dict(os.environ)\n", "copies_environment.py")
    script(
        tmp_path,
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "leaves_thread.py",
    )
    script(tmp_path, "import os\nos.abort()\n", "crashes.py")
    script(tmp_path, "raise ImportError('no')\n", "fails.py")
    script(tmp_path, "FILE = open('/dev/full')\n", "opens_device.py")
    script(
        tmp_path, "import subprocess\nP = subprocess.Popen(['sleep', '99'])\n", "leaves_process.py"
    )
    agent.ask(verb="die", starter="standby")
    environ = {"PYTHONPATH": f"{STARTUP}:{tmp_path}"}
    agent.launch("standby", **environ)
    names = [path.stem for path in sorted(tmp_path.glob("*.py"))]
    found = agent.ask(verb="preload", starter="standby", modules=[*names, "no_such", "json"])
    assert found["loaded"] == ["copies_environment", "good_one", "json"]
    reasons = found["refused"]
    assert "1 threads" in reasons["leaves_thread"]
    assert "RANK" in reasons["reads_rank"]
    assert "signal 6" in reasons["crashes"]
    assert reasons["fails"] == "its import fails: ImportError: no"
    assert "/dev/full" in reasons["opens_device"]
    assert "process" in reasons["leaves_process"]
    assert "ModuleNotFoundError" in reasons["no_such"]
    path = script(
        tmp_path, "import sys; print('good_one' in sys.modules, 'reads_rank' in sys.modules)"
    )
    assert agent.start("standby", target=path, environ=environ)["stdout"] == "True False\n"
    agent.ask(verb="die", starter="standby")
    agent.launch("standby")


@pytest.mark.parametrize("starter", [*STARTERS, "nursery"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_store(agent: SmallAgent, tmp_path: Path, starter: str, host: str) -> None:
    text = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)
store.set("key", "value")
print(store.get("key"), store.num_keys())
"""
    path = script(tmp_path, text)
    found = agent.ask(verb="store", starter=starter, host=host, client=path)
    assert found["said"] == "ready\n"
    assert found["used"]["stdout"] == "b'value' 1\n", found["used"]["stderr"]
    assert found["exit"] == -signal.SIGTERM


def test_starter_killed_with_starts_under_way(agent: SmallAgent, starter: str) -> None:
    spec = rank_spec(target="/dev/null", cwd="/")
    found = agent.ask(verb="start_dying", starter=starter, spec=spec)
    # Each start was answered, and no process is there that nobody was told about.
    assert found["failures"] in ([], ["StarterDied"])
    assert set(found["children"]) <= set(found["pids"])
    assert found["pids"]
    agent.launch(starter)


def test_rank_outlives_its_starter_and_dies_with_the_agent(tmp_path: Path) -> None:
    agent = SmallAgent()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = f"import os, signal\nopen({str(fifo)!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n"
    launched = agent.launch("spawner")
    spec = rank_spec(target=script(tmp_path, text))
    assert agent._process.stdin is not None
    agent._process.stdin.write(
        json.dumps({"verb": "start", "starter": "spawner", "spec": spec}) + "\n"
    )
    agent._process.stdin.flush()
    pidfd = os.pidfd_open(int(fifo.read_text()))
    os.kill(launched["pid"], signal.SIGKILL)
    assert not select.select([pidfd], [], [], 0.3)[0]
    agent.close()
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)

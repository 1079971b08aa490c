"""What the agent learns about an unmodified script, and that the script learns nothing of it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import gloo, hook
from elastic.proto import page
from tests.agent.small_agent import ROOT, STARTUP, SmallAgent

pytestmark = pytest.mark.xdist_group("hook")


@pytest.fixture(scope="module")
def agent() -> Iterator[SmallAgent]:
    agent = SmallAgent()
    agent.launch("spawner")
    yield agent
    agent.close()


def kinds(found: dict[str, Any]) -> list[str]:
    return [message["kind"] for message in found["link"]]


TRAIN = """
import os
os.environ["SET_BY_SCRIPT"] = "yes"
import torch
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def trained(agent: SmallAgent, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write(tmp_path_factory.mktemp("hook"), TRAIN)
    return agent.start("spawner", target=path, args=["--x"])


def test_what_is_ours_is_among_the_modules_and_what_spares_rehearse(
    agent: SmallAgent, tmp_path: Path
) -> None:
    begin = "import elastic.trainer.schedules\nfrom elastic import session\n"
    begin += "session.set_rehearsal('package:function', 'what')\n"
    _, _, modules, _ = agent.start("spawner", target=write(tmp_path, begin + TRAIN))["link"]
    assert modules["rehearsal"] == ["package:function", "what"]
    ours = [name for name in modules["modules"] if name.split(".")[0] == "elastic"]
    assert "elastic.trainer.schedules" in ours
    assert not [name for name in ours if name.split(".")[1] in ("agent", "proto")]


@pytest.mark.soak
def test_a_script_that_compiles_brings_torchs_compiler(agent: SmallAgent, tmp_path: Path) -> None:
    """Which the standby can import."""
    compiler = "torch._inductor.compile_fx"
    path = write(tmp_path, f"import {compiler}\n" + TRAIN)
    _, _, modules, _ = agent.start("spawner", target=path)["link"]
    assert compiler in modules["modules"]
    agent.launch("standby")
    found = agent.ask(verb="preload", starter="standby", modules=[compiler])
    assert found["loaded"] == [compiler], found["refused"]
    agent.ask(verb="die", starter="standby")


def test_unmodified_script(trained: dict[str, Any]) -> None:
    assert trained["exit"] == 0, trained["stderr"]
    assert kinds(trained) == ["TorchNote", "StacksOffered", "ModulesNote", "FirstStep"]
    torch, _, modules, _ = trained["link"]
    assert torch["environ"]["SET_BY_SCRIPT"] == "yes"
    assert torch["argv"][1:] == ["--x"]
    assert STARTUP not in torch["path"]
    assert torch["environ"]["PYTHONPATH"].startswith(STARTUP)
    assert "numpy" in modules["modules"]
    assert not [name for name in modules["modules"] if name.split(".")[0] in ("torch", "elastic")]
    progress = trained["progress"]
    assert (progress["ticks"], progress["claims"], progress["step"]) == (3, 1, None)
    assert progress["owner"] == trained["pid"]
    assert progress["tick_ns"] > 0


def test_forked_rank_ticks_too(agent: SmallAgent, tmp_path: Path) -> None:
    agent.launch("standby")
    found = agent.start("standby", target=write(tmp_path, TRAIN))
    assert found["exit"] == 0, found["stderr"]
    assert kinds(found) == ["StacksOffered", "ModulesNote", "FirstStep"]
    assert found["progress"]["ticks"] == 3
    assert found["progress"]["owner"] == found["pid"]
    failed = agent.start("standby", target=write(tmp_path, "import torch\n1 / 0\n"))
    assert kinds(failed) == ["StacksOffered", "ErrorNote"]
    assert failed["link"][1]["frame"].endswith("train.py:2 in <module>")
    agent.ask(verb="die", starter="standby")


ANOTHER_LEADS = """
import torch
from elastic.agent import hook
layer = torch.nn.Linear(2, 1)
first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for _ in range(2))
layer(torch.ones(1, 2)).sum().backward()
beats = lambda: hook._attachment.page.words[hook.BEATS]
for _ in range(3):
    first.step()
    for _ in range(5):
        second.step()
assert beats() == 3, beats()
for _ in range(hook.MOST_OTHERS + 10):
    second.step()
assert 10 < beats() < 20, beats()
"""


def test_of_two_optimizers_the_first_leads_until_it_steps_no_more(
    agent: SmallAgent, tmp_path: Path
) -> None:
    found = agent.start("spawner", target=write(tmp_path, ANOTHER_LEADS))
    assert found["exit"] == 0, found["stderr"]


CHILDREN = """
import os, subprocess, sys, multiprocessing
import torch

def child():
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()

if __name__ == "__main__":
    torch.set_num_threads(1)
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
    subprocess.run([sys.executable, __file__, "inner"], check=True, close_fds=False) if len(
        sys.argv
    ) == 1 else child()
"""


def test_children_of_a_rank_do_not_count(agent: SmallAgent, tmp_path: Path) -> None:
    found = agent.start("spawner", target=write(tmp_path, CHILDREN))
    assert found["exit"] == 0, found["stderr"]
    assert kinds(found) == ["TorchNote", "StacksOffered"]
    assert (found["progress"]["ticks"], found["progress"]["claims"]) == (0, 1)
    assert found["progress"]["owner"] == found["pid"]


def test_python_below_a_shell_script(agent: SmallAgent, tmp_path: Path) -> None:
    prepare = write(tmp_path, "import json\n", "prepare.py")
    text = f"exec 3>/dev/null 4</dev/null\n{sys.executable} {prepare}\n{sys.executable} {write(tmp_path, TRAIN)}\n"
    shell = write(tmp_path, text, "run.sh")
    found = agent.start("spawner", kind="program", target="bash", args=[shell])
    assert found["exit"] == 0, found["stderr"]
    assert kinds(found) == ["TorchNote", "StacksOffered", "ModulesNote", "FirstStep"]
    assert found["progress"]["ticks"] == 3
    assert found["progress"]["owner"] != found["pid"]


ERRORS = {
    "own": ("def f():\n    raise ValueError('x' * 9)\nf()\n", "ValueError", ":2 in f"),
    "library": ("import json\njson.loads('[')\n", "json.decoder.JSONDecodeError", ":2 in <module>"),
    "syntax": ("x = 1\ny = (\n", "SyntaxError", ":2 in <module>"),
    "import": ("import no_such_module\n", "ModuleNotFoundError", ":1 in <module>"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_told(agent: SmallAgent, tmp_path: Path, name: str) -> None:
    text, kind, frame = ERRORS[name]
    found = agent.start("spawner", target=write(tmp_path, text))
    assert found["exit"] == 1
    assert kinds(found) == ["ErrorNote"]
    error = found["link"][0]
    assert error["type"] == kind
    assert error["frame"].endswith("train.py" + frame)
    assert error["traceback"].strip().endswith(found["stderr"].strip().splitlines()[-1])


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(3)",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        "raise KeyboardInterrupt",
        "import sys\nsys.excepthook = lambda *a: None\n1 / 0",
        "import os, sys\nif os.fork(): os.wait()\nelse: 1 / 0",
    ],
)
def test_what_is_no_error_is_not_told(agent: SmallAgent, tmp_path: Path, text: str) -> None:
    assert kinds(agent.start("spawner", target=write(tmp_path, text))) == []


def test_only_while_torch_is_imported_nothing_is_collected(
    agent: SmallAgent, tmp_path: Path
) -> None:
    """And only where it was; whatever comes of the import. What it made is not looked at afterwards, either."""
    write(tmp_path, "import gc\ngc.seen = gc.isenabled()\nraise ImportError", "torch.py")
    text = """
import gc
for collects in (gc.enable, gc.disable):
    collects()
    try:
        import torch
    except ImportError:
        print(gc.seen, gc.isenabled(), gc.get_freeze_count() > 0)
"""
    ended = agent.start("spawner", target=write(tmp_path, text))
    assert ended["stdout"].split() == ["False", "True", "True", "False", "False", "True"], ended


def test_looking_for_torch_is_no_import(agent: SmallAgent, tmp_path: Path) -> None:
    text = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is not None
assert "torch" not in sys.modules
import os
os.environ["LATER"] = "1"
import torch
print(type(torch.__loader__).__name__, "exec_module" in vars(torch.__loader__))
"""
    found = agent.start("spawner", target=write(tmp_path, text))
    assert found["stdout"] == "SourceFileLoader False\n", found["stderr"]
    assert found["link"][0]["environ"]["LATER"] == "1"


COMPILED = """
import torch
from torch._dynamo.utils import counters
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(1, 2)).sum().backward()
step = torch.compile(optimizer.step, backend="eager")
for _ in range(5):
    step()
print(sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"])
"""


@pytest.mark.soak
def test_compiled_optimizer_step_stays_as_it_is(agent: SmallAgent, tmp_path: Path) -> None:
    path = write(tmp_path, COMPILED)
    found = agent.start("spawner", target=path)
    alone = agent.start("spawner", target=path, environ={"PYTHONPATH": None})
    assert (found["exit"], found["stdout"]) == (0, alone["stdout"]), found["stderr"]
    assert found["progress"]["ticks"] == 5


# --- start-up without an agent ---


def python(code: str, path: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": path} | environ
    return subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )


LOOK = (
    "import sys, json; m = sys.modules.get('sitecustomize'); "
    "print(json.dumps([getattr(m, 'NAME', None), sys.path, "
    "sorted(n for n in sys.modules if n.split('.')[0] == 'elastic')]))"
)


def test_other_processes_load_nothing() -> None:
    ours = python(LOOK, STARTUP)
    name, path, modules = json.loads(ours.stdout)
    assert (name, modules, ours.stderr) == (None, [], "")
    assert path == json.loads(python(LOOK, "").stdout)[1]


def test_chains_the_machines_own(tmp_path: Path) -> None:
    write(tmp_path, "NAME = 'mine'\n", "sitecustomize.py")
    name, path, _ = json.loads(python(LOOK, f"{STARTUP}:{tmp_path}").stdout)
    assert name == "mine"
    assert STARTUP not in path


@pytest.mark.parametrize(
    "text",
    ["1 / 0\n", "import no_such\n", "raise SystemExit(3)\n", "def f(:\n", "raise KeyError\n"],
)
def test_a_broken_one_breaks_as_ever(tmp_path: Path, text: str) -> None:
    write(tmp_path, text, "sitecustomize.py")
    alone = python(LOOK, str(tmp_path))
    behind = python(LOOK, f"{STARTUP}:{tmp_path}")
    assert behind.returncode == alone.returncode
    assert behind.stderr == alone.stderr or text == "raise SystemExit(3)\n"
    if alone.stdout:
        assert json.loads(behind.stdout)[0] is None


@pytest.mark.parametrize("number", ["", "x", "0", "9" * 30])
def test_wrong_descriptors_harm_nobody(number: str) -> None:
    code = "import torch; print('fine')"
    found = python(code, STARTUP, ELASTIC_PAGE_FD=number, ELASTIC_LINK_FD=number)
    assert (found.returncode, found.stdout, found.stderr) == (0, "fine\n", "")


def test_start_up_costs_less_than_a_millisecond() -> None:
    """Outside a rank; the code alone, and the best of some, since the machine is busy."""
    code = f"""
import os, sys, time
os.environ["ELASTIC_PAGE_FD"] = "0"
source = open({STARTUP + "/sitecustomize.py"!r}).read()
compiled = compile(source, {STARTUP + "/sitecustomize.py"!r}, "exec")
best = 1.0
for _ in range(20):
    start = time.perf_counter()
    exec(compiled, {{"__file__": {STARTUP + "/sitecustomize.py"!r}, "__name__": "sitecustomize"}})
    best = min(best, time.perf_counter() - start)
print(best)
"""
    assert float(python(code, "").stdout) < 1e-3


def test_copied_offsets_are_the_pages() -> None:
    source = (ROOT / "agent" / "startup" / "sitecustomize.py").read_text()
    assert f"head[{page.OWNER_OFFSET}:{page.OWNER_OFFSET + 8}]" in source
    assert repr(page.MAGIC)[1:].strip("'") in source
    assert (hook.TICKS, hook.TICK_NS) == (page.TICKS, page.TICK_NS)
    assert (hook.BEATS, hook.WAITED_NS) == (page.BEATS, page.WAITED_NS)
    assert (hook.RING, hook.KEPT) == (page.RING, page.KEPT)


WAITS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def step():
    dist.recv(torch.ones(1), src=0)
step()
"""


def test_what_is_put_around_torchs_functions_is_not_where_a_script_failed(
    agent: SmallAgent, tmp_path: Path
) -> None:
    found = agent.start("spawner", target=write(tmp_path, WAITS))
    failed = found["link"][-1]
    assert failed["kind"] == "ErrorNote", found
    assert failed["frame"].endswith("train.py:5 in step"), failed


CLOSES_ALL = """
import os, socket, torch
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
os.closerange(3, 1000)
pairs = [socket.socketpair() for _ in range(150)]  # some of them under the numbers that were ours
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
for end in (end for pair in pairs for end in pair):
    end.setblocking(False)
    try:
        raise SystemExit(f"{end.fileno()} received {end.recv(100)}")
    except BlockingIOError:
        pass
for pair in pairs:
    for end in pair:
        os.close(end.detach())  # still ours
"""


def test_what_a_script_made_of_our_descriptors_is_left_alone(
    agent: SmallAgent, tmp_path: Path
) -> None:
    found = agent.start("spawner", target=write(tmp_path, CLOSES_ALL))
    assert found["exit"] == 0, found["stderr"]


LAST = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.zeros(1))
for task in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{task}/comm") as file:
        print(file.read().strip())
"""


def test_gloos_threads_are_known_by_their_name(tmp_path: Path) -> None:
    """Of what the script's end waits for; torch may call them otherwise some day."""
    script = write(tmp_path, LAST)
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "store")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert gloo.NAME in done.stdout.splitlines(), done


def test_a_thread_of_gloos_that_runs_is_let_finish() -> None:
    done, named, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(gloo.NAME)
        named.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)  # some 0.1 s without the GIL
        done.set()
        over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    assert named.wait(60)
    gloo.let_finish(os.getpid(), wait=60)
    assert done.is_set()
    over.set()
    thread.join()

"""What ranks do while they are looked at. Rank 0 is the one that is; rank 1 never comes."""

import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script, and how to know that it is where it should be."""

    code: str
    within: tuple[str, ...] = ()
    """Functions in one of which its main thread is then."""
    stays: bool = True
    """It stays there, in one state of the kernel's."""
    ranks: int = 1
    then: Callable[[int], None] | None = None
    """Something that happens to it then."""


def _group(body: str, *within: str) -> Program:
    """`body` is what rank 0 does, and rank 1 does not."""
    return Program(code=_GROUP + body, within=within, ranks=2)


_GROUP = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"],
                        rank=int(os.environ["RANK"]), world_size=2)
tensor = torch.ones(4)
def rank_one():
    if dist.get_rank() == 1:
        print("ready", flush=True)
        sys.stdin.read()
print("ready", flush=True) if dist.get_rank() == 0 else None
"""


def _functional(call: str, *within: str) -> Program:
    body = (
        "rank_one()\nimport torch.distributed._functional_collectives as funcol\n"
        f"def train():\n    found = funcol.{call}\n    return found + 1\ntrain()\n"
    )
    return _group(body, *within)


_LOADER = """
import os, signal, sys, time, torch
from torch.utils.data import DataLoader, Dataset
class Files(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index > 4:
            time.sleep(1000)
        return torch.zeros(1)
def train():
    print("ready", flush=True)
    for batch in DataLoader(Files(), batch_size=2, num_workers=%d):
        pass
train()
"""

_LINEAR = """
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
def train(model):
    model(torch.ones(2, 8)).sum().backward()
"""


def _workers(number: int) -> Callable[[int], None]:
    """Send a signal to each child of a process."""

    def send(pid: int) -> None:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in map(int, children.read_text().split()):
            os.kill(child, number)
            while _state(child) not in ("T", "Z", ""):
                select.select([], [], [], 0.01)

    return send


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while _state(pid) != "T":
        select.select([], [], [], 0.01)


def _alone(
    code: str, *within: str, then: Callable[[int], None] | None = None, stays: bool = True
) -> Program:
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    head = "import os, sys, time, threading, torch\nprint('ready', flush=True)\n"
    return Program(
        code=f"{head}def train():\n{lines}train()\n", within=within, then=then, stays=stays
    )


_OUT = "out = torch.empty(8)\n"

PROGRAMS = {
    "all_reduce": _group("rank_one()\ndist.all_reduce(tensor)\n", "all_reduce"),
    "all_reduce_async": _group("rank_one()\ndist.all_reduce(tensor, async_op=True).wait()\n", "<module>"),
    "broadcast": _group("rank_one()\ndist.broadcast(tensor, 1)\n", "broadcast"),
    "barrier": _group("rank_one()\ndist.barrier()\n", "barrier"),
    "monitored_barrier": _group("rank_one()\ndist.monitored_barrier()\n", "monitored_barrier"),
    "all_gather_into_tensor": _group(
        f"rank_one()\n{_OUT}dist.all_gather_into_tensor(out, tensor)\n", "all_gather_into_tensor"
    ),
    "reduce_scatter_tensor": _group(
        f"rank_one()\n{_OUT}dist.reduce_scatter_tensor(tensor, out)\n", "reduce_scatter_tensor"
    ),
    "all_to_all_single": _group(
        "rank_one()\ndist.all_to_all_single(torch.empty(4), tensor)\n", "all_to_all_single"
    ),
    "all_gather_object": _group("rank_one()\ndist.all_gather_object([None] * 2, {'a': 1})\n", "all_gather_object"),
    "new_group": _group("rank_one()\ndist.new_group([0, 1])\n", "new_group"),
    "functional_all_reduce": _functional("all_reduce(tensor, 'sum', dist.group.WORLD)", "wait_tensor"),
    "functional_wait": _functional(
        "wait_tensor(funcol.all_gather_tensor(tensor, 0, dist.group.WORLD))", "wait_tensor"
    ),
    "send": _group("rank_one()\ndist.send(torch.ones(1 << 20), 1)\n", "send"),
    "recv": _group("rank_one()\ndist.recv(tensor, 1)\n", "recv"),
    "batch_isend_irecv": _group(
        "rank_one()\nworks = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 1)])\n"
        "[work.wait() for work in works]\n",
        "<listcomp>", "<module>",
    ),
    "store_get": _alone(
        "import torch.distributed as dist\nstore = dist.TCPStore('127.0.0.1', 0, is_master=True)\nstore.get('x')",
        "train",
    ),
    "ddp_backward": _group(
        _LINEAR + "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(model)\nrank_one()\ntrain(model)\n",
        "_engine_run_backward",
    ),
    "ddp_made": _group(
        _LINEAR + "from torch.nn.parallel import DistributedDataParallel\nrank_one()\nDistributedDataParallel(model)\n",
        "_verify_param_shape_across_processes",
    ),
    "fsdp_backward": _group(
        _LINEAR + "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "model = fully_shard(model, mesh=init_device_mesh('cpu', (2,)))\n"
        "loss = model(torch.ones(2, 8)).sum()\nrank_one()\ndef train():\n    loss.backward()\ntrain()\n",
        "_engine_run_backward",
    ),
    "fsdp_forward": _group(
        _LINEAR + "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "model = fully_shard(model, mesh=init_device_mesh('cpu', (2,)))\nrank_one()\ntrain(model)\n",
        "unshard", "wait_for_unshard", "_pre_forward",
    ),
    "init_process_group": _alone(
        "import torch.distributed as dist\nstore = dist.TCPStore('127.0.0.1', 0, is_master=True)\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=2)",
        "init_process_group",
    ),
    "loader_slow_worker": Program(code=_LOADER % 2, within=("_try_get_data",)),
    "loader_dead_worker": Program(
        # With torch's handler of SIGCHLD it ends at once; without, at its next look at them, in 5 s.
        code=(_LOADER % 2).replace("pass", "signal.signal(signal.SIGCHLD, signal.SIG_DFL)"),
        within=("_try_get_data",),
        then=_workers(signal.SIGKILL),
    ),
    "loader_stopped_worker": Program(
        code=_LOADER % 2, within=("_try_get_data",), then=_workers(signal.SIGSTOP)
    ),
    "loader_in_process": Program(code=_LOADER % 0, within=("__getitem__",)),
    "sleep": _alone("time.sleep(1000)", "train"),
    "python_loop": _alone("x = 0\nwhile True:\n    x += 1", "train"),
    "lock": _alone("lock = threading.Lock()\nlock.acquire()\nlock.acquire()", "train"),
    "event": _alone("threading.Event().wait()", "wait"),
    "queue": _alone("import queue\nqueue.Queue().get()", "get"),
    "join": _alone("threading.Thread(target=sys.stdin.read, daemon=True).start()\nthreading.enumerate()[-1].join()", "join"),
    "holds_gil": _alone("import ctypes\nctypes.PyDLL(None).sleep(1000)", "train"),
    "native_loop": _alone("a = torch.randn(2048, 2048)\nwhile True:\n    a = (a @ a).tanh()", "train"),
    "matrix_backward": _alone(
        "a = torch.randn(512, 512, requires_grad=True)\nwhile True:\n    b = a\n"
        "    for _ in range(4):\n        b = (b @ a).tanh()\n    b.sum().backward()",
        "_engine_run_backward", stays=False,
    ),
    "optimizer": _alone(
        "p = [torch.nn.Parameter(torch.ones(1 << 23)) for _ in range(4)]\nfor q in p:\n    q.grad = torch.ones_like(q)\n"
        "o = torch.optim.AdamW(p)\nwhile True:\n    o.step()",
        "adamw", "step", stays=False,
    ),
    "save_to_fifo": _alone(
        "path = os.environ['FOLDER'] + '/fifo'\nos.mkfifo(path)\ntorch.save({'a': torch.ones(1 << 20)}, path)",
        "save",
    ),
    "read_fifo": _alone("path = os.environ['FOLDER'] + '/fifo'\nos.mkfifo(path)\nopen(path).read()", "train"),
    "read_socket": _alone(
        "import socket, urllib.request\ns = socket.create_server(('127.0.0.1', 0))\n"
        "urllib.request.urlopen('http://127.0.0.1:%d/' % s.getsockname()[1])",
        "readinto",
    ),
    "subprocess": _alone("import subprocess\nsubprocess.run(['sleep', '1000'])", "_try_wait", "wait"),
    "compile": _alone(
        "def f(x):\n    for n in range(300):\n        x = (x * n).sin() + x.cos() @ x\n    return x\n"
        "torch.compile(f)(torch.ones(8, 8))",
        "compile_inner", "codegen_and_compile", stays=False,
    ),
    "stopped": _alone("time.sleep(1000)", "train", then=_stop),
    "d_state": _alone(
        "path = os.environ['FOLDER'] + '/fifo'\nos.mkfifo(path)\n"
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)])",
        "train",
    ),
}  # fmt: skip

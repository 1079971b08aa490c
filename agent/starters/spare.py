"""A spare rank: forked ahead of its round, holds a device context, waits for its orders."""

import contextlib
import importlib
import io
import os
import select
import socket
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from setproctitle import setproctitle

from elastic.agent import hook
from elastic.agent.starters import fork
from elastic.agent.starters.spec import StartSpec
from elastic.proto import descriptors, env

READY, TAKEN = b"ready", b"taken"
FAILED = b"failed: "
"""From it, with the reason: the device could not be warmed up."""
UNREHEARSED = b"not rehearsed: "
"""From it, with the reason; it is ready all the same."""
SLOTS = b"slots"
"""To the spare: its rank's slots, all of them, as descriptors. From it: it has registered them."""
MOST_FDS = 64
"""That come with a message."""


def wait(request: fork.Request, modules: Iterable[str]) -> fork.Request:
    """Warm the device up, say so, and return with the orders, once they come.

    modules: what a rank imports and no process that is forked again may (`preload.py`).
    """
    variables = env.process_environment()
    variables.clear()
    variables.update(request.spec.environ)
    for name in (env.PAGE_FD, env.LINK_FD):
        variables.pop(name, None)  # of a rank that is another process
    device = request.spec.target
    setproctitle(f"elastic-spare {device}: warming up")
    orders = socket.socket(fileno=request.fds["orders"])
    try:
        _warm(device)
    except RuntimeError as error:  # the ranks may have taken its memory meanwhile
        orders.send(FAILED + str(error).partition("\n")[0].encode()[:500])
        os._exit(1)
    for module in modules:
        with contextlib.suppress(Exception):  # the script meets it, too, and says so
            importlib.import_module(module)
    if hook.COMPILER in sys.modules:
        with contextlib.suppress(Exception):  # the script has what it lacks, or meets it, too
            warm_compiler(device)
    if request.spec.args:
        try:
            os.chdir(request.spec.cwd)
            function, argument = request.spec.args
            rehearse(function, argument, device)
        except Exception as error:  # noqa: BLE001 - then it is done when it is needed
            orders.send(UNREHEARSED + f"{type(error).__name__}: {error}".encode()[:500])
    setproctitle(f"elastic-spare {device}")
    orders.send(READY)
    data, fds = _prepare(orders, device)
    if not data:
        os._exit(0)  # given up
    orders.send(TAKEN)
    orders.close()
    spec = StartSpec.from_json(fork.read_memory(fds[0]))
    os.close(fds[0])
    names = data.decode().split(",")
    return fork.Request(id=request.id, spec=spec, fds=dict(zip(names, fds[1:], strict=True)))


def _prepare(orders: socket.socket, device: str) -> tuple[bytes, list[int]]:
    """Register the slots that are shown until other orders come; returns these."""
    ahead: Any = None  # by name, since the agent's folder imports no torch
    news = select.poll()
    news.register(orders, select.POLLIN)
    while True:
        data, fds = descriptors.receive(orders, fork.DATAGRAM, MOST_FDS)
        if data != SLOTS:
            return data, fds
        if ahead is None:
            ahead = importlib.import_module("elastic.checkpoint.save.ahead").begin(device)
        ahead.show(fds)
        # Orders end the pause, too: where the driver was busy with a killed rank it would be seconds.
        while more := ahead.go_on(lambda seconds: news.poll(1e3 * seconds)):
            if news.poll(0):
                break
        if not more:
            orders.send(SLOTS)


def _warm(device: str) -> None:
    """Context, cuBLAS, the allocator and NCCL: what a rank pays for before its first step."""
    torch = sys.modules["torch"]
    if device == "cpu":
        return
    torch.cuda.set_device(device)
    square = torch.zeros(64, 64, device=device)
    torch.mm(square, square)
    half = square.to(torch.bfloat16)
    torch.mm(half, half)
    torch.cuda.synchronize()
    # What NCCL does once a process (its network, its topology, its kernels) is 0.3 s of a restart. By no process
    # group: torch's first one alone knows its ranks, and to split any later one is a crash (2.11).
    if torch.distributed.is_nccl_available():
        torch.cuda.nccl.all_reduce([half])
        torch.cuda.synchronize()
    del square, half
    torch.cuda.empty_cache()


def warm_compiler(device: str) -> None:
    """What torch's compiler does once a process: digests of its own files and of Triton's, late imports; a third of what
    it takes to trace a model whose kernels are all cached. Leaves no thread, so backward is compiled and not run."""
    torch = sys.modules["torch"]
    inductor, functorch = (
        importlib.import_module(f"torch.{name}.config") for name in ("_inductor", "_functorch")
    )
    matrix = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    with (
        inductor.patch(compile_threads=1),  # else it starts a pool of processes
        functorch.patch(force_non_lazy_backward_lowering=True),
    ):
        torch.compile(_small, fullgraph=True, dynamic=False)(matrix)


def _small(matrix: Any) -> Any:
    """Something of each kind: a product, pointwise, a reduction."""
    product = (matrix @ matrix).float()
    return (product * product.sigmoid() - product.mean(-1, keepdim=True)).square().sum()


def rehearse(function: str, argument: str, device: str) -> None:
    """What the script has named (`session.rehearse_by`). Ranks train on the device meanwhile."""
    torch = sys.modules["torch"]
    module, _, name = function.partition(":")
    devices = [] if device == "cpu" else [device]
    quiet = io.StringIO()
    for one in devices:
        free, total = torch.cuda.mem_get_info(one)
        torch.cuda.set_per_process_memory_fraction(free / total / 2, one)
    try:
        with (
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
            warnings.catch_warnings(action="ignore"),
            torch.random.fork_rng(devices),
        ):
            getattr(importlib.import_module(module), name)(argument, device)
    finally:
        for one in devices:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, one)

"""What a spare does before it says that it is ready: all that a rank pays for before its second step, as far as it can be
done by itself. The rank is to find nothing of it but that it is quick."""

import contextlib
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from elastic.agent import hook
from elastic.agent.starters.spec import StartSpec
from elastic.proto import env

WATCHED = (
    "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "TORCH_COMPILE_JOB_ID",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
)  # fmt: skip
"""With one of these nothing is compiled here: it would be told beside what the rank compiles, in the file that the rank
then has, or be a part of the profile of its job (PGO); or be compiled anew each time."""


LEFT = 2 << 30
"""Bytes of a device that a rehearsal leaves free: ranks train there meanwhile."""


def device(name: str) -> None:
    """Context, cuBLAS, the allocator and NCCL. Raises RuntimeError, where memory is short say."""
    torch = sys.modules["torch"]
    if name == "cpu":
        return
    torch.cuda.set_device(name)
    square = torch.zeros(64, 64, device=name)
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


def compiler(device: str) -> None:
    """torch's, where the script uses it."""
    if hook.COMPILER in sys.modules and not _watched():
        with contextlib.suppress(Exception):  # the script has what it lacks, or meets it, too
            _compile(device)


def rehearsal(spec: StartSpec) -> str:
    """What the script has its spares rehearse, if it has. Returns why that was not done."""
    if not spec.args:
        return ""
    if watched := _watched():
        return f"{watched} is set"
    try:
        os.chdir(spec.cwd)
        function, argument = spec.args
        rehearse(function, argument, spec.target)
        why = ""
    except BaseException as error:  # noqa: BLE001 - then it is done when it is needed
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    gc.collect()  # its frames had the model, and the collector is off here
    _forget(spec.target)
    return why


def rehearse(function: str, argument: str, device: str) -> None:
    """Call what the script has named (`session.set_rehearsal`). Raises what it raises."""
    torch = sys.modules["torch"]
    module, _, name = function.partition(":")
    devices = [] if device == "cpu" else [device]
    before = sys.excepthook, sys.stdout, sys.stderr
    try:
        with (
            _limited(device),
            _quiet(),
            warnings.catch_warnings(action="ignore"),
            torch.random.fork_rng(devices),
        ):
            getattr(importlib.import_module(module), name)(argument, device)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
                raise RuntimeError("it left a process group")
    finally:
        sys.excepthook, sys.stdout, sys.stderr = (
            before  # a process group makes the first say the rank's number
        )


def _watched() -> str:
    """The first of `WATCHED` that is set."""
    return next(filter(env.process_environment().get, WATCHED), "")


def _compile(device: str) -> None:
    """What the compiler does once a process: digests of its own files and of Triton's, late imports; a third of what it
    takes to trace a model whose kernels are all cached. Leaves no thread where its own are, so backward is not run."""
    torch = sys.modules["torch"]
    inductor, functorch = (
        importlib.import_module(f"torch.{name}.config") for name in ("_inductor", "_functorch")
    )
    plain = {
        "compile_threads": 1,  # else it starts a pool of processes
        "max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False,
        "coordinate_descent_tuning": False, "triton.cudagraphs": False,
    }  # fmt: skip
    matrix = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        with inductor.patch(plain), functorch.patch(force_non_lazy_backward_lowering=True):
            torch.compile(_small, fullgraph=True, dynamic=False)(matrix)
    finally:
        torch._dynamo.reset()  # the script's first graph is number 0
        torch._dynamo.utils.counters.clear()
        del matrix
        _forget(device)


def _small(matrix: Any) -> Any:
    """Something of each kind: a product, pointwise, a reduction."""
    product = (matrix @ matrix).float()
    return (product * product.sigmoid() - product.mean(-1, keepdim=True)).square().sum()


@contextlib.contextmanager
def _limited(device: str) -> Iterator[None]:
    """In a part of the memory that the device has free."""
    cuda = sys.modules["torch"].cuda
    if device == "cpu":
        yield
        return
    free, total = cuda.mem_get_info(device)
    before = cuda.get_per_process_memory_fraction(device)
    cuda.set_per_process_memory_fraction(max(0, min(free / 2, free - LEFT)) / total, device)
    try:
        yield
    finally:
        cuda.set_per_process_memory_fraction(before, device)


def _forget(device: str) -> None:
    """Memory that is free, and how much it was; and a variable that Inductor sets once a process, for the rank has
    another environment."""
    tasks: Any = sys.modules.get("torch._inductor.runtime.compile_tasks")
    if tasks is not None:
        tasks._set_triton_ptxas_path.cache_clear()
    if device != "cpu":
        cuda = sys.modules["torch"].cuda
        cuda.synchronize(device)  # what went wrong there ends this process, rather than the rank
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(device)
        cuda.reset_accumulated_memory_stats(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed. By descriptor, since what is imported meanwhile may keep `sys.stderr` to log to."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be closed, or none
                stream.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)

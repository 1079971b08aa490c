"""What a rank is doing, from its stack and what the kernel says of it.

Tables of files of PyTorch's and Python's and functions in them, tried on recorded stacks of PyTorch 2.13
(tests/master/activity). A call is (function, file, line), as in tree.py. What Python does not show, as
`work.wait()` and `lock.acquire()` in a script's own line, native frames tell, where there are some.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastic.master.tree import Call, bare


class Activity(Enum):
    """One word for it."""

    COLLECTIVE = "collective"
    P2P = "p2p"
    DATA = "data"
    COMPILE = "compile"
    DEBUGGER = "debugger"
    """A person is at its prompt."""
    CHECKPOINT = "checkpoint"
    OPTIMIZER = "optimizer"
    BACKWARD = "backward"
    LOCK = "lock"
    """Waits for another thread or process of its own: a lock, a queue, a subprocess."""
    SLEEP = "sleep"
    FILE = "file"
    """In D state, or in a call that the kernel keeps for a file, a pipe or a socket."""
    WAIT = "wait"
    """Waits in C code, which does not say for what: for another rank, or a thread."""
    DEVICE = "device"
    """Waits for a GPU."""
    NATIVE = "native"
    """In a library's code, which runs, or keeps the GIL while it waits."""
    PYTHON = "python"
    """Python code runs; where it is not known who holds the GIL also a library's."""
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """There is no stack."""


class OnDevice(Enum):
    """What a rank's GPU does with what its script has given it."""

    UNKNOWN = ""
    IDLE = "idle"
    BUSY = "busy"
    HELD = "held"
    """It has not done what it had at an earlier look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One that a rank began, or one of those did."""

    pid: int
    state: str
    """The kernel's letter."""
    command: str
    switches: int = 0
    """How often it has left the processor."""
    failed: bool = False
    """It has ended, and not with 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a rank does."""

    activity: Activity
    name: str = ""
    """Of the collective; else of the function that tells."""
    asleep: bool = False
    """It waits in the kernel."""
    call: Call | None = None
    """The script's innermost call, in no library's file."""
    workers: tuple[Process, ...] = ()
    """Of its loader."""
    helped: bool = False
    """A process that it began, or one of those did, works: a compiler, a loader's worker."""

    @property
    def waits_for_others(self) -> bool:
        """Whether other ranks hold it up."""
        return self.activity in (Activity.COLLECTIVE, Activity.P2P)


_Row = tuple[str, frozenset[str] | None, Activity]
"""End of a file's name or part of its path, functions in it (None: any), what it does who is there."""


def _row(file: str, activity: Activity, *functions: str) -> _Row:
    return file, frozenset(functions) if functions else None, activity


_P2P = (
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list",
    "batch_p2p_ops_inplace", "isend_inplace", "irecv_inplace",
)  # fmt: skip

_LOADS = ("__next__", "_next_data", "_try_get_data", "_reset")

_DDP = (
    "_sync_module_states", "_sync_params_and_buffers", "_verify_param_shape_across_processes",
    "_sync_buffers", "_sync_module_buffers", "_default_broadcast_coalesced",
    "_distributed_broadcast_coalesced",
)  # fmt: skip

_COMPILE: tuple[_Row, ...] = (
    _row("torch/_dynamo/convert_frame.py", Activity.COMPILE),
    _row("torch/_dynamo/output_graph.py", Activity.COMPILE, "call_user_compiler", "compile_and_call_fx_graph"),
    _row("torch/_inductor/compile_fx.py", Activity.COMPILE, "compile_fx", "compile_fx_inner", "codegen_and_compile"),
    _row("torch/_inductor/async_compile.py", Activity.COMPILE),
    _row("torch/_inductor/runtime/triton_heuristics.py", Activity.COMPILE, "precompile", "benchmark_all_configs"),
    _row("triton/compiler/compiler.py", Activity.COMPILE, "compile"),
    _row("triton/runtime/autotuner.py", Activity.COMPILE, "_bench"),
)  # fmt: skip
"""Told by any call: a compile traces collectives, runs optimizers, and waits for its own processes."""

_PROMPTS: tuple[_Row, ...] = (
    _row("pdb.py", Activity.DEBUGGER, "interaction", "_interaction", "_cmdloop"),
    _row("code.py", Activity.DEBUGGER, "interact"),
    _row("IPython/terminal/interactiveshell.py", Activity.DEBUGGER, "interact", "mainloop"),
    _row("pydevd.py", Activity.DEBUGGER, "do_wait_suspend", "_do_wait_suspend"),
)  # fmt: skip
"""Told by any call: what is at a prompt calls what it likes."""

_TABLE: tuple[_Row, ...] = (
    _row("torch/distributed/distributed_c10d.py", Activity.P2P, *_P2P),
    _row("torch/distributed/distributed_c10d.py", Activity.COLLECTIVE),
    _row("torch/distributed/_functional_collectives.py", Activity.COLLECTIVE),
    _row("torch/distributed/nn/functional.py", Activity.COLLECTIVE),
    _row("torch/distributed/rendezvous.py", Activity.COLLECTIVE),
    _row("torch/distributed/utils.py", Activity.COLLECTIVE, *_DDP),
    _row("torch/nn/parallel/distributed.py", Activity.COLLECTIVE, *_DDP),
    _row("torch/utils/data/dataloader.py", Activity.DATA, *_LOADS),
    _row("torchdata/stateful_dataloader/stateful_dataloader.py", Activity.DATA, *_LOADS),
    _row("elastic/data/", Activity.DATA),
    _row("elastic/checkpoint/", Activity.CHECKPOINT),
    _row("torch/serialization.py", Activity.CHECKPOINT, "save", "load"),
    _row("torch/distributed/checkpoint/", Activity.CHECKPOINT),
    _row("safetensors/torch.py", Activity.CHECKPOINT),
    _row("torch/optim/", Activity.OPTIMIZER),
    _row("torch/nn/utils/clip_grad.py", Activity.OPTIMIZER),
    _row("torch/autograd/graph.py", Activity.BACKWARD, "_engine_run_backward"),
    _row("torch/cuda/__init__.py", Activity.DEVICE, "synchronize"),
    _row("torch/cuda/streams.py", Activity.DEVICE, "synchronize"),
)
"""Told by the innermost call that has a row: ranks wait for one another in the collectives of a checkpoint."""

_INNERMOST: tuple[_Row, ...] = (
    _row(
        "threading.py",
        Activity.LOCK,
        "wait",
        "join",
        "_wait_for_tstate_lock",
        "acquire",
        "__enter__",
        "_shutdown",
    ),
    _row("queue.py", Activity.LOCK, "get", "put", "join"),
    _row("multiprocessing/queues.py", Activity.LOCK, "get", "put"),
    _row("multiprocessing/synchronize.py", Activity.LOCK),
    _row("multiprocessing/popen_fork.py", Activity.LOCK, "poll", "wait"),
    _row("multiprocessing/connection.py", Activity.LOCK, "wait", "_recv", "poll"),
    _row(
        "subprocess.py", Activity.LOCK, "_try_wait", "wait", "_wait", "communicate", "_communicate"
    ),
    _row("asyncio/base_events.py", Activity.LOCK, "_run_once"),
    _row("concurrent/futures/_base.py", Activity.LOCK, "result", "wait"),
    _row("socket.py", Activity.FILE, "readinto", "accept"),
    _row("ssl.py", Activity.FILE, "read", "recv", "recv_into", "do_handshake"),
)
"""Of the innermost call and what it was called from, as far as they are Python's own files."""

_NATIVE: tuple[tuple[str, Activity], ...] = (
    ("c10d::", Activity.COLLECTIVE), ("gloo::", Activity.COLLECTIVE), ("ncclCommInit", Activity.COLLECTIVE),
    ("PyThread_acquire_lock", Activity.LOCK), ("lock_PyThread_acquire_lock", Activity.LOCK),
    ("take_gil", Activity.LOCK), ("nanosleep", Activity.SLEEP), ("time_sleep", Activity.SLEEP),
    ("cudaStreamSynchronize", Activity.DEVICE), ("cudaDeviceSynchronize", Activity.DEVICE),
    ("cudaEventSynchronize", Activity.DEVICE), ("cuStreamSynchronize", Activity.DEVICE),
)  # fmt: skip
"""Parts of a native frame's name; the first row that the stack has."""

_FILES = (
    "pipe",
    "inet",
    "sock",
    "unix_stream",
    "folio",
    "nfs",
    "fuse",
    "request_wait",
    "io_schedule",
    "wait_for_partner",
    "fifo",
    "skb",
)
"""Parts of the kernel's functions in which it waits for bytes."""
_SLEEPS = ("hrtimer_nanosleep", "do_nanosleep")
_NOT_THE_SCRIPT = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")
_HARMLESS = (
    "c10d_logger.py",
    "typing_extensions.py",
    "torch/utils/_contextlib.py",
    "torch/_ops.py",
)
"""Wrappers, which tell nothing by themselves."""
_OURS = ("elastic/agent/waits.py", "elastic/agent/device_times.py")
"""Are called around what waits, and tell nothing by themselves, but for one."""
_WAITS = _row("elastic/agent/waits.py", Activity.P2P, "wait_for_others")
"""Around `Work.wait`, of which Python shows nothing else."""
_LOADER = "pt_data_worker"


def doing(
    stack: Sequence[Call],
    *,
    state: str,
    wchan: str = "",
    gil: bool | None = None,
) -> Doing:
    """What a rank does; stack: innermost first; state: the kernel's letter, empty for who is gone;
    wchan: the kernel's function that it waits in; gil: whether its main thread holds it."""
    python = [call for call in stack if not is_native(call) and not call[1].endswith(_OURS)]
    native = [call for call in stack if is_native(call)]
    activity, name = _by_state(state, wchan, bool(stack))
    if activity is None:
        activity, name = _by_tables(python, native)
    if activity is None and any(_in(_WAITS, call) for call in stack):
        activity, name = Activity.P2P, "wait"  # of a collective the recorder tells, too
    if activity is None:
        activity, name = _by_kernel(python, native, state, wchan, gil)
    return Doing(
        activity=activity,
        name=name,
        asleep=state in ("S", "D"),
        call=next((call for call in python if _is_script(call)), None),
    )


def beside(found: Doing, children: Collection[Process]) -> Doing:
    """The same, with what the processes do that it began."""
    return replace(
        found,
        workers=tuple(child for child in children if child.command == _LOADER),
        helped=any(child.state == "R" for child in children),
    )


_Told = tuple[Activity | None, str]


def _by_state(state: str, wchan: str, seen: bool) -> _Told:
    if state in ("", "Z", "X"):
        return Activity.GONE, ""
    if state in ("T", "t"):
        return Activity.STOPPED, ""
    if not seen:
        return (Activity.FILE, wchan) if state == "D" else (Activity.UNKNOWN, "")
    return None, ""


def _by_tables(python: list[Call], native: list[Call]) -> _Told:
    for row in (*_PROMPTS, *_COMPILE):
        if inside := [call for call in python if _in(row, call)]:
            return row[2], bare(inside[0][0])
    for call in python:
        for row in _TABLE:
            if not _in(row, call):
                continue
            if row[2] is Activity.BACKWARD and any("c10d::" in one[0] for one in native):
                return Activity.COLLECTIVE, bare(call[0])  # DDP's, which no Python is called for
            return row[2], bare(_outermost(call, python)[0])
    return None, ""


def _outermost(call: Call, python: list[Call]) -> Call:
    """Of a collective that is made of others, as all_gather_object, the one that was called."""
    if not call[1].endswith("/distributed_c10d.py"):
        return call
    return [one for one in python if one[1] == call[1]][-1]


def _by_kernel(
    python: list[Call], native: list[Call], state: str, wchan: str, gil: bool | None
) -> tuple[Activity, str]:
    """Of one that no library of PyTorch's tells of."""
    name = bare(python[0][0]) if python else ""
    if state == "D" or (state == "S" and any(part in wchan for part in _FILES)):
        return Activity.FILE, wchan
    for call in python:
        for row in _INNERMOST:
            if _in(row, call):
                return row[2], bare(call[0])
        if not _is_standard(call):
            break
    for part, activity in _NATIVE:
        if any(part in call[0] for call in native):
            return activity, part.rstrip(":")
    if state == "S":
        if gil:  # which sleep() and all that waits for another give back
            return Activity.NATIVE, name
        return (Activity.SLEEP if wchan in _SLEEPS else Activity.WAIT), name
    return (Activity.NATIVE if native or gil is False else Activity.PYTHON), name


def moved(before: Sequence[Call], after: Sequence[Call]) -> bool:
    """Whether a rank is elsewhere than at the look before: in other functions. Lines do not count: a
    loop that is stuck runs through its own. Nor do libraries' calls, which few looks show."""
    return before != after and _places(before) != _places(after)


def worked(before: float, after: float, *, seconds: float) -> bool:
    """Whether it used the processor for more than a twentieth of the time between two looks; before,
    after: its CPU seconds, counted in hundredths."""
    return after - before > max(0.015, 0.05 * seconds)


def _places(stack: Sequence[Call]) -> list[tuple[str, str]]:
    return [(bare(call[0]), call[1]) for call in stack if not is_native(call)]


def _in(row: _Row, call: Call) -> bool:
    file, functions, _ = row
    inside = file in call[1] if file.endswith("/") else call[1].endswith("/" + file)
    if functions is None:
        return inside and call[0] != "<module>"  # it is only being imported
    return inside and bare(call[0]) in functions


def is_native(call: Call) -> bool:
    """Of a library or the interpreter, and none of Python's."""
    return not call[1].startswith("<") and not call[1].endswith((".py", ".pyx"))


def _is_script(call: Call) -> bool:
    return not any(part in call[1] for part in _NOT_THE_SCRIPT)


def _is_standard(call: Call) -> bool:
    return ("/lib/python" in call[1] and "-packages" not in call[1]) or call[1].startswith(
        "<frozen"
    )

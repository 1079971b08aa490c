"""What a look at a rank from outside of it found: its state, its threads' stacks, its children.

All that comes from the process looked at is a stranger's: texts are cut here, in number and in length,
so that no look is larger than about half a megabyte, whatever a stack looks like.
"""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

from elastic.proto import codec

DUMP_SIGNAL = signal.SIGRTMAX - 9
"""Asks a rank for its stacks, where nobody may read its memory. Of the real-time signals, which no
program gets from a terminal, a scheduler or a shell; programs that want one count from SIGRTMIN up or
from SIGRTMAX down, so it is away from both ends."""

FRAMES = 200
"""Of one stack: the innermost and the outermost half of it."""
ALL_FRAMES = 600
"""Of one look; the main thread's come first."""
THREADS = 64
"""Of one process."""
CHILDREN = 64
LOADER = "pt_data_worker"
"""What a loader's worker calls itself, so that they come first of a brief look's children."""
TOLD_FRAMES, TOLD_CHILDREN = 60, 16
"""Of a brief look; what a rank tells of itself has twice as many frames."""
KERNEL_LINES = 40
TEXT = 300
"""Characters of a name; of a path the last ones."""
ENDED = ("", "Z", "X")
"""States of a process that runs no more."""
STOPPED = ("T", "t")
"""By a signal; by a tracer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call, of Python's or, in a native look, of a library's."""

    function: str
    """Its qualified name where that is known, else its bare one."""
    file: str
    """A path; of a native frame its library's."""
    line: int = 0
    """0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread of a process."""

    tid: int
    """0: not known."""
    frames: Annotated[tuple[Frame, ...], codec.SHARED]
    """Innermost first. None: it runs no Python."""
    name: str = ""
    active: bool | None = None
    """py-spy's guess whether it runs or waits."""
    gil: bool | None = None
    """Whether it holds the GIL; None: not known."""
    state: str = ""
    """The kernel's letter for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that a rank started, or one of those did."""

    pid: int
    state: str
    command: str
    """The name that it gave itself, of 15 characters at most: PyTorch's loader workers are pt_data_worker."""
    frames: tuple[Frame, ...] = ()
    """Of its main thread, innermost first, where it was looked at closely and runs Python."""
    switches: int = 0
    """How often it has left the processor: one that sleeps, and has as many as before, has not run in between."""
    status: int = 0
    """As waitpid has it, of one that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The last that a rank issued in one process group, as torch's flight recorder has it; on a device the first that is
    not over."""

    group: str
    seq: int
    """Its number among the group's."""
    op: str
    """Empty: a device is at something that is not recorded any more."""
    sizes: str
    """Of its inputs."""
    p2p: bool
    """It is a send or a receive, or some of them at once; the numbers of two ranks' have nothing in common."""
    device: bool
    """It runs on a device (NCCL), and its host may do other things meanwhile."""
    started: bool
    """On the device, where that is known (`TORCH_NCCL_ENABLE_TIMING`); it waits there for the kernels before it."""
    done: bool
    before: str = ""
    """The `collectives.kind` of what its group had before it; empty where that is not known."""
    first: int = 0
    """Of its group's ranks, which are `count` in number, `stride` apart."""
    stride: int = 1
    count: int = 0
    """None: it is not known which they are, or they are no such row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What a rank has sent to another one, and asked of it, over all of its process groups: numbers of calls."""

    peer: int
    """Its number in the job."""
    sent: int
    received: int
    """Also what has not come yet."""


class OnDevice(Enum):
    """What a rank's device does with what its script has given it."""

    UNKNOWN = ""
    IDLE = "idle"
    """All of it is done."""
    BUSY = "busy"
    """Some of it is not; what it had at an earlier look is."""
    HELD = "held"
    """What it had at an earlier look is not done: a kernel does not end, or a collective waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rank says of itself, from a thread of its own."""

    collectives: tuple[Collective, ...] | None = None
    """None, here and below: they cannot be told."""
    threads: tuple[Thread, ...] = ()
    """As `fit` has them."""
    on_device: OnDevice = OnDevice.UNKNOWN
    transfers: tuple[Transfers, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at one rank."""

    rank: int
    pid: int
    at: float
    """Seconds of CLOCK_MONOTONIC, on its node."""
    state: str
    """The kernel's letter for its main thread (R, S, D, T, t, Z, X); empty when it is gone."""
    wchan: str = ""
    """The kernel's function that its main thread waits in."""
    kernel_stack: tuple[str, ...] = ()
    """Of its main thread, innermost first; empty where we may not read it."""
    cpu_seconds: float = 0.0
    """Of all its threads, in user and in kernel mode."""
    main_cpu_seconds: float = 0.0
    """Of its main thread."""
    io_bytes: int = 0
    """That its threads have read and written, of files and pipes, and that its TCP sockets have moved while it was looked
    at, but for heartbeats."""
    helpers_cpu_seconds: float = 0.0
    """Of all processes that it began, and that those began, whether or not they have ended."""
    helpers_io_bytes: int = 0
    """Theirs that run."""
    main_run_delay: float | None = None
    """Seconds that its main thread waited for a processor, in all its life; None: not known."""
    threads: tuple[Thread, ...] = ()
    """The main thread first; those that run Python, and those in D state."""
    children: tuple[Child, ...] = ()
    how: str = "none"
    """py-spy, told (by the rank itself), faulthandler, or none: there are no stacks."""
    native: bool = False
    """Frames of libraries are among the stacks'."""
    problem: str = ""
    """Why there are no stacks, or no better ones."""
    ticks: int = 0
    """Optimizer steps that it has told of."""
    collectives: tuple[Collective, ...] | None = None
    """None: it did not say."""
    on_device: OnDevice = OnDevice.UNKNOWN
    transfers: tuple[Transfers, ...] | None = None


def frame(function: object, file: object, line: object = 0) -> Frame:
    """One of what a stranger said."""
    number = line if isinstance(line, int) and 0 < line < 1 << 31 else 0
    return Frame(function=text(function), file=text(file, end=True), line=number)


def text(value: object, *, end: bool = False) -> str:
    """A name of at most `TEXT` characters; end: its last ones matter."""
    if not isinstance(value, str):
        return ""
    if len(value) > TEXT:
        value = "…" + value[1 - TEXT :] if end else value[: TEXT - 1] + "…"
    return value


def cut(frames: Sequence[Frame], most: int = FRAMES) -> tuple[Frame, ...]:
    """A stack with no more than `most` frames, 3 at least; one of them says how many were left out."""
    if len(frames) <= most:
        return tuple(frames)
    inner, outer = most // 2, (most - 1) // 2
    gap = Frame(function=f"<{len(frames) - inner - outer} more>", file="")
    return (*frames[:inner], gap, *frames[len(frames) - outer :])


def fit(threads: Iterable[Thread], pid: int, frames: int = ALL_FRAMES) -> tuple[Thread, ...]:
    """The main thread first, then as many as one look may hold."""
    found: list[Thread] = []
    left = frames
    for thread in sorted(threads, key=lambda thread: thread.tid != pid):
        if len(found) == THREADS or left < 3:
            break
        shown = cut(thread.frames, min(left, FRAMES))
        left -= len(shown)
        found.append(replace(thread, frames=shown))
    return tuple(found)


def main_thread(look: Look) -> Thread | None:
    """The thread that the kernel calls by the process's own number."""
    return next((thread for thread in look.threads if thread.tid == look.pid), None)


def telling(look: Look) -> tuple[Frame, ...]:
    """The frames that tell what a rank does, innermost first: its main thread's, and inside of them
    those of a thread that it waits for: a backward on a GPU, a training loop in a thread of its own."""
    main = main_thread(look)
    if main is None:
        return ()
    others = [t for t in look.threads if t is not main and t.frames]
    if _in_backward(main):
        called = [t for t in others if not _by_threading(t.frames)]
        if called:
            return max(called, key=lambda t: len(t.frames)).frames + main.frames
    if _in_join(main):
        working = [t for t in others if _by_threading(t.frames) and not _idle(t.frames)]
        if len(working) == 1:
            return working[0].frames
    return main.frames


def tells_alone(look: Look) -> bool:
    """Its main thread does, whatever its others do meanwhile."""
    main = main_thread(look)
    return main is not None and not _in_backward(main) and not _in_join(main)


def _in_backward(main: Thread) -> bool:
    innermost = _python(main.frames)
    return innermost is not None and bare(innermost.function) == "_engine_run_backward"


def _in_join(main: Thread) -> bool:
    innermost = _python(main.frames)
    return (
        innermost is not None
        and bare(innermost.function) in ("join", "_wait_for_tstate_lock")
        and innermost.file.endswith("threading.py")
    )


def brief(look: Look) -> Look:
    """What a verdict rests on, and no more: a job of thousands of ranks tells its master all of it at once."""
    main = main_thread(look)
    threads = () if main is None else (replace(main, frames=cut(telling(look), TOLD_FRAMES)),)
    kernel = look.kernel_stack if look.state == "D" else ()
    children = sorted(look.children, key=lambda child: child.command != LOADER)[:TOLD_CHILDREN]
    return replace(look, threads=threads, kernel_stack=kernel, children=tuple(children))


def bare(function: str) -> str:
    """The last part of a qualified name: all that faulthandler knows."""
    return function.rpartition(".")[2]


def is_native(frame: Frame) -> bool:
    """Whether it is a call in a library or in the interpreter, not one of Python's."""
    file = frame.file
    return not file.startswith("<") and not file.endswith((".py", ".pyx"))


def _python(frames: Iterable[Frame]) -> Frame | None:
    return next((frame for frame in frames if not is_native(frame)), None)


def _by_threading(frames: tuple[Frame, ...]) -> bool:
    """Whether `threading` started the thread; else a library did, and calls Python from it."""
    return any(bare(frame.function) == "_bootstrap" for frame in frames[-2:])


_WAITS = ("threading.py", "queue.py", "selectors.py", "socket.py", "thread.py", "connection.py")


def _idle(frames: tuple[Frame, ...]) -> bool:
    """Whether it waits for work: a pool's thread, a queue's, a monitor."""
    innermost = _python(frames)
    return innermost is None or innermost.file.endswith(_WAITS)

"""What the kernel tells of a process, whatever state that is in; nothing here asks the process."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from elastic.agent import children
from elastic.proto import looks
from elastic.proto.looks import Child

_TICK = os.sysconf("SC_CLK_TCK")
_TASKS = 1000
"""Threads of a process that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """One line of /proc."""

    name: str
    state: str
    cpu_seconds: float


GONE = Stat(name="", state="", cpu_seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process; what could not be read is empty."""

    stat: Stat
    """Its name, its main thread's state, and what all its threads used."""
    wchan: str
    kernel_stack: tuple[str, ...]
    tasks: dict[int, Stat]
    """Threads, by their number."""
    children: tuple[Child, ...]


def stat(pid: int, tid: int | None = None) -> Stat:
    """Of a process, or of one of its threads; `GONE` if it is. Takes no lock that the process may hold."""
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    try:
        line = Path(path).read_bytes()
    except OSError:
        return GONE
    name, _, rest = line.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])
    return Stat(
        name=looks.text(name.decode(errors="replace")),
        state=fields[0].decode(),
        cpu_seconds=ticks / _TICK,
    )


def read(pid: int) -> Process:
    """All that there is. The kernel stack's lock may be held up: not for a loop that others need."""
    tasks = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task")[:_TASKS]:
            tasks[int(name)] = stat(pid, int(name))
    return Process(
        stat=stat(pid),
        wchan=_wchan(pid),
        kernel_stack=_kernel_stack(pid),
        tasks=tasks,
        children=_children(pid),
    )


def _wchan(pid: int) -> str:
    with contextlib.suppress(OSError):
        found = looks.text(Path(f"/proc/{pid}/wchan").read_text(errors="replace"))
        return "" if found == "0" else found
    return ""


def _kernel_stack(pid: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/stack").read_text(errors="replace").splitlines()
        return tuple(
            looks.text(line.removeprefix("[<0>] ")) for line in lines[: looks.KERNEL_LINES]
        )
    return ()


def _children(pid: int) -> tuple[Child, ...]:
    """All that descends from it, parents first."""
    found = []
    for child in children.tree(pid)[1 : looks.CHILDREN + 1]:
        told = stat(child)
        if told.state:
            found.append(Child(pid=child, state=told.state, command=told.name))
    return tuple(found)

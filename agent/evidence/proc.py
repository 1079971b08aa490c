"""What the kernel tells of a process, whatever state that is in; nothing here asks the process."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from elastic.agent import children
from elastic.agent.tasks import Stat, stat, threads
from elastic.proto import looks
from elastic.proto.looks import Child


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


def read(pid: int) -> Process:
    """All that there is. The kernel stack's lock may be held up: not for a loop that others need."""
    return Process(
        stat=stat(pid),
        wchan=_wchan(pid),
        kernel_stack=_kernel_stack(pid),
        tasks=threads(pid),
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

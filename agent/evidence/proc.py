"""What the kernel tells of a process, whatever state that is in; nothing here asks the process."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.agent import children
from elastic.agent.tasks import Stat, io_bytes, kernel_stack, stat, switches, threads, wchan
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
    helpers_cpu_seconds: float
    """Of all that descends from it, whether it runs or has been waited for."""
    helpers_io_bytes: int
    """Of those that run: `io_bytes` of who waited for the others has theirs."""


def read(pid: int) -> Process:
    """All that there is. The kernel stack's lock may be held up: not for a loop that others need."""
    main, descendants = stat(pid), children.tree(pid)[1:]
    return Process(
        stat=main,
        wchan=looks.text(wchan(pid)),
        kernel_stack=tuple(map(looks.text, kernel_stack(pid)[: looks.KERNEL_LINES])),
        tasks=threads(pid),
        children=_children(descendants[: looks.CHILDREN]),
        helpers_cpu_seconds=main.waited_cpu_seconds + sum(map(_cpu_seconds, descendants)),
        helpers_io_bytes=sum(map(io_bytes, descendants)),
    )


def _cpu_seconds(pid: int) -> float:
    told = stat(pid)
    return told.cpu_seconds + told.waited_cpu_seconds


def _children(pids: Sequence[int]) -> tuple[Child, ...]:
    found = []
    for child in pids:
        told = stat(child)
        if told.state:
            found.append(
                Child(
                    pid=child,
                    state=told.state,
                    command=told.name,
                    switches=switches(child),
                    status=told.status,
                )
            )
    return tuple(found)

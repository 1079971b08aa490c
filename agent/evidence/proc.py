"""What the kernel tells of a process, whatever state that is in; nothing here asks the process."""

from dataclasses import dataclass

from elastic.agent import children
from elastic.agent.tasks import Stat, kernel_stack, stat, switches, threads, wchan
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
        wchan=looks.text(wchan(pid)),
        kernel_stack=tuple(map(looks.text, kernel_stack(pid)[: looks.KERNEL_LINES])),
        tasks=threads(pid),
        children=_children(pid),
    )


def _children(pid: int) -> tuple[Child, ...]:
    """All that descends from it, parents first."""
    found = []
    for child in children.tree(pid)[1 : looks.CHILDREN + 1]:
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

"""What /proc says: which processes belong to a job, and how they hang together."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "E2E_JOB"
"""In the environment of every process of a job: its folder, which is every one's cwd as well."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    state: str
    """One letter, as in proc(5)."""
    command: str
    wait: str
    """Where it sleeps in the kernel."""

    def __str__(self) -> str:
        return f"{self.pid:>8} {self.parent:>8} {self.state} {self.wait:<20} {self.command[:150]}"


def belonging_to(folder: Path) -> list[Process]:
    """Processes of the job in `folder`: by the environment, the working directory or the script.

    More than one mark, since a title that a process gives itself overwrites its environment.
    """
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        root = Path("/proc") / entry
        with contextlib.suppress(OSError):
            environ = (root / "environ").read_bytes().split(b"\0")
            command = (root / "cmdline").read_bytes()
            if (
                mark in environ
                or bytes(folder) in command
                or os.readlink(root / "cwd") == str(folder)
            ):
                process = look(int(entry))
                if process is not None and process.state not in "ZX":
                    found.append(process)
    return found


def look(pid: int) -> Process | None:
    """One process, or None when there is none of that number."""
    root = Path(f"/proc/{pid}")
    try:
        fields = (root / "stat").read_text().rpartition(")")[2].split()
        command = (root / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        wait = (root / "wchan").read_text()
    except OSError:
        return None
    return Process(pid, int(fields[1]), fields[0], command.strip(), wait)


def cpu_seconds(pid: int) -> float:
    """That a process has computed for; 0 when there is none of that number."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def began(pid: int) -> float:
    """When a process began, by CLOCK_MONOTONIC; infinity when there is none of that number."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK") - asleep
    return math.inf


def alive(pid: int) -> bool:
    process = look(pid)
    return process is not None and process.state not in "ZX"


def children(pid: int) -> list[Process]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                process = look(int(child))
                if process is not None and process.state not in "ZX":
                    found.append(process)
    return found


def descendants(pid: int) -> list[Process]:
    found = children(pid)
    for process in found:
        found.extend(children(process.pid))
    return found


def has_open(pid: int, name: str) -> bool:
    """Whether a process has a file of that name open."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.basename(os.readlink(entry)) == name:
                    return True
    return False


def kill(*pids: int, number: int = signal.SIGKILL) -> None:
    """Signal all of them; one that ended meanwhile is no mistake."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def table(processes: Iterable[Process]) -> str:
    return "\n".join(str(process) for process in processes) or "none"

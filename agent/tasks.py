"""What /proc has of a process or one of its threads. Light, since ranks load it too."""

import contextlib
import os
from dataclasses import dataclass

_TICK = os.sysconf("SC_CLK_TCK")
_MOST = 1000
"""Threads of a process that are looked at."""
_MOST_FILES = 10_000
"""The same of its open files."""
_SOCKET = "socket:["
"""What proc(5) says one is, before its inode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What proc(5) has in `stat`, as far as we ask for it."""

    name: str
    """15 characters at most."""
    state: str
    """R, S, D, T, ..."""
    cpu_seconds: float
    waited_cpu_seconds: float = 0.0
    """Of its children that have ended, and for which it has waited."""
    exiting: bool = False
    """It runs no more, and the kernel takes it apart."""
    status: int = 0
    """As waitpid has it, of what is ending; 0, too, where we may not know."""


GONE = Stat(name="", state="", cpu_seconds=0.0)
_EXITING = 0x4
"""PF_EXITING, of a thread's flags."""


def stat(pid: int, tid: int | None = None) -> Stat:
    """Of a process, or of one of its threads; `GONE` if it is. Takes no lock that the process may hold."""
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    try:
        with open(path, "rb") as file:
            line = file.read()
    except OSError:
        return GONE
    name, _, rest = line.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    return Stat(
        name=name.decode(errors="replace"),
        state=fields[0].decode(),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICK,
        waited_cpu_seconds=(int(fields[13]) + int(fields[14])) / _TICK,
        exiting=bool(int(fields[6]) & _EXITING),
        status=int(fields[49]) if len(fields) > 49 else 0,
    )


def threads(pid: int) -> dict[int, Stat]:
    """Of each thread, by its number; none if the process is gone."""
    try:
        names = os.listdir(f"/proc/{pid}/task")[:_MOST]
    except OSError:
        return {}
    return {int(name): stat(pid, int(name)) for name in names}


def switches(pid: int) -> int:
    """How often the kernel took its main thread off the processor; 0 where it does not tell. One that sleeps, and has as
    many as before, has not run in between."""
    return sum(
        int(line.rpartition(":")[2])
        for line in _read(f"/proc/{pid}/task/{pid}/status").splitlines()
        if "voluntary_ctxt_switches" in line
    )


def io_bytes(pid: int) -> int:
    """That all its threads have read and written, but for what they sent and received, and so have children for which it
    has waited; 0 where we may not know."""
    lines = (line.partition(": ") for line in _read(f"/proc/{pid}/io").splitlines())
    return sum(int(count) for name, _, count in lines if name in ("rchar", "wchar"))


def sockets(pid: int) -> set[int]:
    """The inodes of those that it has open; none where we may not know."""
    folder, found = f"/proc/{pid}/fd/", set[int]()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder)[:_MOST_FILES]:
            try:
                link = os.readlink(folder + name)
            except OSError:  # it was closed meanwhile
                continue
            if link.startswith(_SOCKET):
                found.add(int(link[len(_SOCKET) : -1]))
    return found


def run_delay(pid: int) -> float | None:
    """Seconds that its main thread could have run in, had it had a processor; None where the kernel does not tell."""
    fields = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else None


def kernel_stack(pid: int) -> tuple[str, ...]:
    """Functions of the kernel that its main thread is in, innermost first; none where we may not know. Takes a lock
    that may be held up: not for a loop that others need."""
    lines = _read(f"/proc/{pid}/stack").splitlines()
    return tuple(line.removeprefix("[<0>] ") for line in lines)


def wchan(pid: int) -> str:
    """The one that it waits in; empty where it does not wait or we may not know."""
    found = _read(f"/proc/{pid}/wchan").strip()
    return "" if found == "0" else found


def in_kernel(pid: int) -> str:
    """Where an unkillable process sits in the kernel, as far as we may know, in one line."""
    return ", ".join(kernel_stack(pid))[:2000] or wchan(pid) or "unknown"


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""

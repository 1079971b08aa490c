"""A line of /proc for a process or one of its threads. Light, since ranks load it too."""

import os
from dataclasses import dataclass

_TICK = os.sysconf("SC_CLK_TCK")
_MOST = 1000
"""Threads of a process that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What proc(5) has in `stat`, as far as we ask for it."""

    name: str
    """15 characters at most."""
    state: str
    """R, S, D, T, ..."""
    cpu_seconds: float


GONE = Stat(name="", state="", cpu_seconds=0.0)


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
    )


def threads(pid: int) -> dict[int, Stat]:
    """Of each thread, by its number; none if the process is gone."""
    try:
        names = os.listdir(f"/proc/{pid}/task")[:_MOST]
    except OSError:
        return {}
    return {int(name): stat(pid, int(name)) for name in names}

"""A cgroup (version 2) for an agent and all that it starts, where one may be had.

`<ours>/elastic-<pid namespace>-<guardian's pid>`. It makes the guardian's sweep certain: killing it reaches processes
that left their session and their parents. Membership only, no limits: what limits there are stay
those of the cgroup above. The agent joins it, its children are born into it: to move a process takes
the kernel up to 0.1 s, which no rank should pay for.
"""

import contextlib
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path


def create() -> Path | None:
    """A new cgroup for this launcher; None where none may be made. Ends what dead ones left."""
    parent = _UNIFIED.folder()
    if parent is None or not parent.is_dir() or not os.access(parent, os.W_OK):
        return None
    _end_stale(parent)
    path = parent / f"{_prefix()}{os.getpid()}"
    try:
        path.mkdir(exist_ok=True)
        if not (path / "cgroup.kill").exists():  # Linux before 5.14
            path.rmdir()
            return None
    except OSError:
        return None
    return path


def join(path: Path | None) -> None:
    """Become a member, with all children to come; make it again if it was ended.

    A lock, held until this process ends, says that somebody still looks after what is in it.
    """
    if path is not None:
        with contextlib.suppress(OSError):
            path.mkdir(exist_ok=True)
            fcntl.flock(os.open(path, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)
            (path / "cgroup.procs").write_text(str(os.getpid()))


def end(path: Path | None) -> bool:
    """SIGKILL for all in it; then remove it if it is empty. Whether it is gone."""
    if path is None:
        return True
    with contextlib.suppress(OSError):
        (path / "cgroup.kill").write_text("1")
    with contextlib.suppress(OSError):
        path.rmdir()
    return not path.exists()


def limits(proc: Path = Path("/proc/self")) -> list[tuple[int, int]]:
    """Bytes that each cgroup above us may have, of either version, and has less what the kernel can drop."""
    found = []
    for version in (_UNIFIED, _MEMORY):
        own = version.folder(proc)
        for folder in () if own is None else (own, *own.parents):  # a container may not see its own
            with contextlib.suppress(OSError, ValueError):
                most = int((folder / version.most).read_text())  # "max" is no number
                stat = (folder / "memory.stat").read_text()
                cache = re.findall(rf"^{version.cache} (\d+)", stat, re.MULTILINE)
                used = int((folder / version.used).read_text())
                found.append((most, used - sum(map(int, cache))))
    return found


def unified(proc: Path = Path("/proc/self")) -> Path | None:
    """Our own cgroup of version 2, if it is to be seen."""
    return _UNIFIED.folder(proc)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    """Where cgroups are, and how their memory is called."""

    mount: str
    """A pattern of its line in `mounts`, and of ours in `cgroup`."""
    entry: str
    most: str
    used: str
    cache: str

    def folder(self, proc: Path = Path("/proc/self")) -> Path | None:
        """Of our own cgroup, if it is to be seen."""
        with contextlib.suppress(OSError):
            mount = re.search(self.mount, (proc / "mounts").read_text(), re.MULTILINE)
            entry = re.search(self.entry, (proc / "cgroup").read_text(), re.MULTILINE)
            if mount and entry:
                return Path(mount[1]) / entry[1].lstrip("/")
        return None


_UNIFIED = _Hierarchy(
    mount=r"^\S+ (\S+) cgroup2 ",
    entry=r"^0::(\S*)",
    most="memory.max",
    used="memory.current",
    cache="(?:in)?active_file",
)
"""Version 2, where one can be made for an agent."""
_MEMORY = _Hierarchy(
    mount=r"^\S+ (\S+) cgroup (?:\S+,)?memory[, ]",
    entry=r"^\d+:(?:[^:\s]+,)?memory(?:,[^:\s]+)?:(\S*)",
    most="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    cache="total_(?:in)?active_file",
)
"""Version 1's, which has one for each of its controllers."""


def _prefix() -> str:
    """Pids mean something in their own namespace only."""
    return f"elastic-{os.stat('/proc/self/ns/pid').st_ino}-"


def _end_stale(parent: Path) -> None:
    """A guardian and its agent that were killed in one instant could not end their ranks' children."""
    for path in parent.glob(f"{_prefix()}*"):
        pid = path.name.removeprefix(_prefix())
        with contextlib.suppress(OSError):  # another launcher may be just as far with it
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and _unlocked(path):
                end(path)


def _unlocked(path: Path) -> bool:
    """No agent is left that ends its ranks with the grace that they were promised."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True

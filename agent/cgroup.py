"""A cgroup (version 2) for a node's ranks, where one may be had: it makes a sweep certain.

`<ours>/elastic-<guardian's pid>/round-<n>`. Membership only, no limits: what limits there are stay
those of the cgroup above. Killing it reaches processes that left their session and their parents.
"""

import contextlib
import os
import re
from pathlib import Path

_PREFIX = "elastic-"


def create() -> Path | None:
    """A new cgroup for this launcher; None where none may be made. Ends what dead ones left."""
    parent = _own()
    if parent is None or not os.access(parent, os.W_OK):
        return None
    _end_stale(parent)
    path = parent / f"{_PREFIX}{os.getpid()}"
    try:
        path.mkdir(exist_ok=True)
        if not (path / "cgroup.kill").exists():  # Linux before 5.14
            path.rmdir()
            return None
    except OSError:
        return None
    return path


def of_round(node: Path | None, number: int) -> Path | None:
    """The cgroup of a round's ranks."""
    if node is None:
        return None
    path = node / f"round-{number}"
    with contextlib.suppress(OSError):
        path.mkdir(exist_ok=True)
        return path
    return None


def end(path: Path | None) -> bool:
    """SIGKILL for all in it and below; then remove it if it is empty. Whether it is gone."""
    if path is None:
        return True
    with contextlib.suppress(OSError):
        (path / "cgroup.kill").write_text("1")
    with contextlib.suppress(OSError):
        for child in path.iterdir():
            if child.is_dir():
                with contextlib.suppress(OSError):
                    child.rmdir()
    with contextlib.suppress(OSError):
        path.rmdir()
    return not path.exists()


def _own() -> Path | None:
    """Our cgroup's folder in the version 2 hierarchy."""
    with contextlib.suppress(OSError):
        mounts = Path("/proc/self/mounts").read_text()
        mount = re.search(r"^\S+ (\S+) cgroup2 ", mounts, re.MULTILINE)
        entry = re.search(r"^0::(\S*)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        if mount and entry:
            path = Path(mount[1]) / entry[1].lstrip("/")
            return path if path.is_dir() else None
    return None


def _end_stale(parent: Path) -> None:
    """A guardian and its agent that were killed in one instant could not end their ranks' children."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_PREFIX}*"):
            pid = path.name.removeprefix(_PREFIX)
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                end(path)

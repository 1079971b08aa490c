"""Processes that get less of a core than they want: a cgroup with a quota, of version 1 or 2."""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""Of version 1, and of version 2."""
PERIOD, LEAST = 4_000, 1_000
"""Microseconds: of a period, and of a quota in it."""


@contextlib.contextmanager
def throttled(pids: Iterable[int], share: float) -> Iterator[None]:
    """share: of a core, that they have together. Raises OSError where it cannot be made."""
    root = ROOTS[0] if ROOTS[0].exists() else ROOTS[1]
    group = root / f"elastic-e2e-{os.getpid()}-{secrets.token_hex(4)}"
    period = max(PERIOD, int(LEAST / share))
    quota = max(LEAST, int(share * period))
    group.mkdir()
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
        before = {pid: _group(pid, root) for pid in pids}
        for pid in before:
            (group / "cgroup.procs").write_text(str(pid))
        yield
        for pid, home in before.items():
            with contextlib.suppress(ProcessLookupError):
                (home / "cgroup.procs").write_text(str(pid))
    finally:
        with contextlib.suppress(OSError):  # what is in it ends with the test
            group.rmdir()


def _group(pid: int, root: Path) -> Path:
    """Where a process is now."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or (root == ROOTS[1] and not controllers):
            return root / path.removeprefix("/")
    return root


@cache
def missing() -> str:
    """Why none can be made here; empty where one can."""
    try:
        with throttled((), 0.5):
            return ""
    except OSError as error:
        return str(error)

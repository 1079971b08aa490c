"""Processes that no signal ends: a stand-in for the D state."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import processes

FREEZERS = Path("/sys/fs/cgroup/freezer")


class Freezer:
    """A cgroup whose members are frozen."""

    def __init__(self, group: Path) -> None:
        self.group = group

    def freeze(self, *pids: int) -> None:
        for pid in pids:
            (self.group / "cgroup.procs").write_text(str(pid))
        (self.group / "freezer.state").write_text("FROZEN")

    def thaw(self) -> None:
        (self.group / "freezer.state").write_text("THAWED")


@contextlib.contextmanager
def freezer(name: str) -> Iterator[Freezer]:
    """Skips the test where there can be none."""
    group = FREEZERS / name
    try:
        group.mkdir()
        (group / "freezer.state").read_text()
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip("no cgroup freezer (version 1) that we may use")
    made = Freezer(group)
    yield made
    made.thaw()
    processes.kill(*map(int, (group / "cgroup.procs").read_text().split()))
    while group.exists():
        with contextlib.suppress(OSError):  # some of them are on their way out
            group.rmdir()

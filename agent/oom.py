"""Whether the kernel's OOM killer struck in our cgroup: its own count, version 1 or 2."""

import contextlib
import math
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

AGE = 60.0
"""Seconds before a rank's end; what is older did not end it."""
_ROOT = Path("/sys/fs/cgroup")


def kills() -> int:
    """Processes of our cgroup that the OOM killer ended so far; 0 where nobody counts."""
    found = _counter()
    if found is None:
        return 0
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)", found.read_text(), re.MULTILINE):
            return int(match[1])
    return 0


@cache
def _counter() -> Path | None:
    """The file that holds the count."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            candidates = []
            if not controllers:
                candidates = _upwards(_ROOT, path, "memory.events")
            elif "memory" in controllers.split(","):
                candidates = _upwards(_ROOT / "memory", path, "memory.oom_control")
            for candidate in candidates:
                if candidate.is_file():
                    return candidate
    return None


def _upwards(root: Path, path: str, name: str) -> list[Path]:
    """The file of that name in a cgroup and in all above it: only some may have the controller."""
    folder = root / path.lstrip("/")
    return [f / name for f in (folder, *folder.parents) if f == root or root in f.parents]


class Strikes:
    """Of the OOM killer, from now on."""

    def __init__(
        self,
        kills: Callable[[], int] = kills,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kills, self._clock = kills, clock
        self._count, self._at = kills(), -math.inf

    def look(self) -> None:
        """To be called now and then, since nobody tells when it struck."""
        if (count := self._kills()) > self._count:
            self._count, self._at = count, self._clock()

    @property
    def recent(self) -> bool:
        self.look()
        return self._clock() - self._at < AGE

"""Metrics as JSON lines, for programs: the platform, plots, whoever asks how a run does.

One object a line, appended; docs/trainer-watching.md has the fields. A line is written at once and whole,
so a reader never meets half of one but at the end of the file, after a kill; the next life of the run
begins a new line there. Steps that are run again have lines again: the last one of a step holds.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic import session
from elastic.proto import env, job_folder
from elastic.proto.errors import UsageError

log = logging.getLogger(__name__)


def default_path() -> Path | None:
    """In the job's folder; None outside `elastic-run`, and where it keeps no logs."""
    folder = job_folder.of_rank(env.process_environment())
    return None if folder is None else folder / job_folder.METRICS


class Metrics:
    """The file, held open. What goes wrong with it later, a full disk, does not end training."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(
                f"--metrics-file {path} cannot be written: {error.strerror}; name another"
            ) from error
        current = session.current()
        self._path, self._round = path, current.round if current else 0
        self._torn = _torn(self._fd)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a line; NaN and infinities become "NaN", "Infinity" and "-Infinity"."""
        line = {"time": round(time.time(), 3), "kind": kind, "round": self._round, **_plain(values)}
        data = b"\n" * self._torn + json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            self._torn = os.write(self._fd, data) < len(data)
        except OSError as error:
            log.warning("%s: a line is lost: %s", self._path, error.strerror)

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole, in order; numbers that are none become such."""
    for line in path.read_bytes().splitlines():
        try:
            found = json.loads(line, object_hook=_numbers)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def steps(path: Path) -> dict[int, dict[str, Any]]:
    """What holds of each logged step, in order of the steps."""
    found = {line["iteration"]: line for line in read(path) if line.get("kind") == "step"}
    return dict(sorted(found.items()))


def _torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    words = ("NaN", "Infinity", "-Infinity")
    return {key: float(item) if item in words else item for key, item in found.items()}

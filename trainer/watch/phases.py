"""What the time of each step goes to, without waiting for the device.

A step is cut into phases that lie end to end: at any time the run is in one of them, so they add up to the
step. On a GPU the cuts are CUDA events, read when they have passed; what the host does while the device has
nothing to do counts for the phase in which the device waits.
"""

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from elastic.proto.errors import UsageError

log = logging.getLogger(__name__)

PHASES = ("data", "forward", "backward", "reduce", "clip", "optimizer", "save", "log", "other")
"""In the order in which they are told; `other` is what no phase was said for."""


class Stamps(Protocol):
    """Where marks of time come from."""

    def mark(self) -> Any:
        """Now."""
        ...

    def passed(self, mark: Any, *, wait: bool) -> bool:
        """Whether its time is known; wait: until it is."""
        ...

    def between(self, first: Any, second: Any) -> float:
        """Seconds."""
        ...


class HostStamps:
    """The host's clock."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float, *, wait: bool) -> bool:
        return True

    def between(self, first: float, second: float) -> float:
        return second - first


class CudaStamps:
    """Events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event, *, wait: bool) -> bool:
        if wait:
            mark.synchronize()
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1e3


class Span(NamedTuple):
    """A piece of a step in one phase; times in seconds, `start` since the clock was made."""

    iteration: int
    phase: str
    start: float
    seconds: float


class PhaseClock:
    """Follows one rank from step to step."""

    def __init__(self, stamps: Stamps, trace: "Trace | None" = None) -> None:
        self._stamps, self._trace = stamps, trace
        self._phase, self._iteration = "other", 0
        self._last = self._origin = stamps.mark()
        self._cuts: deque[tuple[int, str, Any, Any]] = deque()
        self._sums: dict[str, float] = {}
        self._steps = 0

    def begin(self, iteration: int) -> None:
        """A step begins, and the one before has ended."""
        self.switch("other")
        self._steps += 1
        self._iteration = iteration
        self._read(wait=False)

    def switch(self, phase: str) -> None:
        """From here on the step is in that phase."""
        now = self._stamps.mark()
        self._cuts.append((self._iteration, self._phase, self._last, now))
        self._phase, self._last = phase, now

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """A phase as long as a block lasts, and then again the one before."""
        before = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in it is of no step; the step goes on behind it."""
        before, iteration = self._phase, self._iteration
        self.switch("other")
        self._iteration = 0
        try:
            yield
        finally:
            self.switch(before)
            self._iteration = iteration

    def take(self) -> dict[str, float]:
        """Seconds of each phase, mean over the steps that began since the last call; waits for them.

        Call it at the end of a step: what comes then counts for the next call.
        """
        self.switch(self._phase)
        self._read(wait=True)
        steps = max(self._steps, 1)
        found = {phase: self._sums[phase] / steps for phase in PHASES if self._sums.get(phase)}
        self._sums, self._steps = {}, 0
        return found

    def close(self) -> None:
        """Write what waits; the step that goes on ends here."""
        self.switch("other")
        self._read(wait=True)
        if self._trace is not None:
            self._trace.close()

    def _read(self, *, wait: bool) -> None:
        while self._cuts and self._stamps.passed(self._cuts[0][3], wait=wait):
            iteration, phase, first, second = self._cuts.popleft()
            seconds = self._stamps.between(first, second)
            if iteration == 0:
                continue
            self._sums[phase] = self._sums.get(phase, 0.0) + seconds
            if self._trace is not None:
                start = self._stamps.between(self._origin, first)
                self._trace.add(Span(iteration, phase, start, seconds))


class NoClock:
    """In a clock's place where nothing is traced: costs a call."""

    def begin(self, iteration: int) -> None:
        """Nothing."""

    def switch(self, phase: str) -> None:
        """Nothing."""

    def inside(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return _NOTHING

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return _NOTHING

    def take(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing."""


_NOTHING = contextlib.nullcontext()


class Trace:
    """A rank's Chrome trace, which chrome://tracing and Perfetto show; readable after a kill, too."""

    def __init__(self, folder: Path, rank: int) -> None:
        """One file for each life of a rank. Raises UsageError."""
        self._rank, self._origin = rank, time.time()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{rank:05d}.{int(self._origin)}.{os.getpid()}.json"
            self._file = path.open("w", buffering=1)
        except OSError as error:
            raise UsageError(
                f"--trace-phases {folder} cannot be written to: {error.strerror}"
            ) from error
        self._full = False
        self._write("[\n")  # of which the end may be missing, as the format has it

    def add(self, span: Span) -> None:
        """Append a span."""
        event = {
            "name": span.phase, "cat": "step", "ph": "X", "pid": self._rank, "tid": 0,
            "ts": round((self._origin + span.start) * 1e6, 1), "dur": round(span.seconds * 1e6, 1),
            "args": {"iteration": span.iteration},
        }  # fmt: skip
        self._write(json.dumps(event) + ",\n")

    def close(self) -> None:
        self._write("{}]\n")
        with contextlib.suppress(OSError):  # what did not fit is tried once more, and has been told
            self._file.close()

    def _write(self, text: str) -> None:
        try:
            if not self._full:
                self._file.write(text)
        except OSError as error:  # a full disk, say, which ends no training
            self._full = True
            log.warning("%s ends here: %s", self._file.name, error.strerror)


Clock = PhaseClock | NoClock


def clock(folder: Path | None, rank: int, *, cuda: bool) -> Clock:
    """The clock that `--trace-phases` asks for. Raises UsageError."""
    if folder is None:
        return NoClock()
    return PhaseClock(CudaStamps() if cuda else HostStamps(), Trace(folder, rank))


def phase_line(seconds: Mapping[str, float]) -> str:
    """What each phase takes of a step, in one line."""
    step = sum(seconds.values()) or 1.0
    parts = [f"{phase} {time_ * 1e3:.1f} ({time_ / step:.1%})" for phase, time_ in seconds.items()]
    return f" phases of a step (ms): {' | '.join(parts)} | sum {step * 1e3:.1f}"

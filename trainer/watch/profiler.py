"""A few steps under a profiler: Megatron's `--profile`."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, profile

from elastic.proto.errors import UsageError

log = logging.getLogger(__name__)


class StepProfiler:
    """Follows a rank from step to step, and records the steps behind the first `first`, up to number `end`."""

    def __init__(self, first: int, end: int, trace: Path | None) -> None:
        """trace: PyTorch's, gzipped JSON, for TensorBoard's plugin and Perfetto; None: marks for
        `nsys profile --capture-range=cudaProfilerApi`. Raises UsageError for these without a GPU."""
        if trace is None and not torch.cuda.is_available():
            raise UsageError(
                "--profile marks steps for NVIDIA's nsys, and there is no GPU: add --use-pytorch-profiler"
            )
        self._first, self._end, self._trace = first, end, trace
        # PyTorch's records a step before and forgets it, for its own start takes time.
        self._begin = first if trace is None else first - 1
        self._running: contextlib.ExitStack | None = None
        self._pytorch: profile | None = None

    def step(self, finished: int) -> None:
        """So many are finished; call it before each."""
        if self._pytorch is not None:
            self._pytorch.step()
        if finished >= self._end:
            self.close()
        elif finished >= self._begin and self._running is None:
            self._running = self._recorded(finished)

    def close(self) -> None:
        """What has been recorded is written, also of fewer steps."""
        if self._running is not None:
            self._running.close()
        self._running = self._pytorch = None

    def _recorded(self, finished: int) -> contextlib.ExitStack:
        def plan(step: int) -> ProfilerAction:
            number = finished + step + 1
            if number <= self._first:
                return ProfilerAction.WARMUP
            if number < self._end:
                return ProfilerAction.RECORD
            return ProfilerAction.RECORD_AND_SAVE if number == self._end else ProfilerAction.NONE

        stack = contextlib.ExitStack()
        if self._trace is None:
            stack.enter_context(torch.cuda.profiler.profile())
            marks = torch.autograd.profiler.emit_nvtx(record_shapes=True)  # type: ignore[no-untyped-call]
            stack.enter_context(marks)
        else:
            made = profile(
                schedule=plan, on_trace_ready=self._write, record_shapes=True, acc_events=True
            )
            self._pytorch = stack.enter_context(made)
        return stack

    def _write(self, done: Any) -> None:
        assert self._trace is not None
        try:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(self._trace))
        except OSError as error:  # a full disk, say, which ends no training
            log.warning("the trace %s is lost: %s", self._trace, error.strerror)

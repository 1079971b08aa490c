"""Where the numbers of a run go: console, TensorBoard, W&B, metrics file. Rank 0's; others have none.

reporter.begin()
for ...:
    reporter.step(step)  # once its numbers are there
    reporter.line()      # where one is due
reporter.close()
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from elastic.trainer.arguments.logging import LoggingFlags
from elastic.trainer.arguments.watching import WatchFlags
from elastic.trainer.watch import console, evaluation, flops, jsonl, memory, probes, report
from elastic.trainer.watch.flops import Flops
from elastic.trainer.watch.guard import Verdict
from elastic.trainer.watch.phases import NoClock, PhaseClock, phase_line
from elastic.trainer.watch.report import Step, Tally
from elastic.trainer.watch.tensorboard import Board
from elastic.trainer.watch.weights_and_biases import WandbRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Sink(Protocol):
    """What takes points: a board, W&B."""

    def add(
        self, values: Mapping[str, float], iteration: int, consumed: int | None = None
    ) -> None: ...

    def back(self, iteration: int, consumed: int) -> None:
        """The run has gone back there: what came later comes again."""
        ...

    def flush(self) -> None:
        """Write what waits."""
        ...

    def close(self) -> None: ...


def say(line: str) -> None:
    """Print at once: whoever watches the run reads it through a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def sinks(
    flags: LoggingFlags,
    *,
    iteration: int,
    consumed: int,
    save: Path | None,
    arguments: Mapping[str, Any],
) -> tuple[Sink, ...]:
    """Those that the flags name. iteration, consumed: where the run goes on; save: its checkpoints; arguments: what
    is shown of the run's.

    Raises UsageError where one cannot be written to.
    """
    found: list[Sink] = []
    if flags.tensorboard_dir is not None:
        size = flags.tensorboard_queue_size
        board = Board(
            flags.tensorboard_dir, iteration=iteration, consumed=consumed, queue_size=size,
            arguments=arguments,
        )  # fmt: skip
        found.append(board)
    if flags.wandb_project:
        folder = flags.wandb_save_dir or (str(save / "wandb") if save else "")
        run = WandbRun(
            project=flags.wandb_project, name=flags.wandb_exp_name, entity=flags.wandb_entity,
            folder=folder, of=str(save or ""), arguments=arguments,
        )  # fmt: skip
        found.append(run)
    return tuple(found)


def metrics(flags: WatchFlags) -> jsonl.Metrics | None:
    """The file that the flags name, or the job's. Raises UsageError."""
    path = flags.metrics_file or jsonl.default_path()
    return None if path is None else jsonl.Metrics(path)


def peak(flags: WatchFlags, device: torch.device) -> float | None:
    """FLOP/s of a device, as the flags or its name say."""
    if flags.device_peak_tflops is not None:
        return flags.device_peak_tflops * 1e12
    return flops.peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


class Reporter:
    """Takes each step in order, and tells of them as the flags have it."""

    def __init__(
        self,
        flags: LoggingFlags,
        *,
        iterations: int,
        seq_length: int,
        flops: Flops,
        devices: int,
        peak: float | None,
        mfu: bool,
        sinks: tuple[Sink, ...],
        metrics: jsonl.Metrics | None,
        device: torch.device | str = "cpu",
        clock: PhaseClock | NoClock | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """iterations: of the whole run; peak: of a device, FLOP/s; clock: of the steps' phases."""
        self._flags, self._iterations, self._seq_length = flags, iterations, seq_length
        self._flops, self._devices, self._peak, self._mfu = flops, devices, peak, mfu
        self._sinks, self._metrics = sinks, metrics
        self._device, self._clock, self._now = torch.device(device), clock or NoClock(), now
        self._since, self._spent = now(), 0.0
        """When the time began to run that counts, and seconds before that since the last line."""
        self._steps: list[tuple[Step, float]] = []
        """Since the last line, each with the seconds up to its end."""

    @property
    def writer(self) -> "SummaryWriter | None":
        """TensorBoard's, for what a script writes itself; None without --tensorboard-dir."""
        return next((sink.writer for sink in self._sinks if isinstance(sink, Board)), None)

    def begin(self) -> None:
        """Steps' time counts from now: what came since `pause`, or since the last one, was none of theirs."""
        self._since = self._now()

    def pause(self) -> None:
        """Until `begin`, what is done is no step: an evaluation, say."""
        now = self._now()
        self._spent, self._since = self._spent + now - self._since, now

    def step(self, step: Step) -> None:
        """The next one."""
        self._steps.append((step, self._spent + self._now() - self._since))
        if step.iteration % self._flags.tensorboard_log_interval == 0:
            self._add(self._scalars(step), step.iteration, step.consumed)

    def line(self) -> None:
        """One is due of the steps since the last one, if there are any."""
        if not self._steps:
            return
        self.pause()
        self._line()
        self._steps, self._spent = [], 0.0

    def timers(self, times: Mapping[str, float], iteration: int) -> None:
        """What the run's own came to, in a step, by tag."""
        self._add(times, iteration)

    def evaluation(
        self,
        losses: Mapping[str, float],
        iteration: int,
        consumed: int,
        *,
        kind: str = "validation",
        suffix: str = "",
    ) -> None:
        """Of a set. kind: `validation` or `test`; suffix: which of several, such as `-wiki`."""
        prefix = f"iteration {iteration} on {kind} set"
        for line in console.evaluation_lines(prefix, losses, suffix):
            say(line)
        ppl = self._flags.log_validation_ppl_to_tensorboard
        self._add(evaluation.scalars(losses, kind, suffix, ppl=ppl), iteration, consumed)
        told = {"iteration": iteration, "consumed": consumed}
        self._write("evaluation", told | {"set": kind + suffix, "losses": losses})

    def probes(
        self, results: Mapping[str, Mapping[str, float]], iteration: int, consumed: int
    ) -> None:
        """What probes came to."""
        for name, told in results.items():
            values = " | ".join(f"{what}: {value:.6E}" for what, value in told.items())
            say(f" probe {name} at iteration {iteration} | {values}")
        self._add(probes.scalars(results), iteration, consumed)
        told_of = {"iteration": iteration, "consumed": consumed}
        self._write("probe", told_of | {"probes": results})

    def verdict(self, verdict: Verdict) -> None:
        """The guard's."""
        say(f" guard: {verdict}")
        self._write("verdict", asdict(verdict))

    def back(self, iteration: int, consumed: int) -> None:
        """The guard has gone back to where so many steps were finished, and samples consumed. Later steps come
        again, and neither they nor their time count."""
        self._steps = [one for one in self._steps if one[0].iteration <= iteration]
        self._spent = self._steps[-1][1] if self._steps else 0.0
        self.begin()
        for sink in self._sinks:
            sink.back(iteration, consumed)

    def flush(self) -> None:
        """Write what waits."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Write what waits, and end."""
        for sink in self._sinks:
            sink.close()
        if self._metrics is not None:
            self._metrics.close()

    def _line(self) -> None:
        phases = self._clock.take()  # with the time, so that phases add up to the steps
        flags, steps = self._flags, [step for step, _ in self._steps]
        last, tally = steps[-1], reduce(Tally.add, steps, Tally())
        tokens = sum(step.batch_size for step in steps) * self._seq_length
        speed = report.speed(
            self._spent, tally.steps, tokens,
            flops=self._flops, devices=self._devices, peak=self._peak,
        )  # fmt: skip
        line = console.log_line(
            last, tally, speed, datetime.now(), iterations=self._iterations,
            throughput=flags.log_throughput, mfu=self._mfu,
        )  # fmt: skip
        say(line)
        if flags.log_timers_to_tensorboard:
            found = {"iteration-time": speed.seconds, "throughput": speed.throughput}
            self._add(found, last.iteration)
        if self._mfu:
            self._add(speed.shares, last.iteration)
        told = report.metrics(last, tally, speed)
        self._write("step", {**told, "iterations": self._iterations})
        if used := memory.of_device(self._device):
            if flags.log_memory_to_tensorboard:
                self._add(memory.scalars(used), last.iteration)
            self._write("memory", {"iteration": last.iteration, **asdict(used)})
        if phases:
            say(phase_line(phases))
            self._write("phases", {"iteration": last.iteration, "phases": phases})

    def _scalars(self, step: Step) -> dict[str, float]:
        found, flags = report.scalars(step), self._flags
        if not flags.log_loss_scale_to_tensorboard:
            del found["loss-scale"]
        if not flags.log_world_size_to_tensorboard:
            del found["world-size"]
        return found

    def _add(
        self, values: Mapping[str, float], iteration: int, consumed: int | None = None
    ) -> None:
        for sink in self._sinks:
            sink.add(values, iteration, consumed)

    def _write(self, kind: str, values: Mapping[str, object]) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, values)

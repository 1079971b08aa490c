"""Megatron's timers, for scripts that were written with them: `get_timers()('forward', log_level=1).start()`.

They wait for the device at each start and stop, so they cost time: the levels say which ones run at all.
What a step's time goes to without waiting is told by `phases.py`.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from elastic.proto.errors import UsageError

Option = Literal["max", "minmax", "all"]
HIGHEST_LEVEL = 2


class Timer:
    """Adds up what passes between start and stop, in seconds."""

    def __init__(self, name: str, *, runs: bool = True) -> None:
        """runs: a timer above the level that is measured does nothing, and has no time."""
        self.name, self._runs = name, runs
        self._group: dist.ProcessGroup | None = None
        self._since: float | None = None
        self._elapsed = self._active = 0.0

    def set_barrier_group(self, barrier_group: dist.ProcessGroup) -> None:
        """Who waits for one another with `barrier`; by default all ranks."""
        self._group = barrier_group

    def start(self, barrier: bool = False) -> None:
        """barrier: wait first until all ranks of the group are here."""
        if not self._runs:
            return
        if self._since is not None:
            raise UsageError(f"timer {self.name} was started and not stopped")
        self._since = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        if not self._runs:
            return
        if self._since is None:
            raise UsageError(f"timer {self.name} is stopped and was not started")
        passed = self._now(barrier) - self._since
        self._elapsed += passed
        self._active += passed
        self._since = None

    def reset(self) -> None:
        self._elapsed, self._since = 0.0, None

    def set_elapsed(self, value: float) -> None:
        self._elapsed = value

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds so far; a timer that runs goes on."""
        if not self._runs:
            raise UsageError(f"timer {self.name} has no time: raise --timing-log-level")
        started = self._since is not None
        if started:
            self.stop(barrier)
        found = self._elapsed
        if reset:
            self.reset()
        if started:
            self.start(barrier)
        return found

    def active_time(self) -> float:
        """Seconds since it was made, whatever was reset."""
        return self._active

    def _now(self, barrier: bool) -> float:
        if barrier and dist.is_initialized():
            dist.barrier(group=self._group)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return time.perf_counter()


class Timers:
    """A program's timers by name."""

    def __init__(self, log_level: int = 0, log_option: Option = "minmax") -> None:
        """log_level: of timers that run at most, 0 to 2; log_option: of which ranks times are told."""
        self._level, self._option = log_level, log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name, made at its first call; without a level it has the highest."""
        if name not in self._timers:
            level = HIGHEST_LEVEL if log_level is None else log_level
            if not 0 <= level <= HIGHEST_LEVEL:
                raise UsageError(f"timer {name}: levels go up to {HIGHEST_LEVEL}, not {level}")
            self._timers[name] = Timer(name, runs=level <= self._level)
            self._levels[name] = level
        elif log_level not in (None, self._levels[name]):
            raise UsageError(f"timer {name} has level {self._levels[name]}, not {log_level}")
        return self._timers[name]

    def log(
        self,
        names: Sequence[str],
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print their times on one rank, by default 0; all ranks call it, with the same names.

        normalizer: what times are divided by, such as the steps that they are of.
        """
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        if text is not None and _rank() == (rank or 0):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def get_all_timers_string(
        self,
        names: Sequence[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> str | None:
        """What `log` prints; None where no rank has a time. Without names, of all."""
        names = list(self._timers) if names is None else names
        times = self._gathered(names, reset, barrier)
        return summary(names, times, self._option, normalizer)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """The points that `slowest` tells, on ranks whose `writer` is not None."""
        for tag, seconds in self.slowest(names, normalizer, reset, barrier).items():
            if writer is not None:
                writer.add_scalar(tag, seconds, iteration)

    def slowest(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> dict[str, float]:
        """`NAME-time` of the slowest rank in seconds, where one has a time; all ranks call it, with the same names."""
        times = [
            max(of_ranks) for of_ranks in zip(*self._gathered(names, reset, barrier), strict=True)
        ]
        return {
            f"{name}-time": most / normalizer
            for name, most in zip(names, times, strict=True)
            if most > 0
        }

    def _gathered(self, names: Sequence[str], reset: bool, barrier: bool) -> list[list[float]]:
        """Seconds [world, names]; 0 where a rank has no such timer."""
        mine = [
            self._timers[name].elapsed(reset)
            if self._levels.get(name, HIGHEST_LEVEL + 1) <= self._level
            else 0.0
            for name in names
        ]
        if not dist.is_initialized() or not names:
            return [mine]
        if barrier:
            dist.barrier()
        device = "cuda" if "nccl" in dist.get_backend() else "cpu"
        times = torch.zeros(dist.get_world_size(), len(names), dtype=torch.float64, device=device)
        times[dist.get_rank()] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(times)
        return times.tolist()


def summary(
    names: Sequence[str], times: Sequence[Sequence[float]], option: Option, normalizer: float = 1.0
) -> str | None:
    """Megatron's lines for times in seconds [world, names]; a time of 0 is none."""
    lines = []
    for number, name in enumerate(names):
        told = {rank: row[number] * 1e3 / normalizer for rank, row in enumerate(times)}
        told = {rank: time_ for rank, time_ in told.items() if time_ > 0}
        if not told:
            continue
        dotted = f"    {name + ' ':.<48}: "
        if option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {time_:.2f}" for rank, time_ in told.items()]
        elif option == "max":
            lines.append(f"{dotted}{max(told.values()):.2f}")
        else:
            lines.append(f"{dotted}({min(told.values()):.2f}, {max(told.values()):.2f})")
    whose = {"all": "times", "max": "max time", "minmax": "(min, max) time"}[option]
    return "\n".join([f"{whose} across ranks (ms):", *lines]) if lines else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

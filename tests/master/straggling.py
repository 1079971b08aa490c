"""A synchronous job whose ranks take time as ranks do, for `stragglers.decide`: numbers of a seed.

Noise: each rank is a little faster or slower than others for good, each step jitters (lognormal), now and then one takes
ten times as long; a job warms up, each rank by its own amount, and saves a checkpoint at times. Stages of a pipeline
compute for different times. Everybody waits for the slowest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic.master.intervals import Report, Seat, Times
from elastic.master.stragglers import Decision, Policy, State, decide

STEPS = 10
"""Of an interval."""
OUTLIER = 1e-3
"""How likely a rank takes ten times as long in a step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    ranks: int = 8
    a_node: int = 8
    """Ranks."""
    stages: int = 1
    """Of a pipeline, next to one another."""
    seed: int = 0
    lasting: float = 0.01
    """Deviation of ranks from one another, for good."""
    jitter: float = 0.03
    """Deviation of a step."""
    transfers: float = 0.1
    """Seconds that each step's take."""
    intervals: int = 40
    slow: tuple[tuple[int, float], ...] = ()
    """Ranks, and what their compute takes more, as a part."""
    since: int = 0
    """Intervals before they are slow, and transfers, too."""
    slow_groups: tuple[tuple[str, float], ...] = ()
    """Groups, and seconds that their transfers take more."""

    @property
    def seats(self) -> dict[int, Seat]:
        """A group: the ranks of a stage."""
        return {
            rank: Seat(
                node=f"n{rank // self.a_node}",
                peers=f"stage {rank % self.stages}",
                group=f"stage {rank % self.stages}",
            )
            for rank in range(self.ranks)
        }

    def reports(self) -> Iterator[tuple[float, Report]]:
        """Each with the job time of its end."""
        random, now, seats = np.random.default_rng(self.seed), 0.0, self.seats
        stage = np.arange(self.ranks) % self.stages
        base = 1 + 0.4 * (stage == 0) + 0.2 * (stage == self.stages - 1)
        base = base * (1 + self.lasting * random.standard_normal(self.ranks))
        warming = 0.3 * random.random(self.ranks)
        for interval in range(self.intervals):
            compute = base * np.exp(self.jitter * random.standard_normal((STEPS, self.ranks)))
            compute *= 1 + warming * np.exp(-interval / 1.5)
            compute = np.where(random.random(compute.shape) < OUTLIER, 10 * compute, compute)
            transfers = self.transfers * np.exp(0.1 * random.standard_normal((STEPS, self.ranks)))
            if interval >= self.since:
                for rank, more in self.slow:
                    compute[:, rank] *= 1 + more
                for group, seconds in self.slow_groups:
                    transfers[:, [seat.group == group for seat in seats.values()]] += seconds
            if interval % 5 == 4:
                compute[-1] += 2.0  # a checkpoint
            times, took = _medians(compute, transfers, stage)
            now += took
            step = (interval + 1) * STEPS
            yield now, Report(round=1, step=step, seats=seats, times=times)

    def decisions(self, policy: Policy | None = None) -> Iterator[Decision]:
        state = State()
        for now, report in self.reports():
            decision = decide(state, report, now, policy or Policy())
            state = decision.state
            yield decision


def _medians(
    compute: NDArray[np.float64], transfers: NDArray[np.float64], stage: NDArray[np.int64]
) -> tuple[dict[int, Times], float]:
    """What is told of an interval's steps, and how long they took: who has to wait ends when all do. In its group a rank
    waits for its stage."""
    steps = compute.max(axis=1, keepdims=True)
    waiting = steps - compute + transfers
    slowest = np.empty_like(compute)
    for one in range(int(stage.max()) + 1):
        slowest[:, stage == one] = compute[:, stage == one].max(axis=1, keepdims=True)
    least = (slowest - compute + transfers).min(axis=0)
    told = np.stack((np.median(compute, axis=0), np.median(waiting, axis=0), least))
    times = {
        rank: Times(compute=mine, waiting=waits, least=little)
        for rank, (mine, waits, little) in enumerate(told.T.tolist())
    }
    return times, float((steps + transfers.max(axis=1, keepdims=True)).sum())


def found(job: Job, policy: Policy | None = None) -> tuple[int | None, set[tuple[int, ...]]]:
    """Intervals after which what is slow is named, each of it and nothing else, counted from when it is; and all
    ranks that were ever named."""
    wanted = {rank for rank, _ in job.slow}
    when, named = None, set()
    for number, decision in enumerate(job.decisions(policy), 1):
        ranks = {rank for one in decision.verdicts for rank in one.ranks}
        named |= {one.ranks for one in decision.verdicts}
        if when is None and ranks == wanted:
            when = number - job.since
    return when, named

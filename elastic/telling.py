"""What a master tells in `status.job` of training, checkpoint and failures, from what it knows. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic.master.launcher import Saved
from elastic.master.ledger import Ledger
from elastic.proto.elasticjob import JobState, PodFailure, Snapshots, Training

NEAR = 60.0
"""Seconds at most between a pod's end, as its launcher saw it, and the interruption that the master made of it."""


def resting(said: JobState, before: JobState) -> JobState:
    """With what stays so while nobody serves; no memory does."""
    return replace(
        said,
        restarts=before.restarts,
        productive_seconds=before.productive_seconds,
        training=before.training,
        checkpoint=replace(before.checkpoint, memory_step=None),
    )


def timed(
    found: Sequence[PodFailure], ledger: Ledger | None, began: float
) -> tuple[PodFailure, ...]:
    """With the downtime of the interruption that each made: the nearest. began: job time 0, in seconds of Unix."""
    breaks = () if ledger is None else ledger.interruptions
    known: list[PodFailure] = []
    for one in found:
        near = [each for each in breaks if abs(began + each.at - one.time) <= NEAR]
        if one.downtime_seconds is None and near:
            made = min(near, key=lambda each: abs(began + each.at - one.time))
            one = replace(one, downtime_seconds=_rounded(made.downtime))
        known.append(one)
    return tuple(known)


def training(step: int, stepped_at: float | None, metrics: Mapping[str, Any]) -> Training:
    """metrics: what the script said of its newest step, which may be anything."""
    losses = metrics.get("losses")
    return Training(
        step=step,
        stepped_at=stepped_at,
        loss=_rounded(next(iter(losses.values()), None) if isinstance(losses, dict) else None),
        tokens_per_second=_rounded(metrics.get("tokens_per_second")),
        mfu=_rounded(metrics.get("mfu")),
    )


def snapshots(saved: Saved, before: Snapshots, now: float) -> Snapshots:
    """before: as it was said last; what is new on storage is so since now."""
    at = before.persisted_at
    if saved.storage is None:
        return replace(before, memory_step=saved.memory)
    if saved.storage != before.persisted_step:
        at = None if before.persisted_step is None and saved.memory is None else now
    return Snapshots(memory_step=saved.memory, persisted_step=saved.storage, persisted_at=at)


def _rounded(value: Any) -> float | None:
    """As JSON and people take it; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(f"{value:.6g}")

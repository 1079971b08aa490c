"""What a master tells in `status.job` of training, time, checkpoint and failures, from what it knows. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic.master.launcher import Saved
from elastic.master.ledger import STOPPED, Interruption, Ledger, closed, goodput
from elastic.master.recovery import Cause
from elastic.master.state import Job
from elastic.proto.elasticjob import JobState, PodFailure, Snapshots, Training
from elastic.proto.ending import Ended, Ending
from elastic.proto.errors import ElasticError, ProtocolMismatch, UsageError

NEAR = 60.0
"""Seconds at most between a pod's end, as its launcher saw it, and the interruption that the master made of it."""

_NAMES, _MANY = re.compile(r"[a-z0-9]+(?:[-.][a-z0-9]+)*"), re.compile(r" and \d+ more\b")


def resting(said: JobState, before: JobState) -> JobState:
    """With what stays so while nobody serves; no memory does."""
    return replace(
        said,
        round=before.round,
        restarts=before.restarts,
        productive_seconds=before.productive_seconds,
        lost_seconds=before.lost_seconds,
        goodput=before.goodput,
        training=before.training,
        checkpoint=replace(before.checkpoint, memory_step=None),
    )


def timed(
    found: Sequence[PodFailure], ledger: Ledger | None, began: float
) -> tuple[PodFailure, ...]:
    """With the downtime of the interruption that each made: the nearest that is not another's. began: job time 0, in
    seconds of Unix."""
    breaks = [] if ledger is None else [(each, _named(each)) for each in ledger.interruptions]
    others = {one.pod for one in found}
    known: list[PodFailure] = []
    for one in found:
        near = [
            each
            for each, names in breaks
            if abs(began + each.at - one.time) <= NEAR
            and (one.pod in names or (each.cause != Cause.GROWTH and names.isdisjoint(others)))
        ]
        if one.downtime_seconds is None and near:
            made = min(near, key=lambda each: abs(began + each.at - one.time))
            one = replace(one, downtime_seconds=_rounded(made.downtime))
        known.append(one)
    return tuple(known)


def begun(job: Job) -> bool:
    """Ranks have trained in this attempt: a journal tells of those before it, too."""
    last = job.ledger.interruptions[-1:]
    resumed = bool(last) and last[0].cause == STOPPED
    return job.round is not None and (job.round.standing or not resumed)


def booked(said: JobState, job: Job, now: float) -> JobState:
    """With where the seconds went, as `elasticctl status` has it; those before ranks train only once they do, so that
    nothing is to be written of a job that waits. now: job time."""
    counts = job.result is None and begun(job)
    ledger = closed(job.ledger, now) if counts else job.ledger
    return replace(
        said,
        productive_seconds=round(ledger.productive, 1),
        lost_seconds={str(cause): round(seconds, 1) for cause, seconds in ledger.lost.items()},
        goodput=round(goodput(ledger), 3) if ledger.productive else None,
    )


def last_words(state: JobState | None) -> Ending:
    """Of a life that served to the job's end, or until another took over."""
    if state is None or state.state != "Ended":
        return Ending(kind=Ended.STOPPED, reason="another master serves this job")
    known = {str(kind) for kind in Ended}
    usual = Ended.FINISHED if state.outcome == "Succeeded" else Ended.USER_ERROR
    kind = Ended(state.reason) if state.reason in known else usual
    return Ending(kind=kind, reason=state.message, step=state.training.step)


def of_error(error: ElasticError) -> Ending:
    """Of a life that could not serve."""
    kind = Ended.USAGE if isinstance(error, UsageError) else Ended.STOPPED
    if isinstance(error, ProtocolMismatch):
        kind = Ended.REFUSED
    return Ending(kind=kind, reason=str(error))


def _named(each: Interruption) -> frozenset[str]:
    """Pods, among other words; none where there are too many to be named."""
    return frozenset() if _MANY.search(each.reason) else frozenset(_NAMES.findall(each.reason))


def stepped(
    known: tuple[int, float | None] | None, before: Training, ledger: Ledger, now: float
) -> tuple[int, float | None]:
    """The last step, and when it was seen to be finished: what a journal tells first is as old as what was said before.

    A script that tells no numbers finishes some while it steps.
    """
    if known is None:
        return ledger.step, before.stepped_at
    news = ledger.step != known[0] or (ledger.stepping and not ledger.step)
    return (ledger.step, now) if news else known


def training(step: int, stepped_at: float | None, metrics: Mapping[str, Any]) -> Training:
    """metrics: what the script said of its newest step, which may be anything."""
    losses = metrics.get("losses")
    total, at = (_count(metrics.get(name)) for name in ("iterations", "iteration"))
    left = total - at if 0 < at <= total else None
    pace = _rounded(metrics.get("seconds"))
    pace = None if pace is None or pace < 0 else pace
    return Training(
        step=step,
        stepped_at=stepped_at,
        loss=_rounded(next(iter(losses.values()), None) if isinstance(losses, dict) else None),
        tokens_per_second=_rounded(metrics.get("tokens_per_second")),
        mfu=_rounded(metrics.get("mfu")),
        total_steps=None if left is None else total,
        eta_seconds=None if left is None or pace is None else _rounded(round(left * pace, 1)),
    )


def snapshots(saved: Saved, before: Snapshots, now: float) -> Snapshots:
    """before: as it was said last; what is new on storage is so since now."""
    at = before.persisted_at
    if saved.storage is None:
        return replace(before, memory_step=saved.memory)
    if saved.storage != before.persisted_step:
        at = None if before.persisted_step is None and saved.memory is None else now
    return Snapshots(memory_step=saved.memory, persisted_step=saved.storage, persisted_at=at)


def _count(value: Any) -> int:
    """0 for what is none."""
    return value if type(value) is int and 0 < value < 1 << 53 else 0


def _rounded(value: Any) -> float | None:
    """As JSON and people take it; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(f"{value:.6g}")

"""Where the seconds went: productive, or lost and to what. Pure.

A second is productive when, after it, a step was finished that had not been finished before.
Everything else is charged to the cause of the interruption that it belongs to: the time since the
last finished step, standing still, and computing steps a second time. Where the script does not
tell its step numbers, all time between a round's first step and its end counts as productive.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

START = "start"
"""The cause to which the time before the first step is charged."""

STOPPED = "stopped"
"""The cause to which the time is charged in which nothing of the job ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    cause: str
    reason: str
    at: float
    """Job time in seconds."""
    downtime: float | None = None
    """Seconds to the first finished step afterwards; None: none yet."""
    step_before: int = 0
    """Last step finished before it, where the script tells."""
    step_after: int = 0
    """First step finished after it."""
    nodes: tuple[str, ...] = ()
    """Whose loss it was, as far as nobody has told another cause since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    began: float = 0.0
    cause: str = START
    """What time is charged to now; empty while productive."""
    since: float = 0.0
    productive: float = 0.0
    lost: Mapping[str, float] = field(default_factory=dict[str, float])
    restarts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Interruptions by cause."""
    interruptions: tuple[Interruption, ...] = ()
    """The last of them, oldest first."""
    stepping: bool = False
    """Steps are being finished since the last interruption."""
    step: int = 0
    """The last finished step, where the script tells."""
    high_water: int = 0
    """The highest step ever finished."""


KEEP = 200
"""Interruptions kept one by one."""


def interrupted(
    ledger: Ledger, cause: str, reason: str, now: float, nodes: tuple[str, ...] = ()
) -> Ledger:
    """A round ended before its time."""
    ledger = closed(ledger, now, cause)
    record = Interruption(cause=cause, reason=reason, at=now, step_before=ledger.step, nodes=nodes)
    return replace(
        ledger,
        cause=cause,
        stepping=False,
        restarts={**ledger.restarts, cause: ledger.restarts.get(cause, 0) + 1},
        interruptions=(*ledger.interruptions, record)[-KEEP:],
    )


def excused(ledger: Ledger, node: str, cause: str, reason: str) -> Ledger:
    """A node whose loss interrupted the job was taken away. Seconds that were charged by now stay where they are."""
    found = next((each for each in ledger.interruptions if node in each.nodes), None)
    if found is None:
        return ledger
    left = tuple(name for name in found.nodes if name != node)
    told = replace(found, nodes=left)
    restarts = dict(ledger.restarts)
    if not left:
        told = replace(told, cause=cause, reason=reason)
        restarts[found.cause] -= 1
        restarts[cause] = restarts.get(cause, 0) + 1
    is_last = found is ledger.interruptions[-1] and ledger.cause == found.cause
    return replace(
        ledger,
        cause=told.cause if is_last else ledger.cause,
        restarts={name: count for name, count in restarts.items() if count},
        interruptions=tuple(told if each is found else each for each in ledger.interruptions),
    )


def progressed(ledger: Ledger, step: int, now: float) -> Ledger:
    """A step was finished; `step` is its number, or 0 where the script does not tell."""
    new_ground = step > ledger.high_water or ledger.high_water == 0
    ledger = _charge(ledger, now, "" if ledger.stepping and new_ground else ledger.cause)
    ledger = _recovered(ledger, step, now)
    return replace(
        ledger,
        cause="" if new_ground else ledger.cause,
        stepping=True,
        step=step or ledger.step,
        high_water=max(ledger.high_water, step),
    )


def _recovered(ledger: Ledger, step: int, now: float) -> Ledger:
    """Complete the last interruption, whose step's number may be told a little after the step, and those before it
    that no step came after: another followed too soon."""
    if not ledger.interruptions:
        return ledger
    last = ledger.interruptions[-1]
    if last.downtime is not None and (last.step_after or not step):
        return ledger
    done = [
        replace(one, downtime=now - one.at, step_after=step) if one.downtime is None else one
        for one in ledger.interruptions
    ]
    if last.downtime is not None:
        done[-1] = replace(last, step_after=step)
    return replace(ledger, interruptions=tuple(done))


def closed(ledger: Ledger, now: float, cause: str = "") -> Ledger:
    """Time stops here; a step that `cause` cut short was not finished, so its time is lost."""
    cut_short = cause and not ledger.cause and ledger.step
    return _charge(ledger, now, cause if cut_short else ledger.cause)


def goodput(ledger: Ledger) -> float:
    """Productive seconds over all seconds, 0 to 1."""
    total = ledger.productive + sum(ledger.lost.values())
    return ledger.productive / total if total > 0 else 0.0


def _charge(ledger: Ledger, now: float, cause: str) -> Ledger:
    """The seconds since the last charge; an empty cause: they were productive."""
    seconds = max(0.0, now - ledger.since)
    since = max(now, ledger.since)
    if not cause:
        return replace(ledger, productive=ledger.productive + seconds, since=since)
    lost = {**ledger.lost, cause: ledger.lost.get(cause, 0.0) + seconds}
    return replace(ledger, lost=lost, since=since)

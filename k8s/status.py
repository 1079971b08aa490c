"""What the operator says of a job in its status: conditions, phase, reason, counts. Pure.

Every condition is always there. Whoever reads them needs no history: each says what is so now, since when, and of
which generation of the spec.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal

from elastic.k8s import causes
from elastic.k8s.observed import Member
from elastic.proto import schema
from elastic.proto.elasticjob import ROLE_LABEL, UID_LABEL, Accepted, JobState

STALE = 600.0
"""Seconds without a finished step after which a job does not count as training."""


LATELY = 600.0
"""Seconds for which a pod's failure is news."""


class Kind(StrEnum):
    """Types of conditions."""

    ACCEPTED = "Accepted"
    QUOTA = "QuotaReserved"
    SCHEDULED = "Scheduled"
    READY = "Ready"
    TRAINING = "Training"
    DEGRADED = "Degraded"
    RESIZING = "Resizing"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Phase(StrEnum):
    """All of it in one word."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESIZING = "Resizing"
    RECOVERING = "Recovering"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Reason(StrEnum):
    """The operator's own; the others are of `proto/ending.py` and `k8s/causes.py`."""

    ACCEPTED = "SpecAccepted"
    INVALID = "InvalidSpec"
    EDIT = "EditRefused"
    TEMPLATE = "InvalidPodTemplate"
    CHECKING = "Checking"
    QUOTA = "QuotaExceeded"
    REFUSED = "PodRefused"
    UNREADABLE = "StatusUnreadable"
    LACKS = "NotCreated"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE = "ImagePullFailed"
    MASTER = "MasterLost"
    DEADLINE = "DeadlineExceeded"
    SCALED = "Scaled"
    FEWER = "FewerThanWanted"
    AVOIDING = "AvoidsNodes"
    SAVING = "Saving"
    ASKED = "AsAsked"
    PREEMPTED = "Preempted"
    NO_STEP = "NoStep"
    WAITING = "Waiting"
    SO = "AsItIs"
    """Where there is no more to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = Reason.WAITING
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterRecord:
    """Whom the job has as its master, and how often it was started anew."""

    pod: str = ""
    restarts: int = 0
    """Of containers and of pods, in all."""
    carried: int = 0
    """Of those: by pods before this one."""
    step: int = 0
    """The last that was seen finished; 1 for a script that tells no numbers."""
    restarts_at_step: int = 0
    """`restarts` at that time: what came after counts toward master.maxRestarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The operator's part of a status."""

    observed_generation: int = 0
    phase: str = ""
    reason: str = ""
    """One word: why the job does not train; empty: it does, or nothing hinders it."""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    replicas: int = 0
    """Worker pods that are there."""
    ready_replicas: int = 0
    """Of those: whose agent has joined."""
    desired_replicas: int = 0
    selector: str = ""
    """Of the worker pods, for the scale subresource."""
    start_time: str | None = None
    """When it was to run: the first time, or once it was resumed before any step."""
    completion_time: str | None = None
    active_seconds: float = 0.0
    """In which ranks trained, up to the last pause: activeDeadlineSeconds is of these."""
    active_since: float | None = None
    """In seconds of Unix; None: no rank trains."""
    master: MasterRecord = field(default_factory=MasterRecord)
    accepted: Accepted | None = None

    def condition(self, kind: Kind) -> Condition | None:
        return next((one for one in self.conditions if one.type == kind), None)

    def holds(self, kind: Kind) -> bool:
        return (found := self.condition(kind)) is not None and found.status == "True"

    @property
    def refused_by_a_quota(self) -> bool:
        """Something that the job needs, or pods."""
        found = self.condition(Kind.QUOTA)
        return found is not None and found.status == "False" and is_quota(found.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A condition of now, without its history."""

    so: bool | None
    """None: unknown."""
    reason: str = Reason.SO
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """From which all is derived."""

    accepted: Accepted | None
    acceptance: Verdict
    state: JobState | None
    """The master's; None: it has said nothing in this attempt."""
    workers: tuple[Member, ...]
    master: Member | None
    replicas: int
    """That are wanted."""
    suspended: bool
    preempted: bool
    """Its queue suspended it once it had run."""
    over: "Over | None"
    refused: str
    """Why the master's pod cannot be made, in the server's words."""
    lacks: str = ""
    """Why something else that it needs cannot."""
    garbled: str = ""
    """Why what its master says cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    failed: bool
    reason: str
    message: str = ""


def stamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_SAID: Mapping[bool | None, Literal["True", "False", "Unknown"]] = {
    True: "True", False: "False", None: "Unknown",
}  # fmt: skip


# --- conditions ----------------------------------------------------------------------------------


def conditions(facts: Facts, before: Told, generation: int, now: float) -> Iterator[Condition]:
    """All of them, in the order of `Kind`."""
    for kind, verdict in _verdicts(facts, before, now).items():
        status = _SAID[verdict.so]
        old = before.condition(kind)
        same = old is not None and old.status == status and old.last_transition_time
        yield Condition(
            type=kind,
            status=status,
            reason=verdict.reason,
            message=" ".join(verdict.message.split())[:1000],
            last_transition_time=old.last_transition_time if old and same else stamp(now),
            observed_generation=generation,
        )


def _verdicts(facts: Facts, before: Told, now: float) -> Mapping[Kind, Verdict]:
    state, over = facts.state, facts.over
    trains = state is not None and state.world_size > 0 and over is None
    recovering = _recovering(facts, trains)
    resizing = _resizing(facts, before)
    return {
        Kind.ACCEPTED: facts.acceptance,
        Kind.QUOTA: _quota(facts),
        Kind.SCHEDULED: _scheduled(facts),
        Kind.READY: _ready(facts, trains),
        Kind.TRAINING: _training(state, trains, now),
        Kind.DEGRADED: _degraded(facts, trains, resizing),
        Kind.RESIZING: resizing,
        Kind.RECOVERING: recovering,
        Kind.SUSPENDED: _suspended(facts),
        Kind.COMPLETE: _end(over, failed=False),
        Kind.FAILED: _end(over, failed=True),
    }


def _quota(facts: Facts) -> Verdict:
    if facts.lacks and facts.over is None:
        return Verdict(so=False, reason=Reason.LACKS, message=facts.lacks)
    refused = facts.refused or (facts.state.workers.refused if facts.state else "")
    if refused and facts.over is None:
        reason = Reason.QUOTA if is_quota(refused) else Reason.REFUSED
        return Verdict(so=False, reason=reason, message=refused)
    there = any(one.alive for one in facts.workers)
    return Verdict(so=True) if there else Verdict(so=None, reason=Reason.WAITING)


def is_quota(words: str) -> bool:
    """The server's, against something that there is no room for now; a legal one all the same."""
    return "exceeded quota" in words


def _scheduled(facts: Facts) -> Verdict:
    pending = facts.state.workers.pending if facts.state else ()
    if facts.over is not None or (facts.accepted and facts.accepted.wanted != "Run"):
        return Verdict(so=False, reason=Reason.ASKED)
    if facts.accepted is None:
        return Verdict(so=None, reason=Reason.WAITING)
    if pending:
        image = any(causes.of_an_image(words) for words in pending)
        reason = Reason.IMAGE if image else Reason.UNSCHEDULABLE
        return Verdict(so=False, reason=reason, message="; ".join(pending))
    if facts.master is not None and facts.master.waiting and not _crashes(facts.master):
        words = f"{facts.master.name}: {facts.master.waiting}"
        unplaced = facts.master.waiting.startswith(Reason.UNSCHEDULABLE)
        reason = Reason.UNSCHEDULABLE if unplaced else Reason.IMAGE
        return Verdict(so=False, reason=reason, message=words)
    placed = sum(one.phase == "Running" and not one.deleting for one in facts.workers)
    if placed >= facts.replicas:
        return Verdict(so=True)
    return Verdict(so=None, reason=Reason.WAITING, message=f"{placed} of {facts.replicas} pods run")


def _ready(facts: Facts, trains: bool) -> Verdict:
    if facts.over is not None:
        return Verdict(so=False, reason=facts.over.reason)
    if facts.garbled:
        return Verdict(so=None, reason=Reason.UNREADABLE, message=facts.garbled)
    return Verdict(so=trains)


def _training(state: JobState | None, trains: bool, now: float) -> Verdict:
    at = state.training.stepped_at if state is not None else None
    if not trains:
        return Verdict(so=False, reason=Reason.WAITING)
    if at is None:  # no step yet, or a script that tells of none
        return Verdict(so=None, reason=Reason.WAITING)
    if now - at > STALE:
        return Verdict(so=False, reason=Reason.NO_STEP, message=f"since {stamp(at)}")
    return Verdict(so=True)


def _degraded(facts: Facts, trains: bool, resizing: Verdict) -> Verdict:
    state = facts.state
    if state is None or not trains:
        return Verdict(so=False)
    if state.workers.ready < facts.replicas and not resizing.so:
        words = f"{state.workers.ready} of {facts.replicas} pods train"
        return Verdict(so=True, reason=Reason.FEWER, message=words)
    if state.avoided_nodes:
        words = ", ".join(one.node for one in state.avoided_nodes)
        return Verdict(so=True, reason=Reason.AVOIDING, message=words)
    return Verdict(so=False)


def _resizing(facts: Facts, before: Told) -> Verdict:
    """From an edit of the number until that many train, or it is known that they cannot."""
    state, accepted = facts.state, facts.accepted
    if state is None or accepted is None or accepted.wanted != "Run" or facts.over is not None:
        return Verdict(so=False)
    asked = before.accepted is not None and 0 < before.desired_replicas != facts.replicas
    if not (asked or before.holds(Kind.RESIZING)) or _starts(state):
        return Verdict(so=False)
    late = state.generation < accepted.generation
    if late or (state.workers.ready != facts.replicas and not state.workers.pending):
        words = f"{state.workers.ready} of {facts.replicas} pods train"
        return Verdict(so=True, reason=Reason.SCALED, message=words)
    return Verdict(so=False)


def _recovering(facts: Facts, trains: bool) -> Verdict:
    state, accepted = facts.state, facts.accepted
    if facts.over is not None or accepted is None or accepted.wanted != "Run":
        return Verdict(so=False)
    if facts.master is not None and _crashes(facts.master):
        words = f"{facts.master.name}: {facts.master.waiting}"
        return Verdict(so=True, reason=Reason.MASTER, message=words)
    if trains:
        return Verdict(so=False)
    if state is None:  # a master of this attempt has not come yet
        resumed = accepted.attempt > 1 and any(one.alive for one in facts.workers)
        resumed &= not facts.garbled
        return Verdict(so=True, reason=Reason.MASTER) if resumed else Verdict(so=False)
    if _starts(state):  # what failed before a suspend is over
        return Verdict(so=False)
    last = state.last_failures[-1:] or ()
    reason, words = next(((one.cause, one.reason) for one in last), (Reason.WAITING, ""))
    return Verdict(so=True, reason=reason, message=words)


def _starts(state: JobState) -> bool:
    """No round of this attempt has been."""
    return state.round == 0 or state.state == "Starting"


def _crashes(master: Member) -> bool:
    """It ran, and waits to be started again; ranks may train meanwhile."""
    return master.waiting.startswith("CrashLoopBackOff")


def _suspended(facts: Facts) -> Verdict:
    words = "its queue took its place back" if facts.preempted else ""
    if facts.suspended:
        reason = Reason.PREEMPTED if facts.preempted else Reason.ASKED
        return Verdict(so=True, reason=reason, message=words)
    if facts.accepted is not None and facts.accepted.wanted == "Suspend" and not facts.over:
        reason = Reason.PREEMPTED if facts.preempted else Reason.SAVING
        return Verdict(so=None, reason=reason, message=words)
    return Verdict(so=False)


def _end(over: Over | None, *, failed: bool) -> Verdict:
    if over is None or over.failed is not failed:
        return Verdict(so=False)
    return Verdict(so=True, reason=over.reason, message=over.message)


# --- in one word ---------------------------------------------------------------------------------


def phase(facts: Facts, told: tuple[Condition, ...], *, deleting: bool) -> Phase:
    on = {one.type for one in told if one.status == "True"}
    if facts.over is not None:
        return Phase.FAILED if facts.over.failed else Phase.SUCCEEDED
    if deleting:
        return Phase.STOPPING
    if facts.accepted is not None and facts.accepted.wanted == "Suspend":
        return Phase.SUSPENDED if facts.suspended else Phase.SUSPENDING
    for kind, found in (
        (Kind.RECOVERING, Phase.RECOVERING),
        (Kind.RESIZING, Phase.RESIZING),
        (Kind.READY, Phase.RUNNING),
    ):
        if kind in on:
            return found
    alive = any(one.phase == "Running" for one in facts.workers)
    return Phase.STARTING if alive or facts.state is not None else Phase.PENDING


def reason(facts: Facts, told: tuple[Condition, ...]) -> tuple[str, str]:
    """Of all that is not as it should be, what matters most; ("", ""): nothing."""
    if facts.over is not None:
        return facts.over.reason, facts.over.message
    by = {one.type: one for one in told}
    for kind, bad in (
        (Kind.ACCEPTED, "False"), (Kind.ACCEPTED, "Unknown"), (Kind.SUSPENDED, "True"), (Kind.SUSPENDED, "Unknown"),
        (Kind.QUOTA, "False"), (Kind.SCHEDULED, "False"), (Kind.READY, "Unknown"), (Kind.RECOVERING, "True"),
        (Kind.TRAINING, "False"),
    ):  # fmt: skip
        found = by[kind]
        quiet = found.reason in (Reason.WAITING, Reason.SO) or (
            found.reason == Reason.ASKED and kind is Kind.SCHEDULED
        )
        if found.status == bad and not quiet:
            return found.reason, found.message
    return "", ""


def unreadable(
    raw: Mapping[str, Any], words: str, generation: int, now: float
) -> dict[str, Any] | None:
    """What to put into a status that cannot be read; None: that is there. Nothing but these fields changes."""
    message = " ".join(words.split())[:1000]
    if (raw.get("reason"), raw.get("message")) == (Reason.UNREADABLE, message):
        return None
    kind, before = str(Kind.ACCEPTED), raw.get("conditions")
    others = [
        one
        for one in (before if isinstance(before, list) else [])
        if isinstance(one, Mapping) and one.get("type") != kind
    ]
    said = Condition(
        type=kind, status="Unknown", reason=Reason.UNREADABLE, message=message,
        last_transition_time=stamp(now), observed_generation=generation,
    )  # fmt: skip
    return {
        "reason": str(Reason.UNREADABLE),
        "message": message,
        "conditions": [schema.dump(said), *others],
    }


def selector(uid: str) -> str:
    return f"{UID_LABEL}={uid},{ROLE_LABEL}=worker"


# --- events --------------------------------------------------------------------------------------

_WARNS = {(Kind.ACCEPTED, "False"), (Kind.QUOTA, "False"), (Kind.RECOVERING, "True"), (Kind.FAILED, "True"),
          (Kind.SCHEDULED, "False"), (Kind.DEGRADED, "True")}  # fmt: skip
_TELLS = {(Kind.ACCEPTED, "True"), (Kind.READY, "True"), (Kind.RESIZING, "True"), (Kind.SUSPENDED, "True"),
          (Kind.COMPLETE, "True")}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One of Kubernetes', for `kubectl describe`."""

    reason: str
    note: str
    warns: bool
    at: str
    """When; also what tells it from the next of its kind."""


def events(before: Told, now: tuple[Condition, ...]) -> Iterator[Event]:
    """Of conditions that became what they were not."""
    for one in now:
        old, place = before.condition(Kind(one.type)), (Kind(one.type), one.status)
        if old is not None and (old.status, old.reason) == (one.status, one.reason):
            continue
        if place in _TELLS or (
            place in _WARNS and one.reason not in (Reason.ASKED, Reason.CHECKING)
        ):
            spoken = one.reason if place in _WARNS and one.reason != Reason.SO else one.type
            yield Event(
                reason=spoken,
                note=one.message or f"{one.type} is {one.status}",
                warns=place in _WARNS,
                at=one.last_transition_time,
            )


def failures(state: JobState | None, now: float) -> Iterator[Event]:
    """Of pods that failed lately."""
    for one in state.last_failures if state is not None else ():
        if now - one.time < LATELY:
            yield Event(
                reason=one.cause, note=f"{one.reason}: {one.action}", warns=True, at=stamp(one.time)
            )

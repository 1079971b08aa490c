"""What operator and master of an ElasticJob tell each other: in its status, each with a field manager of its own.

Both parts are states, not messages: whoever starts anew reads the newest and needs no other. Fields that a newer
neighbour added are left out when they are read; `format` counts changes that a neighbour cannot read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from elastic.proto import schema
from elastic.proto.errors import ProtocolMismatch
from elastic.proto.schema import Json

GROUP, VERSION, KIND, PLURAL = "elastic-runtime.dev", "v1alpha1", "ElasticJob", "elasticjobs"

JOB_LABEL = f"{GROUP}/job"
"""Name of the job that an object belongs to: for people."""
UID_LABEL = f"{GROUP}/job-uid"
"""Its uid: for us, together with an owner reference."""
ROLE_LABEL = f"{GROUP}/role"
"""master or worker."""
FINALIZER = f"{GROUP}/graceful-stop"
FORCE_DELETE = f"{GROUP}/force-delete"
"""Annotation: the job goes at once, whatever it has in memory only."""
MADE_FROM = f"{GROUP}/made-from"
"""Annotation of a master's pod: a hash of its manifest, by which another one is told."""

OPERATOR, MASTER = "elasticjob-operator", "elasticjob-master"
"""Field managers."""

PORT = 29400
"""Of the master, and of its Service."""

FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """`status.accepted`, by the operator: what the job is to be. No master serves by anything else."""

    format: int = FORMAT
    generation: int
    """Of the resource, whose spec this is; an edit that is refused does not come here."""
    spec: Json
    """With all defaults filled in."""
    wanted: Literal["Run", "Suspend", "Stop"] = "Run"
    """Suspend and Stop: ranks save and leave, then the worker pods go; after Stop nothing comes back."""
    attempt: int = 1
    """Counts masters that began without a journal, and resumes; epochs begin at `attempt << 16`."""
    master: str = ""
    """The pod whose master is meant; empty: none is to run, or an operator that names none has accepted it."""

    def names(self, pod: str) -> bool:
        """It is for a master in that pod; empty: its operator told it no name. Who names nobody means any."""
        return not self.master or not pod or self.master == pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Pods, spares left out where it does not say so."""

    desired: int = 0
    ready: int = 0
    """Whose agent is there."""
    waiting: int = 0
    """Of those: beyond what a legal world takes."""
    spares: int = 0
    """Hot spares that are ready."""
    pending: tuple[str, ...] = ()
    """Why pods cannot start, a sentence each; at most ten."""
    refused: str = ""
    """Why no pod could be made: the server's words (a quota, an admission)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    step: int = 0
    """The last one that was finished."""
    loss: float | None = None
    """This and the next four: where the script tells them in `metrics.jsonl`."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    total_steps: int | None = None
    """Of the whole run."""
    eta_seconds: float | None = None
    """From the newest of its steps to its last one, at their pace."""
    stepped_at: float | None = None
    """When, in seconds of Unix; None: no step yet in this round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    memory_step: int | None = None
    """The newest that is complete in memory; None: there is none, or no pod is left."""
    persisted_step: int | None = None
    """The newest on storage."""
    persisted_at: float | None = None
    """When that was heard of, in seconds of Unix; None: it was there when this job began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFailure:
    time: float
    """Seconds of Unix."""
    pod: str = ""
    node: str = ""
    rank: int | None = None
    exit_code: int | None = None
    cause: str
    action: str
    reason: str
    downtime_seconds: float | None = None
    """Until ranks finished a step again; None: not yet, or it interrupted nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvoidedNode:
    node: str
    cause: str = ""
    """In a word: HardwareFault, NodeLost, ..."""
    reason: str
    since: float = 0.0
    until: float
    """Both in seconds of Unix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectedNode:
    """It failed the job too seldom, so far, to be avoided."""

    node: str
    times: int
    until: float
    """Until when that is held against it, in seconds of Unix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What ended in a slot of worker pods before."""

    attempt: int = -1
    """The last one that is counted here."""
    oom_step: int | None = None
    """At which its last out-of-memory was."""
    crashes: int = 0
    """In a row, on one node."""
    crashed_on: str = ""
    """That node."""
    same: int = 0
    """How often in a row it ended by the error that it ended by last, with no step in between."""
    fingerprint: str = ""
    """Of that, in short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPast:
    slot: int
    past: Past


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """For the next master alone: what it counts by."""

    step: int = 0
    """The last one that was finished when it counted."""
    slots: tuple[SlotPast, ...] = ()
    """At most a hundred."""
    suspected: tuple[SuspectedNode, ...] = ()
    """At most fifty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """`status.job`, by the master: what the job is."""

    format: int = FORMAT
    generation: int
    """The `Accepted.generation` that it serves by."""
    attempt: int
    """Its `Accepted.attempt`."""
    state: Literal["Starting", "Running", "Suspending", "Suspended", "Stopping", "Ended"]
    outcome: Literal["", "Succeeded", "Failed", "Stopped"] = ""
    """Once it has ended."""
    reason: str = ""
    """One word: why it ended or does not run."""
    message: str = ""
    """The same as a sentence."""
    workers: Workers = field(default_factory=Workers)
    world_size: int = 0
    """Ranks that train; 0: none do."""
    round: int = 0
    restarts: int = 0
    """Rounds after the first."""
    restarts_counted: int = 0
    """Of those: toward failurePolicy.maxRestarts, since it last grew back."""
    productive_seconds: float = 0.0
    """In steps that were kept, in all attempts that the journal knows."""
    lost_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """The others, by what they were lost to."""
    goodput: float | None = None
    """Of all seconds those that were productive, 0 to 1; None: none was yet."""
    training: Training = field(default_factory=Training)
    checkpoint: Snapshots = field(default_factory=Snapshots)
    last_failures: tuple[PodFailure, ...] = ()
    """At most ten, oldest first."""
    avoided_nodes: tuple[AvoidedNode, ...] = ()
    """At most fifty."""
    remembered: Remembered = field(default_factory=Remembered)


def accepted(status: Mapping[str, Any]) -> Accepted | None:
    """Of a resource's status; None: the operator has accepted nothing yet. Raises ProtocolMismatch, FieldError."""
    return _read(Accepted, status.get("accepted"), "status.accepted")


def job_state(status: Mapping[str, Any]) -> JobState | None:
    """Of a resource's status; None: no master has said anything yet. Raises ProtocolMismatch, FieldError."""
    return _read(JobState, status.get("job"), "status.job")


def _read(kind: type[T], raw: Any, path: str) -> T | None:
    if raw is None:
        return None
    if isinstance(raw, Mapping) and raw.get("format", FORMAT) != FORMAT:
        raise ProtocolMismatch(
            f"{path} has format {raw['format']}, this release reads {FORMAT}: let operator and "
            "training image be of neighbouring versions"
        )
    return schema.load(kind, raw, path)

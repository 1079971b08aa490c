"""What is seen of a cluster, as small frozen data, from the API server's raw JSON. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elastic.proto.elasticjob import MADE_FROM, ROLE_LABEL

MAIN = "main"
"""Name of the container that trains; where there is none, it is the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A worker pod."""

    name: str
    uid: str
    slot: int
    """Its place among the job's pods; its name has it."""
    attempt: int
    """How many pods had that slot before it."""
    node: str = ""
    """Where it was put; empty: nowhere yet."""
    phase: str = "Pending"
    deleting: bool = False
    conditions: tuple[tuple[str, str, str], ...] = ()
    """Type, status and reason of each."""
    unschedulable: str = ""
    """The scheduler's words, where it found no place."""
    reason: str = ""
    """Of the whole pod: Evicted, NodeLost, ..."""
    message: str = ""
    waiting: str = ""
    """Why the container does not run: ImagePullBackOff, ..."""
    waiting_message: str = ""
    exit_code: int | None = None
    """The container's, once it has ended."""
    ended: str = ""
    """Kubernetes' reason for that: OOMKilled, Error, Completed, ..."""
    last_words: str = ""
    """What the container left in its termination log."""

    @property
    def over(self) -> bool:
        """Nothing of it runs, and nothing ever will."""
        return self.phase in ("Succeeded", "Failed") or self.exit_code is not None

    @property
    def alive(self) -> bool:
        """It runs or will, and nobody takes it away."""
        return not self.over and not self.deleting


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Any pod of a job, the master's too, as far as the operator looks at it."""

    namespace: str
    name: str
    uid: str
    job: str
    """The job's uid."""
    role: str
    phase: str
    deleting: bool
    restarts: int
    """Of its container, in place."""
    waiting: str
    """Why its container does not run, and the words for it."""
    made_from: str
    """What its manifest was made from, in short."""

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def alive(self) -> bool:
        return not self.over and not self.deleting


def member(raw: Mapping[str, Any]) -> Member:
    meta, status = raw.get("metadata") or {}, raw.get("status") or {}
    owners = (one for one in meta.get("ownerReferences") or () if one.get("controller"))
    container = _main(status.get("containerStatuses") or ())
    waiting = (container.get("state") or {}).get("waiting") or {}
    held = f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")
    if waiting.get("reason") in (None, "ContainerCreating"):
        held = f"Unschedulable: {unplaced}" if (unplaced := _unplaced(status)) else ""
    return Member(
        namespace=meta.get("namespace", ""),
        name=meta.get("name", ""),
        uid=meta.get("uid", ""),
        job=next((one.get("uid", "") for one in owners), ""),
        role=(meta.get("labels") or {}).get(ROLE_LABEL, ""),
        phase=status.get("phase") or "Pending",
        deleting=bool(meta.get("deletionTimestamp")),
        restarts=int(container.get("restartCount") or 0),
        waiting=held,
        made_from=(meta.get("annotations") or {}).get(MADE_FROM, ""),
    )


def pod(raw: Mapping[str, Any], slot: int, attempt: int) -> Pod:
    """slot, attempt: as its labels say, which whoever made them reads."""
    meta, status = raw.get("metadata") or {}, raw.get("status") or {}
    conditions = tuple(
        (c.get("type", ""), c.get("status", ""), c.get("reason") or "")
        for c in status.get("conditions") or ()
    )
    container = _main(status.get("containerStatuses") or ())
    state = container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    if waiting.get("reason") == "PodInitializing":
        waiting = _of_init(status) or waiting
    return Pod(
        name=meta.get("name", ""),
        uid=meta.get("uid", ""),
        slot=slot,
        attempt=attempt,
        node=(raw.get("spec") or {}).get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        deleting=bool(meta.get("deletionTimestamp")),
        conditions=conditions,
        unschedulable=_unplaced(status),
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        waiting=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        exit_code=ended.get("exitCode"),
        ended=ended.get("reason") or "",
        last_words=ended.get("message") or "",
    )


def _unplaced(status: Mapping[str, Any]) -> str:
    """Why no node takes it, in the scheduler's words; empty: one does, or nobody has looked."""
    said: Mapping[str, Any] = next(
        (c for c in status.get("conditions") or () if c.get("type") == "PodScheduled"), {}
    )
    unplaced = said.get("status") == "False" and said.get("reason") == "Unschedulable"
    return (said.get("message") or "no node has room") if unplaced else ""


def _of_init(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Why the first of its init containers that waits does."""
    states = (one.get("state") or {} for one in status.get("initContainerStatuses") or ())
    return next((state["waiting"] for state in states if state.get("waiting")), None)


def seconds(stamp: str | None) -> float:
    """Of Unix; 0 where there is no time, or none that can be read."""
    try:
        return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
    except ValueError:
        return 0.0


def _main(statuses: Any) -> Mapping[str, Any]:
    named = [s for s in statuses if s.get("name") == MAIN]
    return next(iter([*named, *statuses]), {})

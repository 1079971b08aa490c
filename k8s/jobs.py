"""An ElasticJob as the operator sees it, from the API server's raw JSON. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.k8s.observed import Member, seconds
from elastic.k8s.pods import Owner
from elastic.k8s.spec import read as read_spec
from elastic.k8s.status import Told
from elastic.proto import elasticjob, schema
from elastic.proto.elasticjob import FORCE_DELETE, JobState
from elastic.proto.errors import ElasticError

ANOTHER = "Another release of the operator has written it: nothing is done about this job until one that can read it is back"
KUEUE = "kueue"
"""Its name as a field manager, or the beginning: its user agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A status of ours that cannot be read."""

    words: str
    status: Mapping[str, Any]
    """As it is, for what is to stay of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An ElasticJob as it is seen."""

    owner: Owner
    version: str
    """Of the object: a write that rests on it fails once it is another."""
    generation: int
    spec: Mapping[str, Any]
    finalizers: tuple[str, ...] = ()
    forced: bool = False
    deleted_at: float | None = None
    """In seconds of Unix; None: nobody deletes it."""
    queued: bool = False
    """Kueue wrote `spec.suspend` last."""
    told: Told = field(default_factory=Told)
    state: JobState | None = None
    garbled: str = ""
    """Why `state` is None though its master has said something."""
    unread: Unread | None = None
    """What we wrote of it ourselves cannot be read: `told` is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of the API server, to what was asked for this job before."""

    template: str | None = None
    """What it says of the worker's pod, by a dry run; empty: it takes it; None: not asked."""
    unasked: str = ""
    """Why it could not be asked that: a webhook of its own fails, say."""
    master: str = ""
    """Why it did not take the master's pod."""
    lacks: str = ""
    """Why something that the job needs beside its pods is not there."""
    taken: bool = False
    """Somebody else's pod has the name of the master's."""


def job(raw: Mapping[str, Any]) -> Job:
    meta, said = raw["metadata"], raw.get("status") or {}
    owner = Owner(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])
    notes = meta.get("annotations") or {}
    told, unread = Told(), None
    try:
        told = _told(said)
    except ElasticError as error:
        unread = Unread(words=f"{error}. {ANOTHER}", status=said)
    state, garbled = None, ""
    try:
        state = elasticjob.job_state(said)
    except ElasticError as error:
        garbled = str(error)
    return Job(
        owner=owner,
        version=meta.get("resourceVersion", ""),
        generation=int(meta.get("generation") or 0),
        spec=raw.get("spec") or {},
        finalizers=tuple(meta.get("finalizers") or ()),
        forced=notes.get(FORCE_DELETE, "").lower() == "true",
        deleted_at=seconds(meta["deletionTimestamp"]) if meta.get("deletionTimestamp") else None,
        queued=_is_queued(meta),
        told=told,
        state=state,
        garbled=garbled,
        unread=unread,
    )


def _told(said: Mapping[str, Any]) -> Told:
    """Raises FieldError, ProtocolMismatch: another release of ours wrote it."""
    accepted = elasticjob.accepted(said)  # which says of which format it is
    if accepted is not None:
        read_spec(accepted.spec)
    ours = {name: value for name, value in said.items() if name not in ("accepted", "job")}
    return replace(schema.load(Told, ours, "status"), accepted=accepted)


def _is_queued(meta: Mapping[str, Any]) -> bool:
    """By who owns the field; what Kueue says of the workload would need the right to read it."""
    return any(
        (name == KUEUE or name.startswith(f"{KUEUE}-"))
        and "f:suspend" in ((one.get("fieldsV1") or {}).get("f:spec") or {})
        for one in meta.get("managedFields") or ()
        if (name := one.get("manager") or "")
    )


def master_of(members: tuple[Member, ...], name: str) -> Member | None:
    return next((one for one in members if one.name == name and one.role == "master"), None)

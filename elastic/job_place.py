"""Which ElasticJob a master serves, and what its operator has accepted of it. Pure."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic.proto import elasticjob, env
from elastic.proto.elasticjob import Accepted, JobState
from elastic.proto.errors import ElasticError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The resource, as far as it matters here."""

    uid: str
    accepted: Accepted | None
    said: JobState | None = field(default=None, compare=False)
    """By the master before this one; what this one says changes nothing here."""
    refused: str = ""
    """Why `accepted` cannot be read: it is of a version too far."""
    deleted: bool = False
    """It is being deleted. It is to stop then, whatever its operator has said so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    namespace: str
    name: str
    """Of the resource: the run id, too."""
    folder: Path
    """For the journal."""
    address: str
    """host:port, as agents dial it."""
    listen: str = ""
    """host:port, where that is another."""
    pod: str = ""
    """Its own name; empty: the operator told none, and each `accepted` is obeyed."""


def seen(raw: Mapping[str, Any]) -> Seen:
    uid, status = raw["metadata"]["uid"], raw.get("status") or {}
    deleted = bool(raw["metadata"].get("deletionTimestamp"))
    said = None
    with contextlib.suppress(ElasticError):  # it was of another version: this one begins anew
        said = elasticjob.job_state(status)
    try:
        accepted = elasticjob.accepted(status)
    except ElasticError as error:
        return Seen(uid=uid, accepted=None, said=said, refused=str(error), deleted=deleted)
    if accepted is not None and deleted:
        accepted = replace(accepted, wanted="Stop")
    return Seen(uid=uid, accepted=accepted, said=said, deleted=deleted)


def place(environ: Mapping[str, str]) -> Place:
    """What `k8s/pods.py` tells the master's pod. Raises UsageError."""
    names = (env.MASTER_JOB, env.MASTER_ADDRESS, env.MASTER_IP, env.MASTER_FOLDER)
    if missing := [name for name in names if not environ.get(name)]:
        raise UsageError(
            f"{', '.join(missing)} not set: this program runs in the master pod of an ElasticJob"
        )
    namespace, _, name = environ[env.MASTER_JOB].partition("/")
    address, ip = environ[env.MASTER_ADDRESS], environ[env.MASTER_IP]
    port = address.rpartition(":")[2]
    return Place(
        namespace=namespace,
        name=name,
        folder=Path(environ[env.MASTER_FOLDER]),
        address=address,
        listen=f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
        pod=environ.get(env.MASTER_POD, ""),
    )

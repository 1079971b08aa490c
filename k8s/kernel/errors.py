"""What the API server, or the way to it, answers instead of an object.

ApiError                  status, reason and the server's own words
├── Unauthorized          401: it does not know who asks
├── Forbidden             403: a role, a quota, or an admission plugin says no
├── Absent                404
├── Conflict              409: written by another meanwhile
│   └── AlreadyExists     409: the name is taken
├── Gone                  410: so old a version is no longer known: list again
├── Invalid               400 or 422: the object is no legal one
├── Busy                  429: later, perhaps at a time told
├── Broken                5xx: its own failure; what was asked for may have been done
├── Unreachable           no answer in time, or none at all; likewise
└── Fenced                nobody was asked: this process may not write now
NoCluster                 neither a kubeconfig nor a pod's service account says where a cluster is
LeaseLost                 another has the lease, or it could not be renewed in time
"""

import json
from collections.abc import Mapping
from typing import Any

from elastic.proto.errors import ElasticError


class NoCluster(ElasticError):
    """Neither a kubeconfig nor a pod's service account says where a cluster is."""


class LeaseLost(ElasticError):
    """Another has the lease, or it could not be renewed in time."""


class ApiError(ElasticError):
    """The API server refused; `str()` of it is what it said."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; 0: there was no answer."""
        self.reason = reason
        """The server's word, such as AlreadyExists."""
        self.details: Mapping[str, Any] = details or {}
        """Its `details`: kind, name, causes by field."""
        self.retry_after = retry_after
        """Seconds that it asked to wait."""


class Fenced(ApiError):
    """Not asked at all: this process may not write now, since another may by this time."""


class Unauthorized(ApiError):
    """401."""


class Forbidden(ApiError):
    """403: a role, a quota, or an admission plugin says no."""


class Absent(ApiError):
    """404."""


class Conflict(ApiError):
    """409: written by another meanwhile."""


class AlreadyExists(Conflict):
    """409: the name is taken."""


class Gone(ApiError):
    """410: so old a version is no longer known."""


class Invalid(ApiError):
    """400 or 422: the object is no legal one."""


class Busy(ApiError):
    """429: later."""


class Broken(ApiError):
    """5xx: the server's own failure; what was asked for may have been done."""


class Unreachable(ApiError):
    """No answer in time, or none at all; what was asked for may have been done."""


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: Invalid, 401: Unauthorized, 403: Forbidden, 404: Absent, 409: Conflict, 410: Gone,
    422: Invalid, 429: Busy,
}  # fmt: skip
_LONGEST = 1000


def from_answer(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
    """The exception for an answer; a proxy on the way may have sent something else than a Status."""
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        told = {"message": body[:_LONGEST].decode(errors="replace").strip()}
    return from_status({**told, "code": status}, _seconds(headers.get("Retry-After")))


def from_status(told: Mapping[str, Any], retry_after: float | None = None) -> ApiError:
    """The exception for a Status object, as an answer or an ERROR event carries it."""
    code, details = told.get("code"), told.get("details")
    status = code if isinstance(code, int) else 500
    reason = str(told.get("reason") or "")
    details = details if isinstance(details, dict) else {}
    if retry_after is None and details.get("retryAfterSeconds"):
        retry_after = float(details["retryAfterSeconds"])
    kind = Broken if status >= 500 else _BY_STATUS.get(status, ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExists
    message = str(told.get("message") or f"the API server answered {status}")[:_LONGEST]
    return kind(message, status=status, reason=reason, details=details, retry_after=retry_after)


def _seconds(header: str | None) -> float | None:
    """Retry-After as a number of seconds; API servers send no dates."""
    return float(header) if header and header.isdecimal() else None

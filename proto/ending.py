"""Why a launcher ended: in words for whoever started it, and as an exit code.

A container's last words go to its termination log, which Kubernetes shows in the pod's status
(`terminated.message`), so that nobody has to guess from a number.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from elastic.proto.exit_code import MASTER_LOST

log = logging.getLogger(__name__)

MOST = 4096
"""Bytes that Kubernetes keeps of a termination log."""


class Ended(StrEnum):
    """What a launcher's end is the end of."""

    FINISHED = "Finished"
    USER_ERROR = "UserError"
    OOM = "OOMKilled"
    HARDWARE = "HardwareFault"
    FAULTS = "RestartLimit"
    """Too many faults of others in a row."""
    USAGE = "Usage"
    STOPPED = "Stopped"
    """By a signal, or because its node or its job was stopped."""
    MASTER_LOST = "MasterLost"
    REFUSED = "MasterRefused"
    UNHEALTHY = "HealthCheckFailed"
    STRAGGLER = "Straggler"
    DRAINED = "Drained"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    HANG = "HangDetected"
    BELOW_MIN = "BelowMin"
    UNSCHEDULABLE = "Unschedulable"
    QUOTA = "QuotaExceeded"
    IMAGE = "ImagePullFailed"
    DEADLINE = "DeadlineExceeded"


DETAILED: Mapping[Ended, int] = {
    Ended.FINISHED: 0,
    Ended.USER_ERROR: 1,
    Ended.OOM: 1,
    Ended.HARDWARE: 1,
    Ended.FAULTS: 1,
    Ended.USAGE: 2,
    Ended.MASTER_LOST: MASTER_LOST,
    Ended.UNHEALTHY: 211,
    Ended.STRAGGLER: 212,
    Ended.DRAINED: 213,
    Ended.RENDEZVOUS_TIMEOUT: 214,
    Ended.HANG: 215,
    Ended.BELOW_MIN: 216,
}
"""`--exit-codes detailed`; what is not here keeps the code that it has without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    kind: Ended
    rank: int | None = None
    """Of the root cause."""
    exception: str = ""
    """Its type and message, where it was one."""
    fingerprint: str = ""
    """What makes two failures the same."""
    step: int = 0
    """The last step that was finished; 0: none, or the script tells none."""
    reason: str = ""
    """One sentence."""

    def code(self, plain: int, *, detailed: bool) -> int:
        """plain: torchrun's."""
        return DETAILED.get(self.kind, plain) if detailed else plain


def to_json(ending: Ending) -> str:
    """At most `MOST` bytes: the texts are cut, the longest first."""
    body: dict[str, Any] = {
        "class": str(ending.kind),
        "rank": ending.rank,
        "exception": ending.exception,
        "fingerprint": ending.fingerprint,
        "step": ending.step,
        "reason": ending.reason,
    }
    while len(text := json.dumps(body)) > MOST:
        longest = max(("exception", "fingerprint", "reason"), key=lambda key: len(body[key]))
        body[longest] = body[longest][: len(body[longest]) * 3 // 4]
    return text


def from_json(text: str) -> Ending | None:
    """What a termination log says; None where it is not one of ours."""
    try:
        body = json.loads(text)
        kind = Ended(body["class"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    rank, step = body.get("rank"), body.get("step")
    return Ending(
        kind=kind,
        rank=rank if isinstance(rank, int) else None,
        exception=_text(body.get("exception")),
        fingerprint=_text(body.get("fingerprint")),
        step=step if isinstance(step, int) else 0,
        reason=_text(body.get("reason")),
    )


def leave(path: Path, ending: Ending) -> None:
    """In the termination log, where there is one: in a container it is there from the start."""
    try:
        if path.exists():
            path.write_text(to_json(ending))
    except OSError as error:
        log.warning("cannot write the termination log %s: %s", path, error.strerror)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""

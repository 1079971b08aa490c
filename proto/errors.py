"""Every error that crosses a process or reaches a user; each message is one sentence.

ElasticError
├── UsageError            the command line or the environment asks for something impossible (exit 2)
├── ProtocolMismatch      the other side speaks a version too far from ours
├── CodecError            text that is no value of the type that was expected
├── LinkError             bytes on a rank's link that are no message
├── PageError             bytes that are no progress page
├── SlotError             a snapshot slot that is empty, torn or damaged, or does not fit
├── CheckpointError       a checkpoint that cannot be made, found or read
│   └── CheckpointDamaged     what it holds is not what was written, and there is no good copy
├── StarterDied           the process that starts ranks died; a new one takes its place
├── JournalError          the journal cannot be read or written
├── MasterUnreachable     no master answered in time
├── MasterRefused         a master answered and will not have us (other job, wrong token, version)
├── NotFound              what a person asked for is not there (a job, a rank's log)
└── JobFailed             `elastic.launch`: the job did not finish; carries its report
"""

from collections.abc import Mapping
from typing import Any


class ElasticError(Exception):
    """Root of the tree; `str()` of it is what a user reads."""


class UsageError(ElasticError):
    """The command line or the environment asks for something impossible."""


class ProtocolMismatch(ElasticError):
    """The other side speaks a version too far from ours."""


class CodecError(ElasticError):
    """Text is no value of the type that was expected."""


class LinkError(ElasticError):
    """Bytes on a rank's link that are no message."""


class PageError(ElasticError):
    """Bytes that are no progress page."""


class SlotError(ElasticError):
    """A snapshot slot is empty, torn or damaged, or does not fit."""


class CheckpointError(ElasticError):
    """A checkpoint cannot be made, found or read."""


class CheckpointDamaged(CheckpointError):
    """What a checkpoint holds is not what was written, and there is no good copy: another try would
    find the same."""

    def __init__(self, what: str, *, older: int | None = None) -> None:
        """older: the step on storage before it, where it is for the caller to take that."""
        way_out = f"; load(state, step={older}) loads the step on storage before it"
        super().__init__(what + way_out if older else what)
        self.what, self.older = what, older


class StarterDied(ElasticError):
    """The process that starts ranks died."""


class JournalError(ElasticError):
    """The journal cannot be read or written."""


class JournalFull(JournalError):
    """There is no space for it now."""


class MasterUnreachable(ElasticError):
    """No master answered in time."""


class MasterRefused(ElasticError):
    """A master answered and will not have us."""


class NotFound(ElasticError):
    """What a person asked for is not there."""


class JobFailed(ElasticError):
    """A job that `elastic.launch` ran did not finish."""

    def __init__(
        self, reason: str, *, exit_code: int = 1, report: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        """Of the launcher: 1 failed, 213 drained, 128 + signal before the first round."""
        self.report: Mapping[str, Any] = report or {}
        """What `elastic-run --report` writes; empty on nodes that did not host the master."""

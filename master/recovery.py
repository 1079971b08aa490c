"""What a failure means, who pays for it, and whether the job goes on. Pure.

Whose fault decides who pays. What the script did itself (an exception, an exit code, an
out-of-memory on the device, a crash signal) counts against `max_restarts`. What was done to it
(SIGKILL, a lost node, the kernel's OOM killer, a hang) costs a token of a job-wide budget that
grows back with progress. The same fingerprint three times with no step in between is
deterministic, and ends the job.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic.master.events import NodeId, RankFailure
from elastic.master.policy import Policy


class Cause(StrEnum):
    """Why a round ended before its time."""

    ERROR = "script error"
    DEVICE_OOM = "device out of memory"
    CRASH = "crash"
    KERNEL_OOM = "kernel out of memory"
    KILLED = "killed"
    NETWORK = "network"
    NODE_LOST = "node lost"
    NODE_LEFT = "node left"
    AGENT_LOST = "agent lost"
    STORE_LOST = "store lost"
    GROWTH = "more nodes"
    REQUEST = "asked for"
    UNIT = "rank unit"


COUNTED = frozenset({Cause.ERROR, Cause.DEVICE_OOM, Cause.CRASH})
"""These cost one of `max_restarts`."""

FREE = frozenset({Cause.GROWTH, Cause.REQUEST, Cause.UNIT, Cause.NODE_LEFT})
"""These are nobody's fault and cost nothing."""

STORE_RANK = -1
"""The rank number under which an agent reports the death of the round's store."""

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS})
_NETWORK_TYPES = frozenset({"DistNetworkError", "DistBackendError", "DistStoreError"})
_NETWORK_WORDS = re.compile(
    r"connection (?:closed|reset|refused)|broken pipe|socket timeout|\bgloo\b|\bnccl\b|"
    r"timed out waiting for|store->get|remote process exited|watchdog caught collective",
    re.IGNORECASE,
)
_DEVICE_OOM = re.compile(r"\b(?:CUDA|HIP|XPU) out of memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A failure with its place and time."""

    node_id: NodeId
    failure: RankFailure
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    restarts: int = 0
    """Of `max_restarts`, used."""
    faults: int = 0
    """Of `fault_budget`, used."""
    seen: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fingerprints since the last finished step."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A symptom; its cause may still be reported."""

    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    cause: Cause
    reason: str
    root: Observed | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    reason: str
    root: Observed | None = None


Verdict = Hold | Restart | Fail


def classify(failure: RankFailure) -> Cause:
    """The cause that one rank's end points to, looked at alone."""
    if failure.rank == STORE_RANK:
        return Cause.STORE_LOST
    if failure.oom_killed:
        return Cause.KERNEL_OOM
    said = f"{failure.error_type}: {failure.message}"
    if "OutOfMemoryError" in failure.error_type or _DEVICE_OOM.search(failure.message):
        return Cause.DEVICE_OOM
    if failure.error_type in _NETWORK_TYPES:
        return Cause.NETWORK
    if failure.error_type == "RuntimeError" and _NETWORK_WORDS.search(said):
        return Cause.NETWORK
    if failure.exit_code >= 0:
        return Cause.ERROR
    if -failure.exit_code in _CRASHES:
        told = _NETWORK_WORDS.search(failure.log_tail)
        return Cause.NETWORK if told and -failure.exit_code == signal.SIGABRT else Cause.CRASH
    return Cause.KILLED


def judge(
    state: Recovery,
    observed: tuple[Observed, ...],
    unsure: bool,
    now: float,
    policy: Policy,
) -> tuple[Recovery, Verdict]:
    """What to do about a round's failures, oldest first.

    unsure: a node of the round is unreachable, so these may be the symptoms of its death.
    """
    causes = [classify(o.failure) for o in observed]
    first = next((i for i, c in enumerate(causes) if c is not Cause.NETWORK), None)
    root = observed[first if first is not None else 0]
    cause = causes[first if first is not None else 0]
    settled = observed[0].at + policy.settle
    if (first is None or (unsure and cause in COUNTED)) and now < settled:
        return state, Hold(settled, f"{describe(root)}: looking for its cause elsewhere")
    return charge(state, cause, describe(root), root, policy)


def charge(
    state: Recovery, cause: Cause, reason: str, root: Observed | None, policy: Policy
) -> tuple[Recovery, Verdict]:
    """Take the price of one restart, or say why there is none left."""
    if cause in FREE:
        return state, Restart(cause, reason, root)
    print_ = fingerprint(cause, root)
    if print_:
        count = state.seen.get(print_, 0) + 1
        state = replace(state, seen={**state.seen, print_: count})
        if count >= policy.same_failure_limit:
            return state, Fail(
                f"{reason}: the same failure {count} times with no step finished in between", root
            )
    if cause in COUNTED:
        if state.restarts >= policy.max_restarts:
            used = f" after {state.restarts} restarts" if policy.max_restarts else ""
            return state, Fail(f"{reason}{used}", root)
        return replace(state, restarts=state.restarts + 1), Restart(cause, reason, root)
    if state.faults >= policy.fault_budget:
        return state, Fail(
            f"{reason}: {state.faults} faults with too little progress in between", root
        )
    return replace(state, faults=state.faults + 1), Restart(cause, reason, root)


def progressed(state: Recovery) -> Recovery:
    """A round has finished its first step: fingerprints start anew, the budget grows back."""
    if not state.seen and not state.faults:
        return state
    return replace(state, seen={}, faults=max(0, state.faults - 2))


def fingerprint(cause: Cause, root: Observed | None) -> str:
    """What makes two failures the same; empty for what strikes from outside."""
    if root is None or cause in (Cause.KILLED, Cause.NODE_LOST, Cause.AGENT_LOST):
        return ""
    failure = root.failure
    message = re.sub(r"0x[0-9a-f]+|\d+", "#", failure.message)[:300]
    kind = failure.error_type
    return f"{cause}|{failure.exit_code}|{kind}|{failure.frame}|{message}"


def describe(observed: Observed) -> str:
    """One line: which rank, where, how it ended."""
    failure = observed.failure
    if failure.rank == STORE_RANK:
        return f"the store on {observed.node_id} died"
    where = f"rank {failure.rank} on {observed.node_id}"
    if failure.oom_killed:
        return f"{where} was killed by the kernel, out of memory"
    if failure.error_type:
        text = f"{failure.error_type}: {failure.message.strip().splitlines()[0][:200]}" if (
            failure.message.strip()
        ) else failure.error_type
        return f"{where} raised {text}"
    if failure.exit_code < 0:
        return f"{where} was ended by {_signal_name(-failure.exit_code)}"
    return f"{where} exited with {failure.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

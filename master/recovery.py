"""What a failure means, who pays for it, and whether the job goes on. Pure.

Whose fault decides who pays. What the script did itself (an exception, an exit code, an
out-of-memory on the device, a crash signal) counts against `max_restarts`. What was done to it
(SIGKILL, a lost node, a preemption, the kernel's OOM killer, hardware) costs a token of a job-wide
budget that grows back with progress. The same fingerprint three times with no new step in between is
deterministic, and ends the job; and so do ranks that ended, with 0, while others went on, three times within minutes.

A rank that fails because a peer did is a follower: its end says nothing of the cause, which may
still be on its way here, so it is waited for a moment.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic.master.events import Failed, RankFailure
from elastic.master.policy import Policy
from elastic.master.reading import (
    Observed,
    Weight,
    describe,
    ended_early,
    ends,
    of_machine,
    root_of,
    signal_of,
)

__all__ = [
    "COUNTED", "FREE", "REGROW", "UNIT_TRIES", "Cause", "Fail", "Hold", "Observed", "Recovery",
    "Restart", "Verdict", "charge", "classify", "describe", "fingerprint", "follows", "judge",
    "may_be_device", "progressed", "rested",
]  # fmt: skip


class Cause(StrEnum):
    """Why a round ended before its time."""

    ERROR = "script error"
    DEVICE_OOM = "device out of memory"
    CRASH = "crash"
    KERNEL_OOM = "kernel out of memory"
    KILLED = "killed"
    HARDWARE = "hardware"
    NETWORK = "network"
    UNEVEN = "ranks ended early"
    NO_START = "ranks could not be started"
    NO_LOG = "no space for logs"
    HANG = "hang"
    NODE_LOST = "node lost"
    NODE_LEFT = "node left"
    AGENT_LOST = "agent lost"
    STORE_LOST = "store lost"
    GROWTH = "more nodes"
    REQUEST = "asked for"
    PREEMPTED = "preempted"
    UNIT = "rank unit"
    DAMAGED = "checkpoint damaged"


COUNTED = frozenset({Cause.ERROR, Cause.DEVICE_OOM, Cause.CRASH})
"""These cost one of `max_restarts`."""

FREE = frozenset({Cause.GROWTH, Cause.REQUEST, Cause.PREEMPTED, Cause.UNIT})
"""These are nobody's fault and cost nothing."""

REGROW = 300.0
"""Seconds that a round stands for each token that comes back, whether or not its script has steps."""

SIMILAR, NEAR = 0.1, 10
"""Two steps are similar where they differ by no more than this share, or by so many."""

ALIKE, BARELY = 0.05, 10.0
"""Two rounds lasted alike that differ by no more than this share, or by so many seconds."""

UNIT_TRIES = 3
"""Worlds in a row that a script may call illegal, with no step finished in between."""

_CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGBUS,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGALRM,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGXCPU,
        signal.SIGXFSZ,
    }
)
"""What a process brings upon itself: its errors, alarms that it set, limits that it was given."""
_NETWORK_TYPES = frozenset({"DistNetworkError", "DistBackendError", "DistStoreError"})
_CAUSES: Mapping[str, Cause] = {
    **dict.fromkeys(("cgroup_oom", "host_oom"), Cause.KERNEL_OOM),
    "device_oom": Cause.DEVICE_OOM,
    **dict.fromkeys(("ecc_error", "gpu_lost", "nvlink_error", "gpu_firmware"), Cause.HARDWARE),
}
"""By what a rank's end says, where that alone tells who pays."""
DOUBTFUL = frozenset({"device_error", "no_device"})
"""Errors of a script, by who pays for them, after which its node is probed."""
_KINDS: Mapping[Failed, Cause] = {
    Failed.STORE: Cause.STORE_LOST,
    Failed.START: Cause.NO_START,
    Failed.LOG: Cause.NO_LOG,
    Failed.HANG: Cause.HANG,
    Failed.TIMER: Cause.ERROR,  # a signal, but one that the script had asked for
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    restarts: int = 0
    """Of `max_restarts`, used."""
    faults: int = 0
    """Of `fault_budget`, used."""
    reached: int = 0
    """The last step of the round before, where the script tells."""
    lasted: float = 0.0
    """Seconds that the round before stood."""
    seen: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fingerprints since a round went beyond the one before it, or, where steps are not told, stood for another time; of ranks that ended early, since one stood for `REGROW`."""
    ooms: Mapping[int, int] = field(default_factory=dict[int, int])
    """By rank: the step at which its container's memory was used up last."""


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
    cause: Cause
    reason: str
    root: Observed | None = None


Verdict = Hold | Restart | Fail


def classify(failure: RankFailure) -> Cause:
    """The cause that one rank's end points to, looked at alone: who pays for it."""
    if failure.what in _KINDS and not (failure.what is Failed.STORE and failure.oom_killed):
        return _KINDS[failure.what]
    label, weight = ends(failure)
    if label in _CAUSES:
        return _CAUSES[label]
    if of_machine(failure):
        return Cause.HARDWARE
    kind = failure.error_type.rpartition(".")[2]
    told = kind == "RuntimeError" or (not kind and failure.exit_code == -signal.SIGABRT)
    if kind in _NETWORK_TYPES or (told and weight <= Weight.WAITED):
        return Cause.NETWORK
    if label == "killed" and signal_of(failure) in (signal.SIGKILL, signal.SIGTERM):
        return Cause.KILLED  # or so a shell says of what it ran
    if failure.exit_code >= 0 or kind:  # a KeyboardInterrupt ends Python by SIGINT
        return Cause.ERROR
    return Cause.CRASH if -failure.exit_code in _CRASHES else Cause.KILLED


def follows(failure: RankFailure) -> bool:
    """It looks like the end of a peer's peer: what it met may have begun elsewhere."""
    return ends(failure)[1] <= Weight.WAITED


def may_be_device(verdict: Restart) -> bool:
    """A fault of the machine, whoever pays for the restart: a failed call may be the script's or the device's."""
    root = verdict.root
    doubtful = root is not None and ends(root.failure)[0] in DOUBTFUL
    return verdict.cause is Cause.HARDWARE or doubtful


def judge(
    state: Recovery,
    observed: tuple[Observed, ...],
    doubt: float,
    now: float,
    policy: Policy,
    step: int | None = None,
    ended: Sequence[int] = (),
) -> tuple[Recovery, Verdict]:
    """What to do about a round's failures, oldest first; there is one at least.

    step: the job's last; None: it has finished none. ended: ranks that were done, with 0, while others went on. doubt: until when, in job time, a silent node of the round may turn out to be dead; no script
    is blamed before that, since these may be the symptoms.
    """
    root = root_of(observed)
    cause, what = classify(root.failure), describe(root)
    if ended and follows(root.failure):
        cause, what = Cause.UNEVEN, f"{ended_early(ended)}; {what}"
    settled = observed[0].at + policy.settle if follows(root.failure) else now
    if cause in COUNTED or cause is Cause.UNEVEN:
        settled = max(settled, doubt)
    if now < settled:
        return state, Hold(settled, f"{what}: looking for its cause elsewhere")
    if policy.supplied:
        state, hopeless = _hopeless(state, cause, root.failure, step)
        if hopeless:
            return state, Fail(cause, f"{what}: {hopeless}", root)
    return charge(state, cause, what, root, policy)


def _hopeless(
    state: Recovery, cause: Cause, failure: RankFailure, step: int | None
) -> tuple[Recovery, str]:
    """Why another try would end the same way; empty: it may not. In pods alone, whose limits and image stay the same."""
    label = ends(failure)[0]
    if cause is Cause.ERROR and label == "import_error" and step is None:
        return state, "its image lacks what the script imports"
    if label != "cgroup_oom":
        return state, ""
    before, at = state.ooms.get(failure.rank), step or 0
    state = replace(state, ooms={**state.ooms, failure.rank: at})
    if before is None or abs(at - before) > max(NEAR, SIMILAR * max(at, before)):
        return state, ""
    return state, f"it ran out of memory again, near step {before}: give its pods more memory"


def charge(
    state: Recovery,
    cause: Cause,
    reason: str,
    root: Observed | None,
    policy: Policy,
    *,
    repeats: bool = True,
) -> tuple[Recovery, Verdict]:
    """Take the price of one restart, or say why there is none left. repeats: it may be the same failure as before."""
    print_ = fingerprint(cause, root) if repeats else ""
    if print_:
        count = state.seen.get(print_, 0) + 1
        state = replace(state, seen={**state.seen, print_: count})
        if count >= (UNIT_TRIES if cause is Cause.UNIT else policy.same_failure_limit):
            between = "" if cause is Cause.UNEVEN else " with no new step finished in between"
            times = f"the same failure {count} times{between}"
            return state, Fail(cause, f"{reason}: {times}", root)
    if cause in FREE:
        return state, Restart(cause, reason, root)
    if cause in COUNTED:
        if state.restarts >= policy.max_restarts:
            count = state.restarts
            used = f" after {count} restart{'s' * (count > 1)}" if count else ""
            return state, Fail(cause, f"{reason}{used}", root)
        return replace(state, restarts=state.restarts + 1), Restart(cause, reason, root)
    if state.faults >= policy.fault_budget:
        many = (
            f"{state.faults} fault{'s' * (state.faults != 1)} with too little progress in between"
        )
        return state, Fail(cause, f"{reason}: {many}", root)
    return replace(state, faults=state.faults + 1), Restart(cause, reason, root)


def progressed(state: Recovery, *, told: bool) -> Recovery:
    """A round has gone beyond the one before it, or, where steps are not told, has had one: the budget grows back."""
    state = replace(state, faults=max(0, state.faults - 2)) if state.faults else state
    return _anew(state) if told else state


def _anew(state: Recovery) -> Recovery:
    """Fingerprints are counted from none. Who ends early does so after many steps."""
    kept = {print_: count for print_, count in state.seen.items() if print_ == Cause.UNEVEN}
    return replace(state, seen=kept) if kept != state.seen else state


def rested(state: Recovery, seconds: float, *, untold: bool = False) -> Recovery:
    """A round stood for so long: the budget grows back with time too. untold: it has had steps, whose numbers nobody tells; what
    fails always at the same one does so after the same time."""
    if untold and abs(seconds - state.lasted) > max(BARELY, ALIKE * seconds):
        state = _anew(state)
    tokens = int(max(0.0, seconds) / REGROW)
    if not tokens:
        return state
    seen = {print_: count for print_, count in state.seen.items() if print_ != Cause.UNEVEN}
    return replace(state, seen=seen, faults=max(0, state.faults - tokens))


def fingerprint(cause: Cause, root: Observed | None) -> str:
    """What makes two failures the same; empty for what strikes from outside."""
    if cause in (Cause.UNIT, Cause.UNEVEN):
        return str(cause)
    if root is None or cause in (
        Cause.PREEMPTED,
        Cause.NODE_LOST,
        Cause.AGENT_LOST,
        Cause.STORE_LOST,
    ):
        return ""
    failure = root.failure
    if cause is Cause.KILLED and signal_of(failure) in (signal.SIGKILL, signal.SIGTERM):
        return ""
    message = re.sub(r"0x[0-9a-f]+|[0-9]+", "#", failure.message, flags=re.IGNORECASE)[:300]
    kind = failure.error_type
    return f"{cause}|{failure.exit_code}|{kind}|{failure.frame}|{message}"

"""How a pod ended -> the cause, what is done, and whether it counts. Of failures the user's rules come first. Pure."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic.k8s.observed import Pod
from elastic.proto.elasticjob import Past
from elastic.proto.ending import Ended, Ending, from_json

MOST_WORDS = 300
"""Characters of a reason, where a status has it."""
MOST_LOG = 4096
"""Characters of last words that a pattern is tried on."""
SIMILAR = 0.1
"""Two steps are similar where they differ by no more than this share, or by `NEAR`."""
NEAR = 10
CRASHES = 2
"""Crashes of a slot in a row on one node, after which another has it avoided."""
SAME = 3
"""Ends of a slot by the same error, with no step in between, after which the job fails."""


class Action(StrEnum):
    REPLACE = "ReplacePod"
    REPLACE_ELSEWHERE = "ReplacePodAvoidNode"
    RESTART_UNIT = "RestartUnit"
    SHRINK = "Shrink"
    RESTART_JOB = "RestartJob"
    FAIL = "FailJob"
    IGNORE = "Ignore"


class Cause(StrEnum):
    """Also the reason of events and conditions."""

    COMPLETED = "Completed"
    USER_ERROR = "UserError"
    OOM = "OOMKilled"
    CRASHED = "Crashed"
    KILLED = "Killed"
    STOPPED = "Stopped"
    HARDWARE = "HardwareFault"
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    REFUSED = "NotAdmitted"
    """By the node that it was put on."""
    DELETED = "Deleted"
    IMAGE = "ImagePullFailed"
    MASTER_LOST = "MasterLost"
    UNHEALTHY = "HealthCheckFailed"
    STRAGGLER = "Straggler"
    DRAINED = "Drained"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    HANG = "HangDetected"
    BELOW_MIN = "BelowMin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One of `failurePolicy.rules`; it matches where all that it names does."""

    name: str
    action: Action
    counts: bool | None = None
    """Toward the limit of restarts; None: as without the rule."""
    exit_codes: tuple[int, ...] = ()
    among: bool = True
    """The exit code is one of `exit_codes`; False: it is none of them."""
    reasons: tuple[str, ...] = ()
    """Of the pod or its container, or a `Cause`."""
    conditions: tuple[str, ...] = ()
    """Of the pod, that are True."""
    patterns: tuple[str, ...] = ()
    """Regular expressions; one is found in the container's last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    cause: Cause
    action: Action
    counts: bool
    """Toward the job's limit of restarts."""
    reason: str
    """One sentence."""
    rule: str = ""
    """Name of the user's rule that decided."""
    exit_code: int | None = None
    """Of its container."""

    @property
    def proof(self) -> bool:
        """Once is enough to avoid its node: a user, a probe or a slot's crashes in a row, which are counted, say so."""
        return bool(self.rule) or self.cause in (Cause.UNHEALTHY, Cause.HARDWARE, Cause.CRASHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What keeps a pod from running."""

    why: str
    image: bool
    """Its container cannot be made; False: it has no node."""
    hopeless: bool = False
    """No waiting helps."""


_BY_CODE: Mapping[int, tuple[Cause, Action, bool, str]] = {
    2: (Cause.USER_ERROR, Action.FAIL, True, "its command line makes no sense"),
    126: (Cause.USER_ERROR, Action.FAIL, True, "its command cannot be executed"),
    127: (Cause.USER_ERROR, Action.FAIL, True, "its command is not in the image"),
    128: (Cause.USER_ERROR, Action.FAIL, True, "its container could not be started"),
    130: (Cause.STOPPED, Action.REPLACE, False, "it got SIGINT"),
    134: (Cause.CRASHED, Action.REPLACE, True, "it aborted (SIGABRT)"),
    135: (
        Cause.CRASHED, Action.REPLACE, True, "it got SIGBUS: is /dev/shm large enough?",
    ),
    136: (Cause.CRASHED, Action.REPLACE, True, "it got SIGFPE"),
    137: (Cause.KILLED, Action.REPLACE, True, "it got SIGKILL"),
    139: (Cause.CRASHED, Action.REPLACE, True, "it got SIGSEGV"),
    143: (Cause.STOPPED, Action.REPLACE, False, "it got SIGTERM"),
    210: (Cause.MASTER_LOST, Action.REPLACE, False, "it found no master"),
    211: (Cause.UNHEALTHY, Action.REPLACE_ELSEWHERE, False, "its node failed the health check"),
    212: (Cause.STRAGGLER, Action.REPLACE_ELSEWHERE, False, "its node is slow"),
    213: (Cause.DRAINED, Action.REPLACE, False, "it was drained"),
    214: (Cause.RENDEZVOUS_TIMEOUT, Action.REPLACE, True, "too few nodes came in time"),
    215: (Cause.HANG, Action.REPLACE, True, "it hung"),
    216: (Cause.BELOW_MIN, Action.REPLACE, False, "too few nodes were left"),
}  # fmt: skip

_BY_WORDS: Mapping[Ended, tuple[Cause, Action, bool]] = {
    Ended.OOM: (Cause.OOM, Action.REPLACE, True),
    Ended.HARDWARE: (Cause.HARDWARE, Action.REPLACE_ELSEWHERE, False),
    Ended.USAGE: (Cause.USER_ERROR, Action.FAIL, True),
    Ended.UNHEALTHY: (Cause.UNHEALTHY, Action.REPLACE_ELSEWHERE, False),
    Ended.STRAGGLER: (Cause.STRAGGLER, Action.REPLACE_ELSEWHERE, False),
    Ended.DRAINED: (Cause.DRAINED, Action.REPLACE, False),
    Ended.MASTER_LOST: (Cause.MASTER_LOST, Action.REPLACE, False),
    Ended.STOPPED: (Cause.STOPPED, Action.REPLACE, False),
}
"""What elastic-run says of its own end is better than a number; the rest is told by that."""

_BY_REASON: Mapping[str, tuple[Cause, Action, str]] = {
    "Evicted": (Cause.EVICTED, Action.REPLACE_ELSEWHERE, "its node ran short and evicted it"),
    "Preempting": (Cause.PREEMPTED, Action.REPLACE, "a pod of higher priority took its place"),
    "Preempted": (Cause.PREEMPTED, Action.REPLACE, "a pod of higher priority took its place"),
    "NodeLost": (Cause.NODE_LOST, Action.REPLACE_ELSEWHERE, "its node is lost"),
    "NodeShutdown": (Cause.PREEMPTED, Action.REPLACE, "its node shut down"),
    "Shutdown": (Cause.PREEMPTED, Action.REPLACE, "its node shut down"),
    "Terminated": (Cause.PREEMPTED, Action.REPLACE, "its node shut down"),
    "UnexpectedAdmissionError": (
        Cause.REFUSED, Action.REPLACE_ELSEWHERE, "its node would not have it",
    ),
    "NodeAffinity": (Cause.REFUSED, Action.REPLACE, "its node no longer fits it"),
    "OutOfcpu": (Cause.REFUSED, Action.REPLACE, "its node was full"),
    "OutOfmemory": (Cause.REFUSED, Action.REPLACE, "its node was full"),
    "OutOfpods": (Cause.REFUSED, Action.REPLACE, "its node was full"),
}  # fmt: skip
"""By the pod's reason; none of these counts."""

_BY_DISRUPTION: Mapping[str, tuple[Cause, Action, str]] = {
    "PreemptionByScheduler": (Cause.PREEMPTED, Action.REPLACE, "a pod of higher priority took its place"),
    "DeletionByTaintManager": (Cause.EVICTED, Action.REPLACE, "its node was tainted"),
    "EvictionByEvictionAPI": (Cause.EVICTED, Action.REPLACE, "it was evicted"),
    "DeletionByPodGC": (Cause.NODE_LOST, Action.REPLACE_ELSEWHERE, "its node is gone"),
    "TerminationByKubelet": (Cause.EVICTED, Action.REPLACE_ELSEWHERE, "its node ran short and ended it"),
}  # fmt: skip
"""By the reason of its condition DisruptionTarget; none of these counts. Taints of pressure are NoSchedule and end no
pod: what a node ends for want of room it ends itself, and says so."""

_IMAGE = frozenset(
    {
        "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull",
        "RegistryUnavailable", "ImageInspectError", "SignatureValidationFailed",
        "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
    }
)  # fmt: skip
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
"""Its last words are the container runtime's."""
_NO_DEVICE = re.compile(
    r"nvidia-container|device driver|nvidia driver|libcuda|libnvidia", re.IGNORECASE
)
"""What it says where a node has no device to give, or no driver for it."""
_HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull", "SignatureValidationFailed"})
_AUTH = re.compile(r"unauthorized|authentication required|access denied|forbidden", re.IGNORECASE)


def judge(
    pod: Pod, past: Past, rules: Sequence[Rule] = (), *, step: int = 0, gone: bool = False
) -> Verdict:
    """Of a pod that is over, that is being deleted by others, or (`gone`) that is no longer there. step: the job's
    last."""
    told = from_json(pod.last_words)
    verdict = replace(_own(pod, told, past, step, gone=gone), exit_code=pod.exit_code)
    for rule in rules if verdict.cause is not Cause.COMPLETED else ():
        if _matches(rule, pod, verdict.cause):
            counts = verdict.counts if rule.counts is None else rule.counts
            reason = f"{verdict.reason} (rule {rule.name})"
            return replace(
                verdict, action=rule.action, counts=counts, reason=reason, rule=rule.name
            )
    return verdict


def remember(past: Past, pod: Pod, verdict: Verdict, step: int) -> Past:
    """What to know of a slot after that. step: the job's last."""
    told = from_json(pod.last_words)
    seen = _fingerprint(pod, told, verdict.cause)
    crashed = verdict.cause is Cause.CRASHED
    return Past(
        attempt=max(past.attempt, pod.attempt),
        oom_step=_step(told, step) if verdict.cause is Cause.OOM else past.oom_step,
        crashes=_crashes(past, pod) + 1 if crashed else 0,
        crashed_on=pod.node if crashed else "",
        same=past.same + 1 if seen == past.fingerprint else 1,
        fingerprint=seen,
    )


def _fingerprint(pod: Pod, told: Ending | None, cause: Cause) -> str:
    words = (told.fingerprint if told else "") or f"{cause}|{pod.exit_code}"
    return hashlib.sha256(words.encode(errors="replace")).hexdigest()[:16]


def progressed(past: Past) -> Past:
    """A step was finished since."""
    return Past(attempt=past.attempt, oom_step=past.oom_step)


def short(words: str) -> str:
    """In one line, for a status."""
    return " ".join(words.split())[:MOST_WORDS]


def held_up(pod: Pod) -> Held | None:
    """None: nothing is known to."""
    if pod.waiting in _IMAGE:
        said = short(pod.waiting_message)
        words = f"{pod.name}: {pod.waiting}: {said}" if said else f"{pod.name}: {pod.waiting}"
        hopeless = pod.waiting in _HOPELESS or bool(_AUTH.search(said))
        return Held(why=words, image=True, hopeless=hopeless)
    if pod.unschedulable:
        words = f"{pod.name}: {short(pod.unschedulable)}"
        return Held(why=words, image=False)
    return None


def of_an_image(words: str) -> bool:
    """Whether these words of `held_up`, not the scheduler's, say why a pod does not start."""
    return not _IMAGE.isdisjoint(words.split(": ")[1:2])


def _step(told: Ending | None, step: int) -> int:
    """At which it ended: one that was killed leaves no words."""
    return told.step if told is not None and told.step else step


def _crashes(past: Past, pod: Pod) -> int:
    """Before this one, in a row, on its node."""
    return past.crashes if past.crashed_on == pod.node else 0


def _own(pod: Pod, told: Ending | None, past: Past, step: int, *, gone: bool) -> Verdict:
    """Without the user's rules: what struck from outside first, then its own words, then numbers."""
    on = {kind: reason for kind, status, reason in pod.conditions if status == "True"}
    if "TerminationTarget" in on:
        return _outside(pod, (Cause.PREEMPTED, Action.REPLACE, "Kueue took its quota away"))
    if (disruption := on.get("DisruptionTarget")) is not None:
        usual = (Cause.PREEMPTED, Action.REPLACE, "it was taken away")
        return _outside(pod, _BY_DISRUPTION.get(disruption, usual))
    if pod.reason == "DeadlineExceeded":
        words = "its template's activeDeadlineSeconds are over: write spec.activeDeadlineSeconds"
        return _of(pod, Cause.USER_ERROR, Action.FAIL, True, words)
    if pod.reason in _BY_REASON:
        return _outside(pod, _BY_REASON[pod.reason])
    if pod.ended == "OOMKilled" or (told is not None and told.kind is Ended.OOM):
        return _oom(pod, _step(told, step), past)
    if told is not None and told.kind in _BY_WORDS:
        cause, action, counts = _BY_WORDS[told.kind]
        return Verdict(
            cause=cause, action=action, counts=counts, reason=f"{pod.name}: {told.reason}"
        )
    if pod.exit_code is None:
        if pod.phase == "Succeeded":
            return _of(pod, Cause.COMPLETED, Action.IGNORE, False, "it ended with exit code 0")
        if pod.phase == "Failed":
            return _of(pod, Cause.NODE_LOST, Action.REPLACE_ELSEWHERE, False, pod.message or "lost")
        return _of(
            pod, Cause.DELETED, Action.REPLACE, False, "it is gone" if gone else "it is deleted"
        )
    return _by_number(pod, pod.exit_code, told, past)


def _by_number(pod: Pod, code: int, told: Ending | None, past: Past) -> Verdict:
    if code == 0:
        return _of(pod, Cause.COMPLETED, Action.IGNORE, False, "it ended with exit code 0")
    usual = (Cause.USER_ERROR, Action.REPLACE, True, f"it ended with exit code {code}")
    cause, action, counts, words = _BY_CODE.get(code, usual)
    if told is not None and told.reason:
        words = told.reason
    elif pod.ended in _NOT_STARTED and (said := short(pod.last_words)):
        words = f"{words}: {said}"
        if _NO_DEVICE.search(said):
            return _of(pod, Cause.HARDWARE, Action.REPLACE_ELSEWHERE, False, words)
    if cause is Cause.CRASHED and (before := _crashes(past, pod)) >= CRASHES:
        action, words = Action.REPLACE_ELSEWHERE, f"{words}, {before + 1} times in a row"
    again = past.same >= SAME - 1 and past.fingerprint == _fingerprint(pod, told, cause)
    if cause is Cause.USER_ERROR and again:
        action, words = Action.FAIL, f"{words}, {SAME} times with no step finished in between"
    return _of(pod, cause, action, counts, words)


def _oom(pod: Pod, step: int, past: Past) -> Verdict:
    """Once is bad luck, at the same place again it is the script: no loop."""
    before = past.oom_step
    if before is None or (step and abs(step - before) > max(NEAR, SIMILAR * max(step, before))):
        return _of(pod, Cause.OOM, Action.REPLACE, True, "it ran out of memory")
    words = f"it ran out of memory again, near step {before}: give its pods more memory"
    return _of(pod, Cause.OOM, Action.FAIL, True, words)


def _outside(pod: Pod, row: tuple[Cause, Action, str]) -> Verdict:
    cause, action, words = row
    return _of(pod, cause, action, False, words)


def _of(pod: Pod, cause: Cause, action: Action, counts: bool, words: str) -> Verdict:
    return Verdict(cause=cause, action=action, counts=counts, reason=f"{pod.name}: {words}")


def _matches(rule: Rule, pod: Pod, cause: Cause) -> bool:
    if rule.exit_codes and (
        pod.exit_code is None or (pod.exit_code in rule.exit_codes) is not rule.among
    ):
        return False
    if rule.reasons and not {pod.reason, pod.ended, str(cause)} & set(rule.reasons):
        return False
    on = {kind for kind, status, _ in pod.conditions if status == "True"}
    if rule.conditions and not on & set(rule.conditions):
        return False
    said = pod.last_words[:MOST_LOG]
    return not rule.patterns or any(re.search(pattern, said) for pattern in rule.patterns)

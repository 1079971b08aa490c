"""A job's master, from what is seen of it: how often it was started anew, whether one is needed, when the job is over,
and which pods are to go. Pure.
"""

from dataclasses import replace

from elastic.k8s import pods, status
from elastic.k8s.acceptance import made_from
from elastic.k8s.jobs import Answers, Job, master_of
from elastic.k8s.observed import Member, seconds
from elastic.k8s.pods import Manifest
from elastic.k8s.spec import Spec
from elastic.k8s.status import MasterRecord, Over, Reason, Told
from elastic.proto.elasticjob import MADE_FROM, Accepted, JobState

PATIENCE = 60.0
"""Seconds beyond `drainSeconds` after which a master that was told to suspend or stop is not waited for."""
FOREGROUND = "foregroundDeletion"
"""The finalizer by which the garbage collector holds a job until its pods are gone."""
KEPT = 3
"""Ended masters of earlier attempts whose pods stay, but where `cleanup.podPolicy` is None: all of them do."""


def heard(seen: Job, members: tuple[Member, ...]) -> bool:
    """What its master said is what it has to say. One whose pod ended well has told the job's end before: where that is
    not seen yet, the cache of jobs is behind the one of pods."""
    master, told = master_of(members, seen.told.master.pod), seen.told
    if master is None or master.phase != "Succeeded":
        return True
    ended = seen.state is not None and seen.state.state == "Ended"
    return ended or told.holds(status.Kind.COMPLETE) or told.holds(status.Kind.FAILED)


def current(state: JobState | None, accepted: Accepted) -> JobState | None:
    """What was said of this attempt. An end is one whichever attempt came to it: its pod may be seen to be over before
    what it said is, and another attempt have begun meanwhile."""
    known = state is not None and (state.attempt == accepted.attempt or state.state == "Ended")
    return state if known else None


def count(told: Told, members: tuple[Member, ...], state: JobState | None) -> MasterRecord:
    """Its restarts by now; a step that was finished lets the count begin anew."""
    before = told.master
    found = master_of(members, before.pod)
    restarts = before.restarts
    if found is not None:
        restarts = max(restarts, before.carried + found.restarts)
    elif told.holds(status.Kind.SUSPENDED):  # it was let go: none is needed
        before = replace(before, pod="", carried=restarts)
    step = 0
    if state is not None:  # a script that tells no steps has finished one, at least
        step = state.training.step or int(state.training.stepped_at is not None)
    if step > before.step:
        return replace(before, restarts=restarts, step=step, restarts_at_step=restarts)
    return replace(before, restarts=restarts)


def outcome(
    seen: Job, state: JobState | None, spec: Spec, record: MasterRecord, now: float
) -> Over | None:
    """How it ended, by its master or by a limit; what has ended stays so."""
    before = seen.told
    for kind, failed in ((status.Kind.FAILED, True), (status.Kind.COMPLETE, False)):
        if before.holds(kind):
            was = before.condition(kind)
            assert was is not None
            return Over(failed=failed, reason=was.reason, message=was.message)
    if state is not None and state.state == "Ended" and state.outcome != "Stopped":
        failed = state.outcome != "Succeeded"
        return Over(failed=failed, reason=state.reason or Reason.SO, message=state.message)
    if seen.deleted_at is not None:
        return None
    if _worn_out(record, spec):
        words = f"its master was started anew {record.restarts - record.restarts_at_step} times with no step in between"
        return Over(failed=True, reason=Reason.MASTER, message=words)
    if (limit := spec.active_deadline_seconds) is not None and active(before, now) >= limit:
        words = f"it has trained for activeDeadlineSeconds ({limit})"
        return Over(failed=True, reason=Reason.DEADLINE, message=words)
    limit = spec.pre_running_deadline_seconds
    running = before.accepted is not None and before.accepted.wanted == "Run"
    if limit is None or not running or not before.start_time or record.step:
        return None
    if now - seconds(before.start_time) < limit:
        return None
    words = f"no step was finished in preRunningDeadlineSeconds ({limit})"
    if before.message:
        words += f": {before.message}"
    reason = Reason.IMAGE if before.reason == Reason.IMAGE else Reason.DEADLINE
    return Over(failed=True, reason=reason, message=words)


def active(told: Told, now: float) -> float:
    return told.active_seconds + (now - told.active_since if told.active_since else 0.0)


# --- the master's pod ----------------------------------------------------------------------------


def is_needed(
    accepted: Accepted,
    state: JobState | None,
    over: Over | None,
    workers: tuple[Member, ...],
    record: MasterRecord,
) -> bool:
    if over is not None or (state is not None and state.state == "Ended"):
        return False
    if accepted.wanted == "Run":
        return True
    return bool(record.pod) and any(one.alive for one in workers)  # to let them save


def follow(
    seen: Job,
    spec: Spec,
    accepted: Accepted,
    record: MasterRecord,
    members: tuple[Member, ...],
    state: JobState | None,
    answers: Answers,
    *,
    needed: bool,
) -> tuple[Accepted, MasterRecord, Manifest | None]:
    """The pod that it has, or the one that is to be made; one that lost its pod begins another attempt, since its
    journal may be lost with it, unless its restarts are used up. What neither spoke nor was seen to end is not
    counted: an operator that was killed left no pod. One that the server refused was never there: it is tried again as
    it is, so that the pauses between two tries are not cut short by what is written about them. A resume with another
    spec has a pod of its own: the one that rests is not named any more, and goes. Of a job that is deleted
    in the foreground, one that goes with it serves until its ranks have saved."""
    if not needed:
        return accepted, record, None
    current, before = master_of(members, record.pod), seen.told.accepted
    resumes = before is not None and accepted.attempt > before.attempt
    made = made_from(seen.owner, spec)
    collected = seen.deleted_at is not None and FOREGROUND in seen.finalizers
    stays = collected and current is not None and not current.over
    serves = current is not None and (current.alive or stays) and not answers.taken
    if serves and (not resumes or (current is not None and current.made_from == made)):
        return accepted, record, None
    if record.pod and not resumes and (current is not None or not answers.master):
        ended = current is not None and current.over
        restarts = record.restarts + (state is not None or ended)
        record = replace(record, restarts=restarts)
        if _worn_out(record, spec) and seen.deleted_at is None:
            return accepted, record, None
        accepted = replace(accepted, attempt=accepted.attempt + 1)
    name = pods.master_name(seen.owner, accepted.attempt)
    manifest = pods.master(seen.owner, spec, accepted.attempt)
    manifest["metadata"]["annotations"] = {MADE_FROM: made}
    return accepted, replace(record, pod=name, carried=record.restarts), manifest


def _worn_out(record: MasterRecord, spec: Spec) -> bool:
    return record.restarts - record.restarts_at_step > spec.master.max_restarts


def surplus(
    seen: Job,
    members: tuple[Member, ...],
    record: MasterRecord,
    spec: Spec,
    over: Over | None,
    accepted: Accepted,
    *,
    late: bool,
) -> tuple[Member, ...]:
    """Pods to take away: masters of earlier attempts, but the last that ended, whose logs say why; workers once the job
    is over, or where its master does not see to it."""
    policy, found = spec.cleanup.pod_policy, []
    earlier = [
        one for one in members if one.role == "master" and one.name != record.pod and one.over
    ]
    old = sorted(earlier, key=_attempt)[:-KEPT] if policy != "None" else []
    ended = seen.state is not None and seen.state.state == "Ended"
    left = over is not None and (ended or late)  # until then its master sees to them: they save
    for one in members:
        if one.deleting:
            continue
        if one.role == "master":
            gone = not one.over and (one.name != record.pod or (over is not None and late))
            gone |= one in old or (left and policy == "All")
        elif over is not None:
            gone = left and (policy == "All" or (policy == "Running" and not one.over))
        else:
            gone = accepted.wanted != "Run" and late
        if gone:
            found.append(one)
    return tuple(found)


def _attempt(master: Member) -> int:
    number = master.name.rpartition("-r")[2]
    return int(number) if number.isdecimal() else 0


def is_late(seen: Job, accepted: Accepted, spec: Spec, now: float) -> bool:
    """A master that was told to suspend or to stop has had its time."""
    told, limit = seen.told, spec.flash_checkpoint.drain_seconds + PATIENCE
    if seen.deleted_at is not None and now - seen.deleted_at >= limit:
        return True
    if told.completion_time:
        return now - seconds(told.completion_time) >= limit
    found = told.condition(status.Kind.SUSPENDED)
    saving = accepted.wanted == "Suspend" and found is not None and found.status == "Unknown"
    return saving and found is not None and now - seconds(found.last_transition_time) >= limit

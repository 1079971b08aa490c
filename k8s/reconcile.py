"""What the operator does about one job: from what is seen of it to what is written, made and taken away. Pure.

`status.accepted` comes before everything that follows from it: what is made is first written down, so that whoever
starts anew between the two finds what was meant, and makes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic.k8s import belongings, pods, status
from elastic.k8s.acceptance import accept, made_from
from elastic.k8s.jobs import Answers, Job, Unread, master_of
from elastic.k8s.kernel.resources import (
    BUDGETS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
)
from elastic.k8s.observed import Member, seconds
from elastic.k8s.pods import Manifest, Owner
from elastic.k8s.spec import Spec
from elastic.k8s.spec import read as read_spec
from elastic.k8s.status import Event, Facts, MasterRecord, Over, Reason, Told, Verdict
from elastic.proto.elasticjob import FINALIZER, MADE_FROM, Accepted, JobState
from elastic.proto.schema import Json

LOOK = 5.0
"""Seconds after which a job that is to stop is looked at again."""
PATIENCE = 60.0
"""Seconds beyond `drainSeconds` after which a master that was told to suspend or stop is not waited for."""
KEPT = 3
"""Ended masters of earlier attempts whose pods stay, but where `cleanup.podPolicy` is None: all of them do."""
MINE = Spec().managed_by
POD_GROUPS: Mapping[str, Resource] = {
    "Volcano": Resource(group="scheduling.volcano.sh", version="v1beta1", kind="PodGroup", plural="podgroups"),
    "Coscheduling": Resource(group="scheduling.x-k8s.io", version="v1alpha1", kind="PodGroup", plural="podgroups"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In the order in which it is to be done."""

    ask: Manifest | None = None
    """Dry run this pod, then plan again: the rest is empty."""
    finalizers: tuple[str, ...] | None = None
    """To be these; None: as they are."""
    belongings: tuple[tuple[Resource, Manifest], ...] = ()
    """To be there, and like this."""
    token: bool = False
    """The job's Secret, too, with a token of its own: never changed once it is there."""
    superfluous: tuple[tuple[Resource, Manifest], ...] = ()
    """Was the job's by its last spec, and is not by this one: not to be there."""
    edits: bool = False
    """What belongs to it is another by this spec than by its last."""
    told: Told | None = None
    """To be written; None: as it is."""
    note: Json | None = None
    """To be written into a status that is otherwise left as it is."""
    master: Manifest | None = None
    """To be made."""
    delete: tuple[Member, ...] = ()
    delete_job: bool = False
    events: tuple[Event, ...] = ()
    again: float | None = None
    """Seconds until it is to be looked at, whatever happens."""


def reconcile(
    seen: Job,
    members: tuple[Member, ...],
    answers: Answers,
    now: float,
    *,
    complete: bool = False,
    budgets: str = BUDGETS.version,
) -> Plan:
    """members: pods whose controller the job is. complete: look after everything that belongs to the job, also
    where nothing seems to have changed. budgets: version of the API group policy."""
    if seen.spec.get("managedBy", MINE) != MINE and seen.told.accepted is None:
        return Plan()  # once it was accepted, that is an edit like others, and refused
    if seen.deleted_at is not None and FINALIZER not in seen.finalizers:
        return Plan()
    if seen.unread is not None:
        return _left_alone(seen, seen.unread, members, now)
    accepted, acceptance, ask = accept(seen, answers, again=complete)
    if ask is not None:
        return Plan(ask=ask)
    if accepted is None:
        if seen.deleted_at is not None:
            return Plan(finalizers=_without(seen.finalizers))
        told = _tell(seen, members, seen.told, None, acceptance, None, answers, now)
        return _written(Plan(), seen, told)
    return _keep(seen, members, answers, now, accepted, acceptance, complete, budgets)


def _left_alone(seen: Job, unread: Unread, members: tuple[Member, ...], now: float) -> Plan:
    """What it is to be is not known, nor who its master is."""
    if seen.deleted_at is not None:
        late = now - seen.deleted_at >= Spec().flash_checkpoint.drain_seconds + PATIENCE
        if seen.forced or late or not any(one.alive for one in members if one.role == "worker"):
            return Plan(finalizers=_without(seen.finalizers))
    note = status.unreadable(unread.status, unread.words, seen.generation, now)
    return Plan(note=note, again=None if seen.deleted_at is None else LOOK)


# --- a job that was accepted ---------------------------------------------------------------------


def _keep(
    seen: Job,
    members: tuple[Member, ...],
    answers: Answers,
    now: float,
    accepted: Accepted,
    acceptance: Verdict,
    complete: bool,
    budgets: str,
) -> Plan:
    spec, before = read_spec(accepted.spec), seen.told
    workers = tuple(one for one in members if one.role == "worker")
    state = _current(seen.state, accepted)
    record = _count(before, members, state)
    over = _over(seen, state, spec, record, now)
    if over is not None or seen.deleted_at is not None:
        accepted = replace(accepted, wanted="Stop")

    needed = _needs_master(accepted, state, over, workers, record)
    accepted, record, manifest = _master(
        seen, spec, accepted, record, members, state, answers, needed=needed
    )
    if over is None and (over := _over(seen, state, spec, record, now)) is not None:
        accepted = replace(accepted, wanted="Stop")  # its master was the last
    accepted = replace(accepted, master=record.pod)
    state = _current(seen.state, accepted)
    late = _late(seen, accepted, spec, now)
    suspended = (
        accepted.wanted == "Suspend"
        and not workers
        and (
            (mine := master_of(members, record.pod)) is None
            or mine.over
            or state is None
            or state.state == "Suspended"
            or late
            or before.holds(status.Kind.SUSPENDED)
        )
    )
    told = _tell(
        seen, members, replace(before, master=record), accepted, acceptance, over, answers, now,
        suspended=suspended, state=None if suspended else state, replicas=spec.replicas,
    )  # fmt: skip
    delete = _surplus(seen, members, record, spec, over, accepted, late=late)
    plan = Plan(
        master=manifest,
        delete=delete,
        events=tuple(status.failures(state, now)),
        again=_again(told, spec, seen, members, now),
    )
    if FINALIZER not in seen.finalizers and seen.deleted_at is None:
        plan = replace(plan, finalizers=(*seen.finalizers, FINALIZER))
    if manifest is not None or (complete and over is None):
        plan = replace(plan, belongings=_belongings(seen.owner, spec, budgets), token=True)
    if over is None and before.accepted is not None and before.accepted.spec != accepted.spec:
        plan = _edited(plan, seen.owner, read_spec(before.accepted.spec), spec, budgets)
    if seen.deleted_at is not None:
        saved = state is not None and state.state == "Ended"
        nothing = all(one.over or one.phase == "Pending" for one in workers)
        if seen.forced or saved or nothing or late:
            return Plan(finalizers=_without(seen.finalizers))
    ttl = spec.cleanup.ttl_seconds_after_finished
    if told.completion_time and ttl is not None and seen.deleted_at is None:
        left = seconds(told.completion_time) + ttl - now
        plan = replace(plan, delete_job=left <= 0, again=_least(plan.again, max(left, 0.5)))
    if answers.lacks:
        return _lacking(plan, seen, told)
    return _written(plan, seen, told)


def heard(seen: Job, members: tuple[Member, ...]) -> bool:
    """What its master said is what it has to say. One whose pod ended well has told the job's end before: where that is
    not seen yet, the cache of jobs is behind the one of pods."""
    master, told = master_of(members, seen.told.master.pod), seen.told
    if master is None or master.phase != "Succeeded":
        return True
    ended = seen.state is not None and seen.state.state == "Ended"
    return ended or told.holds(status.Kind.COMPLETE) or told.holds(status.Kind.FAILED)


def _lacking(plan: Plan, seen: Job, told: Told) -> Plan:
    """Of what was refused: that is said, and what needs it stays as it was. The rest is done."""
    before = seen.told
    if plan.master is not None or plan.edits:
        told = replace(
            told, accepted=before.accepted, master=before.master, start_time=before.start_time
        )
        return _written(Plan(), seen, told)
    return _written(replace(plan, finalizers=None, belongings=(), token=False), seen, told)


def _current(state: JobState | None, accepted: Accepted) -> JobState | None:
    """What was said of this attempt. An end is one whichever attempt came to it: its pod may be seen to be over before
    what it said is, and another attempt have begun meanwhile."""
    known = state is not None and (state.attempt == accepted.attempt or state.state == "Ended")
    return state if known else None


def _count(told: Told, members: tuple[Member, ...], state: JobState | None) -> MasterRecord:
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


def _over(
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
    if (limit := spec.active_deadline_seconds) is not None and _active(before, now) >= limit:
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


def _active(told: Told, now: float) -> float:
    return told.active_seconds + (now - told.active_since if told.active_since else 0.0)


# --- the master's pod ----------------------------------------------------------------------------


def _needs_master(
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


def _master(
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
    spec has a pod of its own: the one that rests is not named any more, and goes."""
    if not needed:
        return accepted, record, None
    current, before = master_of(members, record.pod), seen.told.accepted
    resumes = before is not None and accepted.attempt > before.attempt
    made = made_from(seen.owner, spec)
    serves = current is not None and current.alive and not answers.taken
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


def _surplus(
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


def _late(seen: Job, accepted: Accepted, spec: Spec, now: float) -> bool:
    """A master that was told to suspend or to stop has had its time."""
    told, limit = seen.told, spec.flash_checkpoint.drain_seconds + PATIENCE
    if seen.deleted_at is not None and now - seen.deleted_at >= limit:
        return True
    if told.completion_time:
        return now - seconds(told.completion_time) >= limit
    found = told.condition(status.Kind.SUSPENDED)
    saving = accepted.wanted == "Suspend" and found is not None and found.status == "Unknown"
    return saving and found is not None and now - seconds(found.last_transition_time) >= limit


# --- what belongs to it --------------------------------------------------------------------------


def _belongings(owner: Owner, spec: Spec, budgets: str) -> tuple[tuple[Resource, Manifest], ...]:
    found: list[tuple[Resource, Manifest]] = [(SERVICES, belongings.service(owner))]
    if not spec.master.service_account_name:
        of = (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS)
        found += zip(of, belongings.account(owner), strict=True)
    return (*found, *_sized(owner, spec, budgets))


def _edited(plan: Plan, owner: Owner, old: Spec, new: Spec, budgets: str) -> Plan:
    """What names the job's size is to be like that at once, and what it has no more is to go: before the edit is
    written down, so that it is seen again where that is not done. Its master's account stays: ranks may be saving."""
    was, now = _sized(owner, old, budgets), _sized(owner, new, budgets)
    kept = {resource for resource, _ in now}
    return replace(
        plan,
        belongings=plan.belongings or (now if now != was else ()),
        superfluous=tuple(one for one in was if one[0] not in kept),
        edits=now != was,
    )


def _sized(owner: Owner, spec: Spec, budgets: str) -> tuple[tuple[Resource, Manifest], ...]:
    """What names the job's smallest size."""
    found: list[tuple[Resource, Manifest]] = []
    if (budget := belongings.budget(owner, spec, f"policy/{budgets}")) is not None:
        found.append((replace(BUDGETS, version=budgets), budget))
    if (group := belongings.pod_group(owner, spec)) is not None:
        found.append((POD_GROUPS[spec.scheduling.gang.provider], group))
    return tuple(found)


# --- what is said --------------------------------------------------------------------------------


def _tell(
    seen: Job,
    members: tuple[Member, ...],
    before: Told,
    accepted: Accepted | None,
    acceptance: Verdict,
    over: Over | None,
    answers: Answers,
    now: float,
    *,
    suspended: bool = False,
    state: JobState | None = None,
    replicas: int = 0,
) -> Told:
    workers = tuple(one for one in members if one.role == "worker")
    facts = Facts(
        accepted=accepted,
        acceptance=acceptance,
        state=state,
        workers=workers,
        master=master_of(members, before.master.pod),
        replicas=replicas,
        suspended=suspended,
        preempted=seen.queued and before.start_time is not None,
        over=over,
        refused=answers.master,
        lacks=answers.lacks,
        garbled=seen.garbled,
    )
    found = tuple(status.conditions(facts, seen.told, seen.generation, now))
    word, message = status.reason(facts, found)
    trains = state is not None and state.world_size > 0 and over is None
    since = before.active_since
    told = replace(
        before,
        observed_generation=seen.generation,
        phase=status.phase(facts, found, deleting=seen.deleted_at is not None),
        reason=word,
        message=message,
        conditions=found,
        replicas=sum(one.alive for one in workers),
        ready_replicas=state.workers.ready if state is not None and over is None else 0,
        desired_replicas=replicas,
        selector=status.selector(seen.owner.uid),
        active_seconds=before.active_seconds
        if trains or not since
        else before.active_seconds + now - since,
        active_since=(since or now) if trains else None,
        accepted=accepted,
    )
    began = before.accepted is not None and before.accepted.wanted == "Run"
    if (
        accepted is not None
        and accepted.wanted == "Run"
        and (not before.start_time or (not began and before.master.step == 0))
    ):
        told = replace(told, start_time=status.stamp(now))
    if over is not None and not before.completion_time:
        told = replace(told, completion_time=status.stamp(now))
    return told


def _written(plan: Plan, seen: Job, told: Told) -> Plan:
    if told == seen.told:
        return plan
    return replace(
        plan, told=told, events=(*plan.events, *status.events(seen.told, told.conditions))
    )


def _again(
    told: Told, spec: Spec, seen: Job, members: tuple[Member, ...], now: float
) -> float | None:
    """Until the first limit that may be reached."""
    left: list[float] = []
    if spec.active_deadline_seconds is not None and told.active_since:
        left.append(spec.active_deadline_seconds - _active(told, now))
    runs = told.accepted is not None and told.accepted.wanted == "Run"
    limit = spec.pre_running_deadline_seconds
    if limit is not None and runs and told.start_time and told.master.step == 0:
        left.append(seconds(told.start_time) + limit - now)
    if (
        told.holds(status.Kind.TRAINING)
        and seen.state is not None
        and seen.state.training.stepped_at
    ):
        left.append(seen.state.training.stepped_at + status.STALE - now)
    asked = told.accepted is not None and told.accepted.wanted != "Run"
    if asked and not told.holds(status.Kind.SUSPENDED) and any(not one.over for one in members):
        left.append(LOOK)
    return max(0.5, min(left)) if left else None


def _least(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def _without(finalizers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for one in finalizers if one != FINALIZER)

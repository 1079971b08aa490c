"""What the operator does about one job: from what is seen of it to what is written, made and taken away. Pure.

`status.accepted` comes before everything that follows from it: what is made is first written down, so that whoever
starts anew between the two finds what was meant, and makes it.
"""

from dataclasses import dataclass, replace

from elastic.k8s import belongings, masters, status
from elastic.k8s.acceptance import accept
from elastic.k8s.belongings import Belongings
from elastic.k8s.jobs import Answers, Job, Unread, master_of
from elastic.k8s.kernel.resources import BUDGETS
from elastic.k8s.observed import Member, seconds
from elastic.k8s.pods import Manifest, Owner
from elastic.k8s.spec import Spec
from elastic.k8s.spec import read as read_spec
from elastic.k8s.status import Event, Facts, Over, Told, Verdict
from elastic.proto.elasticjob import FINALIZER, Accepted, JobState
from elastic.proto.schema import Json

LOOK = 5.0
"""Seconds after which a job that is to stop is looked at again."""
MINE = Spec().managed_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In the order in which it is to be done."""

    ask: Manifest | None = None
    """Dry run this pod, then plan again: the rest is empty."""
    finalizers: tuple[str, ...] | None = None
    """To be these; None: as they are."""
    belongings: Belongings = ()
    """To be there, and like this."""
    token: bool = False
    """The job's Secret, too, with a token of its own: never changed once it is there."""
    superfluous: Belongings = ()
    """Was the job's by another spec, and is not by this one: not to be there."""
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
        late = now - seen.deleted_at >= Spec().flash_checkpoint.drain_seconds + masters.PATIENCE
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
    state = masters.current(seen.state, accepted)
    record = masters.count(before, members, state)
    over = masters.outcome(seen, state, spec, record, now)
    if over is not None or seen.deleted_at is not None:
        accepted = replace(accepted, wanted="Stop")

    needed = masters.is_needed(accepted, state, over, workers, record)
    accepted, record, manifest = masters.follow(
        seen, spec, accepted, record, members, state, answers, needed=needed
    )
    if over is None and (over := masters.outcome(seen, state, spec, record, now)) is not None:
        accepted = replace(accepted, wanted="Stop")  # its master was the last
    accepted = replace(accepted, master=record.pod)
    state = masters.current(seen.state, accepted)
    late = masters.is_late(seen, accepted, spec, now)
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
    delete = masters.surplus(seen, members, record, spec, over, accepted, late=late)
    rested = before.holds(status.Kind.SUSPENDED)
    gang = not suspended and not (rested and accepted.wanted != "Run")
    plan = Plan(
        master=manifest,
        delete=delete,
        events=tuple(status.failures(state, now)),
        again=_again(told, spec, seen, members, now),
    )
    if FINALIZER not in seen.finalizers and seen.deleted_at is None:
        plan = replace(plan, finalizers=(*seen.finalizers, FINALIZER))
    leaving = seen.deleted_at is not None  # the garbage collector may be at it already
    if manifest is not None or (complete and over is None and not leaving):
        found = belongings.of(seen.owner, spec, budgets, gang=gang)
        plan = replace(plan, belongings=found, token=True)
    if (
        over is None
        and before.accepted is not None
        and (before.accepted.spec != accepted.spec or rested is gang)
    ):
        old = read_spec(before.accepted.spec)
        plan = _edited(plan, seen.owner, old, spec, budgets, had=not rested, gang=gang)
    if over is None and before.accepted is None and seen.generation > 1:
        # An earlier look may have made what goes with another spec, and not have come to its end.
        has = belongings.sized(seen.owner, spec, budgets, gang=gang)
        others = _others(belongings.sized_by_any(seen.owner, budgets), has)
        plan = replace(plan, superfluous=others)
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


def _lacking(plan: Plan, seen: Job, told: Told) -> Plan:
    """Of what was refused: that is said, and what needs it stays as it was. The rest is done."""
    before = seen.told
    if plan.master is not None or plan.edits:
        # Whether it rests stays as it was, too: by it the next look knows the same.
        rests = before.condition(status.Kind.SUSPENDED)
        told = replace(
            told,
            accepted=before.accepted,
            master=before.master,
            start_time=before.start_time,
            conditions=tuple(
                rests if rests is not None and one.type == rests.type else one
                for one in told.conditions
            ),
        )
        return _written(Plan(), seen, told)
    return _written(replace(plan, finalizers=None, belongings=(), token=False), seen, told)


def _edited(
    plan: Plan, owner: Owner, old: Spec, new: Spec, budgets: str, *, had: bool, gang: bool
) -> Plan:
    """What names the job's size is to be like that at once, and what it has no more is to go: before the edit is
    written down, so that it is seen again where that is not done. Its master's account stays: ranks may be saving.
    had, gang: it had its gang, and has it; one that is suspended has none."""
    was = belongings.sized(owner, old, budgets, gang=had)
    now = belongings.sized(owner, new, budgets, gang=gang)
    return replace(
        plan,
        belongings=plan.belongings or (now if now != was else ()),
        superfluous=_others(belongings.sized(owner, old, budgets), now),
        edits=now != was,
    )


def _others(those: Belongings, than: Belongings) -> Belongings:
    """By kind."""
    kinds = {resource for resource, _ in than}
    return tuple(one for one in those if one[0] not in kinds)


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
        left.append(spec.active_deadline_seconds - masters.active(told, now))
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

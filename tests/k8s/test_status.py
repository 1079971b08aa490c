"""What the operator says of a job: conditions, phase, reason and events, from facts."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s import observed, status
from elastic.k8s.observed import Member, seconds
from elastic.k8s.status import Condition, Facts, Kind, Over, Phase, Reason, Told, Verdict
from elastic.proto.elasticjob import (
    Accepted,
    AvoidedNode,
    JobState,
    PodFailure,
    Training,
    Workers,
)

NOW = 1_700_000_000.0
ACCEPTED = Accepted(generation=3, spec={}, attempt=1)
GOOD = Verdict(so=True, reason=Reason.ACCEPTED)
FAILURE = PodFailure(
    time=NOW - 5, cause="Evicted", action="ReplacePod", reason="its node ran short"
)
NODE = AvoidedNode(node="node-3", reason="an Xid", until=NOW + 60)


def member(name: str = "job-worker-0-r0", **more: Any) -> Member:
    usual = Member(
        namespace="n", name=name, uid=name, job="u", role="worker", phase="Running", deleting=False,
        restarts=0, waiting="", made_from="",
    )  # fmt: skip
    return replace(usual, **more)


MASTER = member("job-master-r1", role="master")
TWO = (member("job-worker-0-r0"), member("job-worker-1-r0"))


def trains(**more: Any) -> JobState:
    usual = JobState(
        generation=3, attempt=1, state="Running", workers=Workers(desired=2, ready=2), world_size=2,
        round=1, training=Training(step=7, stepped_at=NOW),
    )  # fmt: skip
    return replace(usual, **more)


def facts(**more: Any) -> Facts:
    """Of a job of two pods, that trains."""
    usual = Facts(
        accepted=ACCEPTED, acceptance=GOOD, state=trains(), workers=TWO, master=MASTER, replicas=2,
        suspended=False, preempted=False, over=None, refused="",
    )  # fmt: skip
    return replace(usual, **more)


SUSPEND, STOP = replace(ACCEPTED, wanted="Suspend"), replace(ACCEPTED, wanted="Stop")
STOPS = trains(world_size=0)
NOTHING = facts(state=None, workers=(), master=None)


def tell(found: Facts, before: Told | None = None, now: float = NOW) -> tuple[Condition, ...]:
    return tuple(status.conditions(found, before or Told(), 4, now))


def one(found: Facts, kind: Kind, before: Told | None = None, now: float = NOW) -> Condition:
    return next(each for each in tell(found, before, now) if each.type == kind)


def told(found: Facts, now: float = NOW) -> Told:
    return Told(
        conditions=tell(found, now=now), accepted=found.accepted, desired_replicas=found.replicas
    )


# --- conditions ------------------------------------------------------------------------------------


def test_all_are_there_in_order() -> None:
    found = tell(NOTHING)
    assert [each.type for each in found] == list(Kind)
    assert {each.observed_generation for each in found} == {4}
    assert {each.last_transition_time for each in found} == {status.stamp(NOW)}


def test_a_job_that_trains() -> None:
    found = {each.type: each.status for each in tell(facts())}
    on = {kind for kind, value in found.items() if value == "True"}
    assert on == {Kind.ACCEPTED, Kind.QUOTA, Kind.SCHEDULED, Kind.READY, Kind.TRAINING}
    assert {found[kind] for kind in found.keys() - on} == {"False"}


@pytest.mark.parametrize(
    ("kind", "found", "expected", "reason", "words"),
    [
        (Kind.QUOTA, facts(refused="exceeded quota"), "False", Reason.QUOTA, "exceeded quota"),
        (Kind.QUOTA, facts(state=trains(workers=Workers(refused="no"))), "False", Reason.REFUSED, "no"),
        (Kind.READY, facts(state=None, garbled="a later format"), "Unknown", Reason.UNREADABLE, "a later format"),
        (
            Kind.SCHEDULED, facts(master=replace(MASTER, waiting="Unschedulable: 0/3 nodes"), state=None, workers=()),
            "False", Reason.UNSCHEDULABLE, "job-master-r1: Unschedulable: 0/3 nodes",
        ),
        (Kind.QUOTA, NOTHING, "Unknown", Reason.WAITING, ""),
        (Kind.QUOTA, facts(refused="x", over=Over(failed=True, reason="R")), "True", Reason.SO, ""),
        (Kind.SCHEDULED, facts(accepted=None, replicas=0), "Unknown", Reason.WAITING, ""),
        (Kind.SCHEDULED, facts(workers=TWO[:1]), "Unknown", Reason.WAITING, "1 of 2 pods run"),
        (Kind.SCHEDULED, facts(workers=(TWO[0], member(phase="Pending"))), "Unknown", Reason.WAITING, "1 of 2 pods run"),
        (Kind.SCHEDULED, facts(workers=(TWO[0], member(deleting=True))), "Unknown", Reason.WAITING, "1 of 2 pods run"),
        (Kind.SCHEDULED, facts(accepted=SUSPEND), "False", Reason.ASKED, ""),
        (Kind.SCHEDULED, facts(accepted=STOP), "False", Reason.ASKED, ""),
        (
            Kind.SCHEDULED, facts(state=trains(workers=Workers(pending=("p: no node has room", "q: too")))),
            "False", Reason.UNSCHEDULABLE, "p: no node has room; q: too",
        ),
        (
            Kind.SCHEDULED, facts(state=trains(workers=Workers(pending=("p: ImagePullBackOff: no such",)))),
            "False", Reason.IMAGE, "p: ImagePullBackOff: no such",
        ),
        (
            Kind.SCHEDULED, facts(state=trains(workers=Workers(pending=("p: RegistryUnavailable: down",)))),
            "False", Reason.IMAGE, "p: RegistryUnavailable: down",
        ),
        (
            Kind.SCHEDULED, facts(state=trains(workers=Workers(pending=("p: 0/3 nodes: ImageLocality",)))),
            "False", Reason.UNSCHEDULABLE, "p: 0/3 nodes: ImageLocality",
        ),
        (
            Kind.SCHEDULED, facts(master=replace(MASTER, waiting="ErrImagePull: no"), state=None),
            "False", Reason.IMAGE, "job-master-r1: ErrImagePull: no",
        ),
        (Kind.SCHEDULED, facts(master=replace(MASTER, waiting="CrashLoopBackOff: x")), "True", Reason.SO, ""),
        (
            Kind.RECOVERING, facts(master=replace(MASTER, waiting="CrashLoopBackOff: x")),
            "True", Reason.MASTER, "job-master-r1: CrashLoopBackOff: x",
        ),
        (Kind.RECOVERING, facts(state=None), "False", Reason.SO, ""),
        (
            Kind.RECOVERING, facts(state=None, accepted=replace(ACCEPTED, attempt=2)),
            "True", Reason.MASTER, "",
        ),
        (
            Kind.RECOVERING, facts(state=None, workers=(), accepted=replace(ACCEPTED, attempt=2)),
            "False", Reason.SO, "",
        ),
        (Kind.RECOVERING, facts(state=replace(STOPS, round=0)), "False", Reason.SO, ""),
        (Kind.RECOVERING, facts(state=STOPS), "True", Reason.WAITING, ""),
        (Kind.RECOVERING, facts(state=replace(STOPS, state="Starting", last_failures=(FAILURE,))), "False", Reason.SO, ""),
        (
            Kind.RECOVERING, facts(state=replace(STOPS, last_failures=(replace(FAILURE, cause="Other"), FAILURE))),
            "True", "Evicted", "its node ran short",
        ),
        (Kind.RECOVERING, facts(state=STOPS, accepted=SUSPEND), "False", Reason.SO, ""),
        (Kind.READY, facts(state=STOPS), "False", Reason.SO, ""),
        (Kind.READY, facts(over=Over(failed=False, reason="Finished")), "False", "Finished", ""),
        (Kind.TRAINING, facts(state=STOPS), "False", Reason.WAITING, ""),
        (Kind.TRAINING, facts(state=trains(training=Training())), "Unknown", Reason.WAITING, ""),
        (
            Kind.TRAINING, facts(state=trains(training=Training(step=1, stepped_at=NOW - status.STALE))),
            "True", Reason.SO, "",
        ),
        (
            Kind.TRAINING, facts(state=trains(training=Training(step=1, stepped_at=NOW - status.STALE - 1))),
            "False", Reason.NO_STEP, f"since {status.stamp(NOW - status.STALE - 1)}",
        ),
        (
            Kind.DEGRADED, facts(state=trains(workers=Workers(ready=1))),
            "True", Reason.FEWER, "1 of 2 pods train",
        ),
        (Kind.DEGRADED, facts(state=trains(avoided_nodes=(NODE, NODE))), "True", Reason.AVOIDING, "node-3, node-3"),
        (Kind.DEGRADED, facts(state=replace(STOPS, avoided_nodes=(NODE,))), "False", Reason.SO, ""),
        (Kind.SUSPENDED, facts(accepted=SUSPEND), "Unknown", Reason.SAVING, ""),
        (Kind.SUSPENDED, facts(accepted=SUSPEND, suspended=True), "True", Reason.ASKED, ""),
        (Kind.SUSPENDED, facts(accepted=STOP), "False", Reason.SO, ""),
        (
            Kind.SUSPENDED, facts(accepted=SUSPEND, preempted=True),
            "Unknown", Reason.PREEMPTED, "its queue took its place back",
        ),
        (
            Kind.SUSPENDED, facts(accepted=SUSPEND, preempted=True, suspended=True),
            "True", Reason.PREEMPTED, "its queue took its place back",
        ),
        (Kind.SUSPENDED, facts(preempted=True), "False", Reason.SO, ""),
        (Kind.COMPLETE, facts(over=Over(failed=False, reason="Finished", message="m")), "True", "Finished", "m"),
        (Kind.COMPLETE, facts(over=Over(failed=True, reason="UserError")), "False", Reason.SO, ""),
        (Kind.FAILED, facts(over=Over(failed=True, reason="UserError", message="m")), "True", "UserError", "m"),
        (Kind.ACCEPTED, facts(acceptance=Verdict(so=None, reason=Reason.CHECKING)), "Unknown", Reason.CHECKING, ""),
    ],
)  # fmt: skip
def test_a_condition(kind: Kind, found: Facts, expected: str, reason: str, words: str) -> None:
    said = one(found, kind)
    assert (said.status, said.reason, said.message) == (expected, reason, words)


def test_words_are_one_short_line() -> None:
    found = one(facts(refused="a\n  b\t" + "c" * 2000), Kind.QUOTA)
    assert found.message.startswith("a b ccc")
    assert len(found.message) == 1000


def test_time_is_that_of_the_change() -> None:
    first = told(facts())
    same = one(facts(), Kind.READY, first, NOW + 9)
    assert same.last_transition_time == status.stamp(NOW)
    other = one(facts(state=STOPS), Kind.READY, first, NOW + 9)
    assert other.last_transition_time == status.stamp(NOW + 9)
    words = one(facts(refused="b"), Kind.QUOTA, told(facts(refused="a")), NOW + 9)
    assert (words.message, words.last_transition_time) == ("b", status.stamp(NOW))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (trains(generation=2), "True"),
        (trains(), "True"),
        (trains(workers=Workers(ready=3)), "False"),
        (trains(workers=Workers(ready=2, pending=("no room",))), "False"),
        (replace(STOPS, round=0), "False"),
        (None, "False"),
    ],
)
def test_resizing(state: JobState | None, expected: str) -> None:
    """From 2 to 3: it lasts until as many train, or it is known that they cannot."""
    assert one(facts(state=state, replicas=3), Kind.RESIZING, told(facts())).status == expected


def test_resizing_lasts_beyond_the_look_that_saw_it_asked() -> None:
    found = facts(replicas=3)
    first = replace(told(facts()), desired_replicas=2)
    then = replace(first, conditions=tell(found, first), desired_replicas=3)
    assert one(found, Kind.RESIZING, then).status == "True"
    assert one(found, Kind.DEGRADED, then).status == "False"
    assert one(facts(replicas=3), Kind.RESIZING, replace(then, conditions=())).status == "False"


# --- in one word -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "deleting", "phase"),
    [
        (NOTHING, False, Phase.PENDING),
        (facts(accepted=None, state=None, workers=(), master=None), False, Phase.PENDING),
        (facts(state=None, workers=(member(phase="Pending"),)), False, Phase.PENDING),
        (facts(state=None), False, Phase.STARTING),
        (facts(state=replace(STOPS, round=0), workers=()), False, Phase.STARTING),
        (facts(), False, Phase.RUNNING),
        (facts(state=STOPS), False, Phase.RECOVERING),
        (facts(state=replace(STOPS, state="Starting")), False, Phase.STARTING),
        (facts(accepted=SUSPEND), False, Phase.SUSPENDING),
        (facts(accepted=SUSPEND, suspended=True), False, Phase.SUSPENDED),
        (facts(accepted=STOP), True, Phase.STOPPING),
        (facts(over=Over(failed=False, reason="R")), False, Phase.SUCCEEDED),
        (facts(over=Over(failed=True, reason="R")), True, Phase.FAILED),
    ],
)
def test_a_phase(found: Facts, deleting: bool, phase: Phase) -> None:
    assert status.phase(found, tell(found), deleting=deleting) == phase


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (facts(), ""),
        (NOTHING, ""),
        (facts(accepted=STOP), ""),
        (facts(acceptance=Verdict(so=False, reason=Reason.EDIT), accepted=SUSPEND), Reason.EDIT),
        (facts(accepted=SUSPEND, refused="x"), Reason.SAVING),
        (facts(accepted=SUSPEND, suspended=True), Reason.ASKED),
        (facts(accepted=SUSPEND, suspended=True, preempted=True), Reason.PREEMPTED),
        (facts(refused="x", state=trains(workers=Workers(pending=("p",)))), Reason.REFUSED),
        (facts(state=None, garbled="x"), Reason.UNREADABLE),
        (facts(state=replace(STOPS, workers=Workers(pending=("p",)))), Reason.UNSCHEDULABLE),
        (facts(state=replace(STOPS, last_failures=(FAILURE,))), "Evicted"),
        (facts(state=trains(training=Training(stepped_at=1.0))), Reason.NO_STEP),
        (facts(refused="x", over=Over(failed=True, reason="UserError")), "UserError"),
    ],
)
def test_what_matters_most(found: Facts, reason: str) -> None:
    assert status.reason(found, tell(found))[0] == reason


# --- events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (facts(), facts(), []),
        (None, NOTHING, [("Accepted", False)]),
        (facts(state=replace(STOPS, round=0)), facts(), [("Ready", False)]),
        (facts(), facts(refused="no"), [(Reason.REFUSED, True)]),
        (facts(refused="no"), facts(refused="no more"), []),
        (facts(), facts(state=replace(STOPS, last_failures=(FAILURE,))), [("Evicted", True)]),
        (facts(), facts(acceptance=Verdict(so=False, reason=Reason.EDIT)), [(Reason.EDIT, True)]),
        (facts(), facts(acceptance=Verdict(so=None, reason=Reason.CHECKING)), []),
        (facts(), facts(accepted=SUSPEND), []),
        (facts(accepted=SUSPEND), facts(accepted=SUSPEND, suspended=True), [("Suspended", False)]),
        (facts(), facts(state=trains(workers=Workers(ready=1))), [(Reason.FEWER, True)]),
        (facts(), facts(over=Over(failed=False, reason="Finished")), [("Complete", False)]),
        (facts(), facts(over=Over(failed=True, reason="UserError")), [("UserError", True)]),
    ],
)
def test_events(before: Facts | None, after: Facts, expected: list[tuple[str, bool]]) -> None:
    """state None before: it was looked at for the first time."""
    first = Told() if before is None else told(before, NOW - 60)
    found = list(status.events(first, tell(after, first)))
    assert [(each.reason, each.warns) for each in found] == expected
    assert all(each.note for each in found)


def test_failures_are_news_for_a_while() -> None:
    old = replace(FAILURE, time=NOW - status.LATELY)
    (event,) = status.failures(trains(last_failures=(old, FAILURE)), NOW)
    assert (event.reason, event.warns, event.at) == ("Evicted", True, status.stamp(NOW - 5))
    assert event.note == "its node ran short: ReplacePod"
    assert list(status.failures(None, NOW)) == []


def test_small_things() -> None:
    assert status.stamp(NOW) == "2023-11-14T22:13:20Z"
    assert seconds(status.stamp(NOW + 0.9)) == NOW
    assert status.selector("u") == "elastic-runtime.dev/job-uid=u,elastic-runtime.dev/role=worker"


# --- anything ----------------------------------------------------------------------------------------


MEMBERS = st.builds(
    member, phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
    deleting=st.booleans(), waiting=st.sampled_from(["", "ErrImagePull: x", "CrashLoopBackOff: x"]),
)  # fmt: skip
STATES = st.builds(
    trains,
    state=st.sampled_from(["Starting", "Running", "Suspending", "Suspended", "Stopping", "Ended"]),
    generation=st.integers(1, 4), world_size=st.integers(0, 2), round=st.integers(0, 2),
    workers=st.builds(
        Workers, ready=st.integers(0, 3), refused=st.sampled_from(["", "quota"]),
        pending=st.sampled_from([(), ("p: no room",), ("p: ErrImagePull",)]),
    ),
    training=st.builds(Training, stepped_at=st.sampled_from([None, 1.0, NOW])),
    last_failures=st.sampled_from([(), (FAILURE,)]),
    avoided_nodes=st.sampled_from([(), (NODE,)]),
)  # fmt: skip
FACTS = st.builds(
    Facts,
    accepted=st.sampled_from([None, ACCEPTED, SUSPEND, STOP, replace(ACCEPTED, attempt=2)]),
    acceptance=st.sampled_from([GOOD, Verdict(so=False, reason=Reason.INVALID, message="m")]),
    state=st.none() | STATES,
    workers=st.lists(MEMBERS, max_size=3).map(tuple),
    master=st.none() | MEMBERS,
    replicas=st.integers(0, 3),
    suspended=st.booleans(),
    preempted=st.booleans(),
    over=st.sampled_from([None, None, Over(failed=True, reason="R"), Over(failed=False, reason="R")]),
    refused=st.sampled_from(["", "exceeded quota"]),
    garbled=st.sampled_from(["", "a later format"]),
).map(lambda found: replace(found, garbled="" if found.state else found.garbled))  # fmt: skip


@settings(max_examples=150)
@given(st.lists(FACTS, min_size=1, max_size=4), st.booleans())
def test_whatever_happens(course: list[Facts], deleting: bool) -> None:
    """Twice the same facts: the same conditions, and no event; times change with what is so, and never else."""
    course = [each for each in course for _ in range(2)]
    before, seen = Told(), []
    for number, found in enumerate(course):
        now = NOW + 10 * number
        said = tell(found, before, now)
        events = list(status.events(before, said))
        before = replace(
            before, conditions=said, accepted=found.accepted, desired_replicas=found.replicas
        )
        seen.append((said, events))
        assert [each.type for each in said] == list(Kind)
        assert all(each.reason.isalpha() for each in said)
        on = {each.type for each in said if each.status == "True"}
        assert (found.over is not None) == bool(on & {Kind.COMPLETE, Kind.FAILED})
        assert found.over is None or not on & {Kind.READY, Kind.TRAINING, Kind.RESIZING}
        assert Kind.READY in on or not on & {Kind.TRAINING, Kind.DEGRADED}
        by = {each.type: each for each in said}
        assert Kind.RESIZING not in on or by[Kind.DEGRADED].reason != Reason.FEWER
        phase = status.phase(found, said, deleting=deleting)
        assert (phase in (Phase.SUCCEEDED, Phase.FAILED)) == (found.over is not None)
        reason, _ = status.reason(found, said)
        assert found.over is not None or reason not in (Reason.WAITING, Reason.SO)
    for (old, _), (new, events) in pairwise(seen):
        for one, other in zip(old, new, strict=True):
            moved = one.last_transition_time != other.last_transition_time
            assert moved == (one.status != other.status)
        if old == new:
            assert events == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"status": "False", "reason": "Unschedulable", "message": "0/3 nodes"},
            "Unschedulable: 0/3 nodes",
        ),
        ({"status": "False", "reason": "Unschedulable"}, "Unschedulable: no node has room"),
        ({"status": "False", "reason": "SchedulingGated", "message": "m"}, ""),
        ({"status": "True"}, ""),
    ],
)
def test_a_member_that_the_scheduler_has_no_place_for(said: dict[str, str], words: str) -> None:
    raw = {"status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", **said}]}}
    assert observed.member(raw).waiting == words

"""What the operator does about a job, step by step, in a cluster that is a few tuples."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic.k8s import jobs, masters, status
from elastic.k8s import reconcile as it
from elastic.k8s.jobs import Answers
from elastic.k8s.observed import Member
from elastic.k8s.reconcile import Plan
from elastic.k8s.status import Kind, Phase, Reason, Told
from elastic.proto import schema
from elastic.proto.elasticjob import FINALIZER, FORCE_DELETE, MADE_FROM, JobState, Training, Workers

POD = {"image": "i"}
DRAIN = 120.0
T0 = 1_700_000_000.0


@dataclass
class World:
    """One job, its pods and its clock; `look` is what the operator does."""

    spec: dict[str, Any] = field(default_factory=lambda: {**POD, "worker": {"replicas": 2}})
    now: float = T0
    generation: int = 1
    status: dict[str, Any] = field(default_factory=dict)
    finalizers: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    deleted_at: float | None = None
    suspends: str = "kubectl-edit"
    """Who wrote spec.suspend."""
    pods: dict[str, Member] = field(default_factory=dict)
    template: str = ""
    """The server's words against its pods."""
    made: list[str] = field(default_factory=list)
    """Every master's pod that ever was."""
    gone: bool = False

    def raw(self) -> dict[str, Any]:
        meta = {
            "name": "job", "namespace": "n", "uid": "u", "generation": self.generation,
            "finalizers": list(self.finalizers), "annotations": self.annotations,
            "managedFields": [{"manager": self.suspends, "fieldsV1": {"f:spec": {"f:suspend": {}}}}],
        }  # fmt: skip
        if self.deleted_at is not None:
            meta["deletionTimestamp"] = status.stamp(self.deleted_at)
        return {
            "metadata": meta,
            "spec": copy.deepcopy(self.spec),
            "status": copy.deepcopy(self.status),
        }

    def plan(self, answers: Answers | None = None, *, complete: bool = False) -> Plan:
        seen, pods = jobs.job(self.raw()), tuple(self.pods.values())
        answers = answers or Answers()
        found = it.reconcile(seen, pods, answers, self.now, complete=complete)
        if found.ask is not None:
            answers = replace(answers, template=self.template)
            found = it.reconcile(seen, pods, answers, self.now, complete=complete)
            assert found.ask is None
        return found

    def look(self, steps: int = 99) -> Plan:
        """Plan, and do the first `steps` of it, as an operator that dies then does."""
        plan = self.plan()
        todo = [self._finalize, self._write, self._make, self._take, self._end]
        for one in todo[:steps]:
            one(plan)
        return plan

    def settle(self, after: Callable[[], None] = lambda: None) -> None:
        for _ in range(20):
            plan = self.look()
            after()
            if (
                plan.told is None
                and plan.master is None
                and not plan.delete
                and plan.finalizers is None
            ):
                return
        raise AssertionError(f"it never rests: {plan}")

    def _finalize(self, plan: Plan) -> None:
        if plan.finalizers is not None:
            self.finalizers = list(plan.finalizers)
            self.gone = self.deleted_at is not None and not self.finalizers

    def _write(self, plan: Plan) -> None:
        if plan.told is not None:
            before = jobs.job(self.raw()).told.conditions
            for old, new in zip(before, plan.told.conditions, strict=False):
                moved = old.last_transition_time != new.last_transition_time
                assert not moved or old.status != new.status
            job = self.status.get("job")
            self.status = schema.dump(plan.told)
            if job is not None:
                self.status["job"] = job

    def _make(self, plan: Plan) -> None:
        if plan.master is not None:
            assert plan.token
            assert plan.belongings
            name = plan.master["metadata"]["name"]
            assert name not in self.pods
            assert name not in self.made, "a name comes twice"
            self.made.append(name)
            note = plan.master["metadata"]["annotations"][MADE_FROM]
            self.pods[name] = pod(name, "master", made_from=note)

    def _take(self, plan: Plan) -> None:
        for one in plan.delete:
            self.pods.pop(one.name, None)

    def _end(self, plan: Plan) -> None:
        if plan.delete_job:
            self.deleted_at = self.now

    # --- what others do ----------------------------------------------------------------------

    def edit(self, **spec: Any) -> None:
        self.spec = {**self.spec, **spec}
        self.generation += 1

    def say(self, state: str, **more: Any) -> None:
        """As the master of the current attempt, or of the one that is named."""
        usual = {"generation": self.generation, "attempt": self.accepted["attempt"]}
        self.status["job"] = schema.dump(JobState(**{**usual, "state": state, **more}))

    def train(self, step: int = 5, **more: Any) -> None:
        """Two pods of workers, that do steps."""
        for slot in range(2):
            name = f"job-worker-{slot}-r0"
            self.pods[name] = pod(name, "worker")
        self.say(
            "Running", world_size=2, round=1, workers=Workers(desired=2, ready=2),
            training=Training(step=step, stepped_at=self.now), **more,
        )  # fmt: skip

    def lose_workers(self) -> None:
        self.pods = {n: p for n, p in self.pods.items() if p.role == "master"}

    @property
    def accepted(self) -> dict[str, Any]:
        return dict(self.status.get("accepted", {}))

    def condition(self, kind: Kind) -> dict[str, Any]:
        return next(dict(c) for c in self.status["conditions"] if c["type"] == kind)

    def holds(self, kind: Kind) -> bool:
        return bool(self.condition(kind)["status"] == "True")

    def masters(self) -> list[str]:
        return [p.name for p in self.pods.values() if p.role == "master" and p.alive]


def pod(name: str, role: str, **more: Any) -> Member:
    usual = Member(
        namespace="n", name=name, uid=name, job="u", role=role, phase="Running", deleting=False,
        restarts=0, waiting="", made_from="",
    )  # fmt: skip
    return replace(usual, **more)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def trains(world: World) -> World:
    world.settle()
    world.train()
    world.settle()
    return world


def test_a_first_look_asks_about_the_pod_and_then_makes_all_of_it(world: World) -> None:
    seen = jobs.job(world.raw())
    asked = it.reconcile(seen, (), Answers(), world.now)
    assert asked.ask is not None
    assert asked == Plan(ask=asked.ask)
    plan = world.look()
    assert plan.finalizers == (FINALIZER,)
    assert plan.master is not None
    assert [resource.kind for resource, _ in plan.belongings] == [
        "Service", "ServiceAccount", "Role", "RoleBinding", "PodDisruptionBudget",
    ]  # fmt: skip
    assert world.masters() == ["job-master-r1"]
    assert world.accepted["wanted"] == "Run"
    assert world.accepted["spec"]["worker"]["replicas"] == 2
    assert world.holds(Kind.ACCEPTED)
    world.settle()
    assert world.plan().told is None


def test_every_condition_is_there_and_keeps_its_time(world: World) -> None:
    world.settle()
    kinds = [c["type"] for c in world.status["conditions"]]
    assert kinds == list(Kind)
    first = world.condition(Kind.ACCEPTED)["lastTransitionTime"]
    world.now += 50
    world.train()
    world.settle()
    assert world.condition(Kind.ACCEPTED)["lastTransitionTime"] == first
    assert world.condition(Kind.READY)["lastTransitionTime"] == status.stamp(world.now)
    assert world.holds(Kind.TRAINING)
    assert world.status["phase"] == Phase.RUNNING
    assert (world.status["readyReplicas"], world.status["replicas"]) == (2, 2)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"elastic": {"min": 3, "max": 2}}, "min"),
        ({"worker": {"replicas": 0}}, "spec.worker.replicas"),
        ({"worker": "two"}, "spec.worker"),
        ({"image": ""}, "image"),
    ],
)
def test_a_bad_spec_is_a_condition_and_nothing_is_made(
    world: World, spec: dict[str, Any], words: str
) -> None:
    world.edit(**spec)
    plan = world.look()
    assert (plan.master, plan.belongings, plan.finalizers) == (None, (), None)
    found = world.condition(Kind.ACCEPTED)
    assert (found["status"], found["reason"]) == ("False", Reason.INVALID)
    assert words in found["message"]
    assert (world.status["phase"], world.status["reason"]) == (Phase.PENDING, Reason.INVALID)
    assert "accepted" not in world.status
    world.edit(**{**POD, "worker": {"replicas": 2}, "elastic": {}})
    world.settle()
    assert world.masters() == ["job-master-r1"]


def test_a_template_that_the_server_refuses(world: World) -> None:
    world.template = "the server says no"
    world.settle()
    assert world.condition(Kind.ACCEPTED)["reason"] == Reason.TEMPLATE
    assert world.condition(Kind.ACCEPTED)["message"] == "the server says no"
    assert world.pods == {}


KINDS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from(["", "x", "1k", "8e0", "1Ei", "64gb", "+1Gi", "1.5.5Gi"]),
    st.lists(st.none() | st.text(max_size=2), max_size=2), st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
)  # fmt: skip
PLACES = (
    "metadata", "metadata.labels", "metadata.annotations", "spec", "spec.containers", "spec.volumes", "spec.affinity",
    "spec.affinity.nodeAffinity", "spec.nodeSelector", "spec.tolerations", "spec.terminationGracePeriodSeconds",
    "spec.securityContext", "spec.hostNetwork", "main.env", "main.volumeMounts", "main.resources", "main.command",
    "main.resources.limits", "main.resources.requests", "main.resources.limits.memory", "main.securityContext",
    "main.resources.requests.memory", "main.resources.limits.nvidia.com/gpu", "main.image", "main.args",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    place=st.sampled_from(PLACES), value=KINDS,
    beside=st.sampled_from([{}, {"flashCheckpoint": {"memory": "1Gi"}}, {"scheduling": {"nodeSelector": {"a": "b"}}}]),
)  # fmt: skip
def test_a_template_with_anything_in_it_is_judged_in_words(
    place: str, value: Any, beside: dict[str, Any]
) -> None:
    main: dict[str, Any] = {"name": "main", "image": "i", "command": ["elastic-run", "x"]}
    template: dict[str, Any] = {"metadata": {}, "spec": {"containers": [main]}}
    first, *rest = place.split(".", 3)
    at = {"main": main}.get(first, template)
    for key in [*([] if first == "main" else [first]), *rest][:-1]:
        at = at.setdefault(key, {})
    at[place.split(".", 3)[-1]] = value
    world = World(spec={"worker": {"replicas": 2, "template": template}, **beside})
    world.look()
    found = world.condition(Kind.ACCEPTED)
    if found["status"] == "False":
        assert found["reason"] == Reason.INVALID
        assert found["message"].startswith("spec.worker.template")


def test_a_refused_edit_leaves_the_job_as_it_was(trains: World) -> None:
    before = trains.accepted
    trains.edit(image="other")
    trains.settle()
    assert trains.accepted == before
    assert trains.condition(Kind.ACCEPTED)["reason"] == Reason.EDIT
    assert trains.status["phase"] == Phase.RUNNING
    assert trains.status["observedGeneration"] == trains.generation


def test_a_suspend_is_obeyed_whatever_else_is_asked_for(trains: World) -> None:
    trains.edit(image="other", suspend=True)
    trains.settle()
    assert trains.accepted["wanted"] == "Suspend"
    assert trains.status["phase"] == Phase.SUSPENDING


def test_it_resizes_until_that_many_train(world: World) -> None:
    world.spec = {**POD, "worker": {"replicas": 2}, "elastic": {"min": 1, "max": 4}}
    world.settle()
    world.train()
    world.settle()
    world.edit(worker={"replicas": 3})
    world.settle()
    assert (world.status["phase"], world.status["desiredReplicas"]) == (Phase.RESIZING, 3)
    assert not world.holds(Kind.DEGRADED)
    world.say("Running", world_size=3, round=2, workers=Workers(desired=3, ready=3))
    world.settle()
    assert world.status["phase"] == Phase.RUNNING


def test_one_that_was_never_to_run_has_no_master(world: World) -> None:
    world.edit(suspend=True)
    world.settle()
    assert (world.pods, world.status["phase"]) == ({}, Phase.SUSPENDED)
    assert world.finalizers == [FINALIZER]
    world.edit(suspend=False)
    world.settle()
    assert world.masters() == ["job-master-r1"]
    assert world.accepted["attempt"] == 1


def suspend(world: World) -> None:
    world.edit(suspend=True)
    world.settle()
    assert world.status["phase"] == Phase.SUSPENDING
    assert world.condition(Kind.SUSPENDED)["status"] == "Unknown"
    world.lose_workers()
    world.say("Suspended")
    world.settle()
    assert world.status["phase"] == Phase.SUSPENDED


def test_suspended_and_resumed_it_has_the_same_master_and_another_attempt(trains: World) -> None:
    suspend(trains)
    trains.edit(suspend=False)
    trains.settle()
    assert trains.masters() == ["job-master-r1"]
    assert (trains.accepted["wanted"], trains.accepted["attempt"]) == ("Run", 2)
    assert not trains.holds(Kind.SUSPENDED)


@pytest.mark.parametrize(
    ("manager", "reason"),
    [("kueue", Reason.PREEMPTED), ("kueue-admission", Reason.PREEMPTED), ("kueuectl2", Reason.ASKED),
     ("", Reason.ASKED)],
)  # fmt: skip
def test_what_its_queue_suspends_is_preempted_and_not_counted(
    world: World, manager: str, reason: Reason
) -> None:
    world.suspends = manager
    world.edit(suspend=True)
    world.settle()
    assert world.condition(Kind.SUSPENDED)["reason"] == Reason.ASKED, "it waits for its first turn"
    world.edit(suspend=False)
    world.settle()
    world.train()
    world.settle()
    world.edit(suspend=True)
    world.settle()
    world.lose_workers()
    world.say("Suspended")
    world.settle()
    assert world.condition(Kind.SUSPENDED)["reason"] == reason
    assert world.status["reason"] == reason
    world.edit(suspend=False)
    world.settle()
    assert world.masters() == ["job-master-r1"]
    assert world.status["master"]["restarts"] == 0


def test_resumed_too_soon_it_saves_first(trains: World) -> None:
    trains.edit(suspend=True)
    trains.settle()
    trains.edit(suspend=False)
    trains.settle()
    assert trains.accepted["wanted"] == "Suspend"
    trains.lose_workers()
    trains.say("Suspended")
    trains.settle()
    assert (trains.accepted["wanted"], trains.accepted["attempt"]) == ("Run", 2)


def test_what_is_edited_meanwhile_gets_a_master_of_its_own(trains: World) -> None:
    suspend(trains)
    trains.edit(image="other")
    trains.settle()
    assert trains.masters() == ["job-master-r1"], "it rests"
    trains.edit(suspend=False)
    trains.settle()
    assert trains.masters() == ["job-master-r2"]
    assert (trains.accepted["attempt"], trains.accepted["master"]) == (2, "job-master-r2")
    assert trains.status["master"]["restarts"] == 0


def test_edited_and_resumed_at_once(trains: World) -> None:
    """In one look, whoever rests: it is not waited for, also where its node has died under it."""
    suspend(trains)
    trains.edit(image="other", suspend=False)
    plan = trains.look()
    assert [one.name for one in plan.delete] == ["job-master-r1"]
    assert trains.masters() == ["job-master-r2"]
    assert trains.accepted["spec"]["image"] == "other"


def test_a_master_that_goes_while_suspended_is_not_named_again(trains: World) -> None:
    """In its last seconds it would take the next attempt for its own."""
    suspend(trains)
    trains.pods["job-master-r1"] = replace(trains.pods["job-master-r1"], deleting=True)
    trains.edit(suspend=False)
    trains.settle()
    assert trains.masters() == ["job-master-r2"]
    assert (trains.accepted["attempt"], trains.accepted["master"]) == (2, "job-master-r2")
    assert trains.status["master"]["restarts"] == 0


def test_the_master_that_is_meant_is_named(trains: World) -> None:
    assert trains.accepted["master"] == "job-master-r1"
    del trains.pods["job-master-r1"]
    trains.settle()
    assert trains.accepted["master"] == "job-master-r2"


def test_a_master_that_does_not_suspend_is_not_waited_for(trains: World) -> None:
    trains.edit(suspend=True)
    trains.settle()
    trains.now += DRAIN + masters.PATIENCE - 1
    assert trains.plan().delete == ()
    trains.now += 2
    assert [one.name for one in trains.plan().delete] == ["job-worker-0-r0", "job-worker-1-r0"]
    trains.settle()
    assert trains.holds(Kind.SUSPENDED)


@pytest.mark.parametrize("how", ["gone", "deleting", "Failed"])
def test_a_lost_master_is_followed_by_another_attempts(trains: World, how: str) -> None:
    name = "job-master-r1"
    if how == "gone":
        del trains.pods[name]
    elif how == "deleting":
        trains.pods[name] = replace(trains.pods[name], deleting=True)
    else:
        trains.pods[name] = replace(trains.pods[name], phase="Failed")
    trains.settle()
    assert trains.masters() == ["job-master-r2"]
    assert trains.accepted["attempt"] == 2
    assert trains.status["master"]["restarts"] == 1
    assert trains.status["phase"] == Phase.RECOVERING


def test_masters_that_come_to_nothing_fail_the_job(trains: World) -> None:
    trains.edit(suspend=True)
    name = trains.masters()[0]
    trains.edit(suspend=False)
    for restarts in (9, 10):
        trains.pods[name] = replace(trains.pods[name], restarts=restarts)
        trains.settle()
        assert not trains.holds(Kind.FAILED)
    trains.train(step=6)
    trains.settle()
    trains.pods[name] = replace(trains.pods[name], restarts=20)
    trains.settle()
    assert not trains.holds(Kind.FAILED), "a step lets the count begin anew"
    trains.pods[name] = replace(trains.pods[name], restarts=21)
    trains.settle()
    assert trains.condition(Kind.FAILED)["reason"] == Reason.MASTER
    assert trains.accepted["wanted"] == "Stop"


def test_a_master_that_an_operator_did_not_come_to_make_is_not_counted(world: World) -> None:
    world.look(steps=2)
    world.settle()
    assert world.masters() == ["job-master-r2"]
    assert world.status["master"]["restarts"] == 0


def test_restarts_of_all_its_masters_are_counted(trains: World) -> None:
    name = trains.masters()[0]
    trains.pods[name] = replace(trains.pods[name], restarts=2)
    trains.settle()
    del trains.pods[name]
    trains.settle()
    name = trains.masters()[0]
    trains.pods[name] = replace(trains.pods[name], restarts=1)
    trains.settle()
    assert trains.status["master"]["restarts"] == 4


def test_masters_of_earlier_attempts_go(trains: World) -> None:
    trains.pods["job-master-r0"] = pod("job-master-r0", "master")
    trains.settle()
    assert trains.masters() == ["job-master-r1"]


@pytest.mark.parametrize(("policy", "left"), [("None", 6), ("Running", 4), ("All", 4)])
def test_the_last_masters_that_ended_stay_for_their_logs(
    world: World, policy: str, left: int
) -> None:
    world.edit(cleanup={"podPolicy": policy})
    world.settle()
    for _ in range(5):
        (name,) = world.masters()
        world.pods[name] = replace(world.pods[name], phase="Failed")
        world.settle()
    assert list(world.pods) == [f"job-master-r{n}" for n in range(7 - left, 7)]
    world.say("Ended", outcome="Failed", reason="Why")
    world.settle()
    assert len(world.pods) == (0 if policy == "All" else left)


def test_a_name_that_is_taken_is_passed_over(world: World) -> None:
    world.look(steps=2)
    plan = world.plan(Answers(taken=True))
    assert plan.master is not None
    assert plan.master["metadata"]["name"] == "job-master-r2"


@pytest.mark.parametrize(
    ("outcome", "kind", "phase"),
    [("Succeeded", Kind.COMPLETE, Phase.SUCCEEDED), ("Failed", Kind.FAILED, Phase.FAILED)],
)
def test_an_end(trains: World, outcome: str, kind: Kind, phase: Phase) -> None:
    trains.say("Ended", outcome=outcome, reason="Why", message="so")
    trains.settle()
    assert trains.holds(kind)
    assert (trains.status["phase"], trains.status["reason"]) == (phase, "Why")
    assert trains.status["message"] == "so"
    del trains.pods["job-master-r1"]
    trains.now += 9999
    trains.settle()
    assert trains.masters() == []


def test_an_end_that_is_heard_of_after_the_pods(trains: World) -> None:
    """They are two watches: by then another attempt has begun, and it is over, too."""
    name = "job-master-r1"
    trains.pods[name] = replace(trains.pods[name], phase="Succeeded")
    trains.look()
    assert trains.accepted["attempt"] == 2
    trains.say("Ended", attempt=1, outcome="Succeeded", reason="Finished")
    trains.settle()
    assert trains.status["phase"] == Phase.SUCCEEDED


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("None", {"job-master-r1", "job-worker-0-r0", "job-worker-1-r0"}),
        ("Running", {"job-master-r1", "job-worker-1-r0"}),
        ("All", set()),
    ],
)
def test_what_is_left_of_it(world: World, policy: str, left: set[str]) -> None:
    world.edit(cleanup={"podPolicy": policy})
    world.settle()
    world.train()
    world.pods["job-worker-1-r0"] = replace(world.pods["job-worker-1-r0"], phase="Succeeded")
    world.say("Ended", outcome="Succeeded", reason="Finished")
    world.settle()
    assert set(world.pods) == left


def test_it_takes_itself_away(world: World) -> None:
    world.edit(cleanup={"ttlSecondsAfterFinished": 60})
    world.settle()
    world.train()
    world.say("Ended", outcome="Succeeded", reason="Finished")
    world.settle()
    world.pods = {}
    plan = world.plan()
    assert (plan.delete_job, plan.again) == (False, 60)
    world.now += 61
    world.look()
    assert world.deleted_at is not None
    world.look()
    assert world.gone


def test_only_training_counts_toward_the_deadline(world: World) -> None:
    world.edit(activeDeadlineSeconds=100)
    world.settle()
    world.now += 500
    world.train()
    world.settle()
    world.now += 60
    suspend(world)
    world.now += 1000
    world.edit(suspend=False)
    world.settle()
    world.now += 500
    world.train(step=9)
    world.settle()
    plan = world.plan()
    assert plan.again == pytest.approx(40)
    world.now += 39
    world.settle()
    assert not world.holds(Kind.FAILED)
    world.now += 2
    world.settle()
    assert world.condition(Kind.FAILED)["reason"] == Reason.DEADLINE
    assert world.accepted["wanted"] == "Stop"


def test_no_step_in_time(world: World) -> None:
    world.edit(preRunningDeadlineSeconds=100)
    world.settle()
    assert world.plan().again == 100
    world.now += 101
    world.settle()
    assert world.condition(Kind.FAILED)["reason"] == Reason.DEADLINE


def test_no_step_in_time_for_want_of_an_image(world: World) -> None:
    world.edit(preRunningDeadlineSeconds=100)
    world.settle()
    master = world.pods["job-master-r1"]
    world.pods[master.name] = replace(master, waiting="InvalidImageName: x:y:z")
    world.settle()
    world.now += 101
    world.settle()
    failed = world.condition(Kind.FAILED)
    assert failed["reason"] == Reason.IMAGE
    assert failed["message"].endswith("(100): job-master-r1: InvalidImageName: x:y:z")


def test_steps_in_time(world: World) -> None:
    world.edit(preRunningDeadlineSeconds=100)
    world.settle()
    world.now += 50
    world.train()
    world.settle()
    world.now += 1000
    world.settle()
    assert not world.holds(Kind.FAILED)


def test_a_deleted_job_is_held_until_its_ranks_have_saved(trains: World) -> None:
    trains.deleted_at = trains.now
    trains.settle()
    assert trains.accepted["wanted"] == "Stop"
    assert (trains.gone, trains.status["phase"]) == (False, Phase.STOPPING)
    trains.say("Ended", outcome="Stopped")
    trains.look()
    assert trains.gone


@pytest.mark.parametrize("said", ["false", "False", "no", "0", ""])
def test_only_true_lets_a_deleted_job_go_at_once(trains: World, said: str) -> None:
    trains.deleted_at = trains.now
    trains.annotations = {FORCE_DELETE: said}
    trains.look()
    assert not trains.gone


@pytest.mark.parametrize("why", ["forced", "late", "idle"])
def test_a_deleted_job_that_is_not_held(trains: World, why: str) -> None:
    trains.deleted_at = trains.now
    if why == "forced":
        trains.annotations = {FORCE_DELETE: "true"}
    elif why == "late":
        trains.now += DRAIN + masters.PATIENCE
    else:
        trains.lose_workers()
    trains.look()
    assert trains.gone


def test_a_job_of_somebody_else_is_left_alone(world: World) -> None:
    world.edit(managedBy="kueue.x-k8s.io/multikueue")
    assert world.plan() == Plan()


def test_events_tell_of_what_became_otherwise(trains: World) -> None:
    assert trains.plan().events == ()
    trains.edit(image="other")
    (event,) = trains.look().events
    assert (event.reason, event.warns) == (Reason.EDIT, True)
    assert trains.look().events == ()


def test_what_the_server_says_of_the_master_is_told(world: World) -> None:
    world.look(steps=2)
    plan = world.plan(Answers(master="exceeded quota"))
    assert plan.told is not None
    assert (plan.told.reason, plan.told.message) == (Reason.QUOTA, "exceeded quota")


def test_what_the_job_lacks_is_told_and_nothing_else_is_done(world: World) -> None:
    world.look(steps=1)
    plan = world.plan(Answers(lacks="no PodGroups here"))
    assert plan.told is not None
    assert (plan.told.reason, plan.told.message) == (Reason.LACKS, "no PodGroups here")
    assert (plan.told.accepted, plan.told.master.pod) == (None, "")
    assert (plan.belongings, plan.master, plan.told.start_time) == ((), None, None)
    world.settle()
    assert world.masters() == ["job-master-r1"]


def test_a_job_that_runs_is_not_held_up_by_what_it_lacks(trains: World) -> None:
    """Its budget was taken away, say, and may not be made again."""
    trains.edit(suspend=True)
    plan = trains.plan(Answers(lacks="no right"))
    assert plan.told is not None
    assert plan.told.accepted is not None
    assert plan.told.accepted.wanted == "Suspend"
    assert not plan.told.holds(Kind.QUOTA)


def test_a_pod_that_cannot_be_asked_about_is_told_and_asked_about_again(world: World) -> None:
    seen = jobs.job(world.raw())
    plan = it.reconcile(seen, (), Answers(unasked="a webhook fails"), world.now)
    assert plan.told is not None
    assert (plan.told.reason, plan.told.message) == (Reason.CHECKING, "a webhook fails")
    assert plan.told.accepted is None
    world._write(plan)
    assert it.reconcile(jobs.job(world.raw()), (), Answers(), world.now).ask is not None


def test_it_is_told_whether_the_last_word_of_a_master_is_heard(trains: World) -> None:
    def heard() -> bool:
        return masters.heard(jobs.job(trains.raw()), tuple(trains.pods.values()))

    assert heard()
    name = "job-master-r1"
    trains.pods[name] = replace(trains.pods[name], phase="Failed")
    assert heard()
    trains.pods[name] = replace(trains.pods[name], phase="Succeeded")
    assert not heard()
    trains.say("Ended", outcome="Succeeded", reason="Finished")
    assert heard()


# --- found by looking for what could go wrong ------------------------------------------------------


def test_a_job_of_ours_stays_ours(trains: World) -> None:
    trains.edit(managedBy="kueue.x-k8s.io/multikueue")
    trains.settle()
    found = trains.condition(Kind.ACCEPTED)
    assert (found["status"], found["reason"]) == ("False", Reason.EDIT)
    assert "spec.managedBy" in found["message"]
    trains.deleted_at = trains.now
    trains.say("Ended", outcome="Stopped")
    trains.look()
    assert trains.gone, "nobody else takes our finalizer away"


def test_a_master_that_was_refused_is_tried_again_under_its_name(world: World) -> None:
    """A new attempt each time would be a write each time, which is looked at, at once: without a pause."""
    world.look(steps=2)
    answers = Answers(master="exceeded quota")
    plan = world.plan(answers)
    world._write(plan)
    assert world.accepted["attempt"] == 1
    assert world.holds(Kind.ACCEPTED)
    plan = world.plan(answers)
    assert plan.told is None
    assert plan.master is not None
    assert plan.master["metadata"]["name"] == "job-master-r1"


def test_a_master_that_ended_while_suspended_does_not_hold_up_another(trains: World) -> None:
    suspend(trains)
    trains.pods["job-master-r1"] = replace(trains.pods["job-master-r1"], phase="Failed")
    trains.settle()
    trains.edit(image="other", suspend=False)
    trains.settle()
    (name,) = trains.masters()
    assert name != "job-master-r1"
    assert trains.accepted["wanted"] == "Run"


def test_who_is_not_waited_for_trains_no_more(world: World) -> None:
    """Its last words say that it does."""
    world.edit(activeDeadlineSeconds=1000)
    world.settle()
    world.train()
    world.settle()
    world.edit(suspend=True)
    world.settle()
    world.now += DRAIN + masters.PATIENCE + 1
    world.settle()
    assert world.holds(Kind.SUSPENDED)
    assert (world.holds(Kind.READY), world.holds(Kind.TRAINING)) == (False, False)
    assert world.status["readyReplicas"] == 0
    assert "activeSince" not in world.status
    world.now += 5000
    world.settle()
    assert not world.holds(Kind.FAILED)


def test_with_neither_master_nor_workers_it_is_suspended(trains: World) -> None:
    trains.edit(suspend=True)
    trains.settle()
    trains.pods = {}
    trains.settle()
    assert trains.status["phase"] == Phase.SUSPENDED
    trains.edit(suspend=False)
    trains.settle()
    assert trains.masters() == ["job-master-r2"]


def test_what_was_refused_is_not_asked_about_at_every_look(trains: World) -> None:
    """Its master writes every five seconds, and each write is looked at."""
    trains.edit(suspend=True)
    trains.settle()
    trains.template = "the server says no"
    trains.edit(image="other")
    trains.settle()
    seen, members = jobs.job(trains.raw()), tuple(trains.pods.values())
    assert it.reconcile(seen, members, Answers(), trains.now) == trains.plan()
    assert it.reconcile(seen, members, Answers(), trains.now, complete=True).ask is not None
    trains.edit(flashCheckpoint={"drainSeconds": 8})
    trains.template = ""
    trains.settle()
    assert trains.holds(Kind.ACCEPTED)


def test_what_is_edited_after_the_end_is_done(trains: World) -> None:
    trains.say("Ended", outcome="Succeeded", reason="Finished")
    trains.settle()
    trains.pods = {}
    trains.edit(cleanup={"ttlSecondsAfterFinished": 60})
    trains.settle()
    assert (trains.accepted["wanted"], trains.plan().again) == ("Stop", 60)
    assert trains.masters() == []


def test_it_looks_again_when_something_may_be_late(trains: World) -> None:
    assert trains.plan().again == status.STALE
    trains.now += status.STALE + 1
    trains.settle()
    assert trains.condition(Kind.TRAINING)["reason"] == Reason.NO_STEP
    assert trains.plan().again is None
    trains.edit(suspend=True)
    trains.settle()
    assert trains.plan().again == it.LOOK
    trains.lose_workers()
    trains.say("Suspended")
    trains.settle()
    assert trains.plan().again is None


def test_all_of_its_training_is_counted(trains: World) -> None:
    for seconds in (60, 30):
        trains.now += seconds
        suspend(trains)
        trains.edit(suspend=False)
        trains.settle()
        trains.now += 1000
        trains.train()
        trains.settle()
    assert trains.status["activeSeconds"] == 90
    assert trains.status["activeSince"] == trains.now


def test_ranks_save_though_their_master_is_lost_meanwhile(trains: World) -> None:
    trains.edit(suspend=True)
    trains.settle()
    trains.pods["job-master-r1"] = replace(trains.pods["job-master-r1"], phase="Failed")
    trains.settle()
    assert trains.masters() == ["job-master-r2"]
    assert (trains.accepted["wanted"], trains.accepted["attempt"]) == ("Suspend", 2)


def test_the_time_to_a_first_step_begins_anew_with_a_resume(world: World) -> None:
    world.edit(preRunningDeadlineSeconds=100)
    world.settle()
    world.say("Starting")
    world.edit(suspend=True)
    world.settle()
    world.say("Suspended")
    world.settle()
    world.now += 500
    world.edit(suspend=False)
    world.settle()
    assert world.plan().again == 100
    assert world.status["startTime"] == status.stamp(world.now)


@pytest.mark.parametrize("why", ["invalid", "template"])
def test_a_suspend_is_obeyed_whatever_is_wrong(trains: World, why: str) -> None:
    if why == "invalid":
        trains.edit(elastic={"min": 3, "max": 2}, suspend=True)
    else:
        trains.template = "the server says no"
        trains.edit(flashCheckpoint={"drainSeconds": 7}, suspend=True)
    trains.settle()
    assert trains.accepted["wanted"] == "Suspend"
    assert trains.condition(Kind.ACCEPTED)["status"] == "False"
    before = trains.accepted["spec"]
    assert before["flashCheckpoint"]["drainSeconds"] == DRAIN
    assert before["elastic"]["min"] == 2


def test_a_script_without_steps_is_in_time(world: World) -> None:
    """It finishes some, of which no number is told."""
    world.edit(preRunningDeadlineSeconds=100)
    world.settle()
    world.now += 50
    world.train(step=0)
    world.settle()
    world.now += 100
    world.settle()
    assert world.holds(Kind.TRAINING)
    assert not world.holds(Kind.FAILED)
    del world.pods["job-master-r1"]
    world.settle()
    assert not world.holds(Kind.FAILED), "also while its next master has not spoken"


@pytest.mark.parametrize("how", ["suspended", "over"])
def test_a_limit_that_is_of_no_matter_any_more_wakes_nobody(world: World, how: str) -> None:
    world.edit(preRunningDeadlineSeconds=100, cleanup={"podPolicy": "All"})
    world.settle()
    world.say("Starting")
    world.settle()
    if how == "suspended":
        world.edit(suspend=True)
        world.settle()
        world.say("Suspended")
    world.now += 200
    world.settle()
    world.now += DRAIN + masters.PATIENCE
    world.settle()
    assert world.holds(Kind.SUSPENDED if how == "suspended" else Kind.FAILED)
    assert world.plan().again is None


def test_masters_that_end_before_they_speak_fail_the_job(world: World) -> None:
    """As where each node refuses them: there is no end to it otherwise."""
    world.settle()
    for _ in range(30):
        for name in world.masters():
            world.pods[name] = replace(world.pods[name], phase="Failed")
        world.settle()
    assert world.condition(Kind.FAILED)["reason"] == Reason.MASTER
    assert len(world.made) == 1 + 10
    assert world.status["master"]["restarts"] == 11
    assert world.pods[world.made[-1]].over, "none was made that nobody needs"


def test_a_job_that_is_deleted_gets_masters_beyond_the_limit(trains: World) -> None:
    """Its ranks have steps to save."""
    name = trains.masters()[0]
    trains.pods[name] = replace(trains.pods[name], restarts=10)
    trains.settle()
    trains.deleted_at = trains.now
    del trains.pods[name]
    trains.settle()
    assert trains.masters() == ["job-master-r2"]


@pytest.mark.parametrize("policy", ["", "Background", "Foreground"])
def test_a_master_that_is_deleted_with_its_job_stays_until_ranks_have_saved(
    trains: World, policy: str
) -> None:
    """As the garbage collector does it in the foreground. Else it is its node that lets it go, or is lost."""
    trains.deleted_at = trains.now if policy else None
    if policy == "Foreground":
        trains.finalizers.append(masters.FOREGROUND)
    (name,) = trains.masters()
    trains.pods[name] = replace(trains.pods[name], deleting=True)
    trains.settle()
    assert trains.masters() == ([] if policy == "Foreground" else ["job-master-r2"])


@pytest.mark.parametrize("policy", ["All", "Running"])
def test_a_deadline_lets_the_ranks_save(world: World, policy: str) -> None:
    world.edit(activeDeadlineSeconds=100, cleanup={"podPolicy": policy})
    world.settle()
    world.train()
    world.settle()
    world.now += 100
    world.settle()
    assert world.accepted["wanted"] == "Stop"
    assert len(world.pods) == 3, "its master sees to it"
    world.now += DRAIN + masters.PATIENCE
    world.settle()
    assert world.pods == {}


@pytest.mark.parametrize("saved", [True, False])
def test_deleted_after_its_deadline_its_ranks_save_all_the_same(world: World, saved: bool) -> None:
    world.edit(activeDeadlineSeconds=100, cleanup={"ttlSecondsAfterFinished": 0})
    world.settle()
    world.train()
    world.settle()
    world.now += 100
    world.settle()
    assert world.deleted_at is not None
    world.look()
    assert not world.gone
    if saved:
        world.say("Ended", outcome="Stopped")
    else:
        world.now += DRAIN + masters.PATIENCE
    world.look()
    assert world.gone


def test_a_gang_that_is_asked_for_while_suspended(trains: World) -> None:
    suspend(trains)
    trains.edit(scheduling={"gang": {"provider": "Volcano"}}, suspend=False)
    plan = trains.look()
    assert [resource.kind for resource, _ in plan.belongings][-1] == "PodGroup"


def test_a_gang_goes_on_a_suspend_and_is_there_again_before_the_pods(world: World) -> None:
    world.spec |= {"scheduling": {"gang": {"provider": "Coscheduling"}}}
    world.settle()
    world.train()
    world.settle()
    world.edit(suspend=True)
    world.settle()
    assert world.plan().superfluous == (), "ranks are saving"
    world.lose_workers()
    world.say("Suspended")
    for steps in (1, 99):  # an operator that dies before it is written does it again
        assert [resource.kind for resource, _ in world.look(steps).superfluous] == ["PodGroup"]
    assert world.status["phase"] == Phase.SUSPENDED
    assert "PodGroup" not in [resource.kind for resource, _ in world.plan(complete=True).belongings]
    world.edit(suspend=False)
    lacking = world.plan(Answers(lacks="no PodGroups here"))
    assert lacking.told is not None
    assert lacking.told.accepted is not None
    assert lacking.told.accepted.wanted == "Suspend", "it waits for that"
    world._write(lacking)
    assert world.plan(Answers(lacks="no PodGroups here")).told is None, "nothing changes meanwhile"
    for steps in (1, 99):
        plan = world.look(steps)
        assert [resource.kind for resource, _ in plan.belongings][-1] == "PodGroup"
        assert plan.superfluous == ()
    assert world.accepted["wanted"] == "Run"
    assert world.plan().belongings == ()


def test_a_gang_does_not_come_back_for_a_job_that_is_deleted(world: World) -> None:
    world.spec |= {"scheduling": {"gang": {"provider": "Volcano"}}}
    world.settle()
    world.train()
    world.settle()
    suspend(world)
    world.deleted_at = world.now
    assert "PodGroup" not in [resource.kind for resource, _ in world.look().belongings]


def test_a_number_that_is_edited_is_its_budgets_too(world: World) -> None:
    world.edit(elastic={"min": 1, "max": 4})
    world.settle()
    world.edit(elastic={"min": 2, "max": 4})
    ((resource, body),) = world.look().belongings
    assert (resource.kind, body["spec"]["minAvailable"]) == ("PodDisruptionBudget", 2)
    world.edit(worker={"replicas": 3})
    assert world.look().belongings == ()


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ({}, {"worker": {"replicas": 2, "disruptionBudget": "None"}}, ["PodDisruptionBudget"]),
        ({"scheduling": {"gang": {"provider": "Volcano"}}}, {}, ["PodGroup"]),
        (
            {"scheduling": {"gang": {"provider": "Volcano"}}},
            {"scheduling": {"gang": {"provider": "Coscheduling"}}}, ["PodGroup"],
        ),
        ({}, {"master": {"serviceAccountName": "mine"}}, []),
        ({}, {"cleanup": {"podPolicy": "All"}}, []),
    ],
)  # fmt: skip
def test_what_an_edit_makes_superfluous_goes(
    world: World, before: dict[str, Any], after: dict[str, Any], kinds: list[str]
) -> None:
    world.spec |= before
    world.settle()
    world.train()
    world.settle()
    suspend(world)
    world.spec = {**POD, "worker": {"replicas": 2}, "suspend": True}
    world.edit(**after)
    for steps in (1, 99):  # an operator that dies before it is written does it again
        plan = world.look(steps)
        assert [resource.kind for resource, _ in plan.superfluous] == kinds
        assert plan.told is not None
    assert world.plan().superfluous == ()


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ({"worker": {"replicas": 2, "disruptionBudget": "None"}}, 3),
        ({"scheduling": {"gang": {"provider": "Volcano"}}}, 1),
        ({}, 2),
    ],
)
def test_what_an_edit_before_it_was_accepted_makes_superfluous_goes(
    world: World, spec: dict[str, Any], kinds: int
) -> None:
    """A look has made the belongings, and did not come to write down that the job was accepted: a server knows a role
    a moment later only."""
    assert world.plan().superfluous == (), "nothing was there before"
    world.edit(**spec)
    plan = world.look()
    assert len(plan.superfluous) == kinds
    had = {(resource.api_version, resource.kind) for resource, _ in plan.belongings}
    assert not had & {(resource.api_version, resource.kind) for resource, _ in plan.superfluous}
    world.edit(elastic={"min": 1, "max": 4})
    assert world.look().superfluous == ()


def test_a_master_of_the_release_before_is_served_on(trains: World) -> None:
    """What its operator accepted named no pod, and what it says has no fields of this release."""
    del trains.status["accepted"]["master"]
    trains.status["job"] = {
        "generation": 1, "attempt": 1, "state": "Running", "worldSize": 2, "round": 1,
        "workers": {"ready": 2}, "training": {"step": 5, "steppedAt": trains.now, "of the future": 1},
    }  # fmt: skip
    trains.settle()
    assert trains.accepted["master"] == "job-master-r1"
    assert (trains.accepted["attempt"], trains.masters()) == (1, ["job-master-r1"])
    assert trains.status["phase"] == Phase.RUNNING


@pytest.mark.parametrize("said", [{"format": 2}, {"state": "Dreaming"}, {"generation": "x"}])
def test_a_master_that_cannot_be_understood_has_said_nothing_and_that_is_told(
    trains: World, said: dict[str, Any]
) -> None:
    trains.status["job"] |= said
    trains.settle()
    found = trains.condition(Kind.READY)
    assert (found["status"], found["reason"]) == ("Unknown", Reason.UNREADABLE)
    assert trains.status["reason"] == Reason.UNREADABLE
    assert trains.status["message"] == found["message"] != ""
    assert "format" not in said or "of neighbouring versions" in found["message"]
    assert trains.masters() == ["job-master-r1"]


def odd(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda status: status["accepted"].update(fields)


UNREADABLE: list[Callable[[dict[str, Any]], Any]] = [
    lambda status: status.update(accepted={}),
    odd(format=2),
    odd(spec={**POD, "nodePolicy": {"onFault": "Cordon"}}),
    lambda status: status["conditions"][3].update(status="Maybe"),
]


@pytest.mark.parametrize("spoil", UNREADABLE)
@pytest.mark.parametrize("ends", ["forced", "late", "idle"])
def test_what_another_release_accepted_is_left_alone_but_for_words(
    trains: World, spoil: Callable[[dict[str, Any]], Any], ends: str
) -> None:
    spoil(trains.status)
    before, plan = copy.deepcopy(trains.status), trains.plan()
    assert plan.note is not None
    assert replace(plan, note=None) == Plan()
    trains.status |= plan.note
    assert trains.status["reason"] == Reason.UNREADABLE
    found = trains.condition(Kind.ACCEPTED)
    assert (found["status"], found["message"]) == ("Unknown", trains.status["message"])
    assert "Another release of the operator" in found["message"]
    assert trains.status["accepted"] == before["accepted"]
    assert trains.status["conditions"][1:] == before["conditions"][1:]
    assert trains.plan() == Plan()
    trains.deleted_at = trains.now
    assert trains.plan() == Plan(again=it.LOOK)
    if ends == "forced":
        trains.annotations = {FORCE_DELETE: "true"}
    elif ends == "late":
        trains.now += DRAIN + masters.PATIENCE
    else:
        trains.lose_workers()
    trains.look()
    assert trains.gone


class Operated(RuleBasedStateMachine):
    """Anything happens, and operators die between any two of their steps; masters do as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.serves: dict[str, int] = {}
        """By pod: the attempt that its master serves."""
        self.heard: dict[str, dict[str, Any]] = {}
        """By pod: what its master last heard of `status.accepted`."""
        self.resting: set[str] = set()
        """Pods whose masters wait for the next attempt."""
        self.ghosts: set[str] = set()
        """Masters that go on though nobody sees their pods any more: their nodes do not answer."""
        self.served: dict[int, set[str]] = {}
        """By attempt: pods that ever served it."""
        self.before: Told | None = None
        self.unheard: dict[str, Any] | None = None
        """The job's end as the server has it, and the operator's watch of jobs does not show yet."""

    @initialize(
        policy=st.sampled_from(["Running", "All", "None"]),
        ttl=st.sampled_from([None, 0, 900]),
        active=st.sampled_from([None, 500]),
        early=st.sampled_from([None, 500]),
    )
    def begin(self, policy: str, ttl: int | None, active: int | None, early: int | None) -> None:
        asked = {
            "activeDeadlineSeconds": active, "preRunningDeadlineSeconds": early,
            "cleanup": {"podPolicy": policy} | ({} if ttl is None else {"ttlSecondsAfterFinished": ttl}),
        }  # fmt: skip
        self.world.spec = {
            **POD, "worker": {"replicas": 2}, "elastic": {"min": 1, "max": 4},
            **{key: value for key, value in asked.items() if value is not None},
        }  # fmt: skip

    # --- the operator ------------------------------------------------------------------------

    @rule(steps=st.integers(0, 5))
    def look(self, steps: int) -> None:
        self.world.look(steps)

    @rule()
    def rest(self) -> None:
        """Nothing more happens: it comes to rest, until the time at which it wants to look again."""
        self.world.settle(self.what_is_told_goes_on_from_what_was)
        again, now = self.world.plan().again, self.world.now
        assert again is None or again >= 0.5
        self.world.now += 0.99 * (again or 10_000)
        plan = self.world.plan()
        assert (plan.told, plan.delete, plan.master, plan.delete_job) == (None, (), None, False)
        self.world.now = now

    # --- people ------------------------------------------------------------------------------

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(replicas=st.integers(0, 6))
    def scale(self, replicas: int) -> None:
        self.world.edit(worker={"replicas": replicas})

    @rule(on=st.booleans())
    def suspend(self, on: bool) -> None:
        self.world.edit(suspend=on)

    @rule(image=st.sampled_from(["i", "other", ""]), on=st.booleans())
    def change(self, image: str, on: bool) -> None:
        self.world.edit(image=image, suspend=on)

    @precondition(lambda self: self.running and self.world.accepted and not self.world.gone)
    @rule()
    def pause(self) -> None:
        """To its end: what comes then comes to a master that rests."""
        self.world.edit(image="i", suspend=True)
        self.rest()
        if not self.world.gone:
            self.serve(5, "", True)
            self.rest()

    @rule(words=st.sampled_from(["", "the server says no"]))
    def refuse(self, words: str) -> None:
        self.world.template = words

    @precondition(lambda self: self.world.deleted_at is None and self.world.finalizers)
    @rule(sure=st.integers(0, 2))
    def delete(self, sure: int) -> None:
        if sure == 2:
            self.world.deleted_at = self.world.now

    # --- nodes -------------------------------------------------------------------------------

    @precondition(lambda self: self.world.masters())
    @rule(how=st.sampled_from(["gone", "deleting", "over", "again"]))
    def lose(self, how: str) -> None:
        name = self.world.masters()[-1]
        found = self.world.pods.pop(name)
        if how == "gone":
            self.ghosts.add(name)
        if how == "deleting":
            self.world.pods[name] = replace(found, deleting=True)
        elif how == "over":
            self.world.pods[name] = replace(found, phase="Failed")
        elif how == "again":
            self.world.pods[name] = replace(found, restarts=found.restarts + 1)
            for table in (self.serves, self.heard):
                table.pop(name, None)
            self.resting.discard(name)

    @rule()
    def leave(self) -> None:
        """Pods that are being deleted are gone, and so are those whose nodes do not answer."""
        self.ghosts.clear()
        self.world.pods = {n: p for n, p in self.world.pods.items() if not p.deleting}

    # --- masters, as in elastic/job_master.py ------------------------------------------------

    @property
    def running(self) -> list[str]:
        pods = self.world.pods.values()
        return [*self.ghosts, *(p.name for p in pods if p.role == "master" and not p.over)]

    @precondition(lambda self: self.running and self.world.accepted and not self.world.gone)
    @rule(
        step=st.integers(0, 100),
        ends=st.sampled_from(["", "", "", "Succeeded", "Failed"]),
        fresh=st.sampled_from([True, True, False]),
        lags=st.booleans(),
    )
    def serve(self, step: int, ends: str, fresh: bool, lags: bool = False) -> None:
        """fresh: it has heard the newest; one that begins always has. lags: what it says of the job's end is seen after
        the end of its pod."""
        before = self.world.status.get("job")
        self._serve(step, ends, fresh)
        now = self.world.status.get("job")
        if lags and now is not None and now["state"] == "Ended" and self.unheard is None:
            self.unheard = now
            self._show(before)

    @rule()
    def hear(self) -> None:
        if self.unheard is not None:
            self._show(self.unheard)
            self.unheard = None

    def _show(self, state: dict[str, Any] | None) -> None:
        self.world.status.pop("job", None)
        if state is not None:
            self.world.status["job"] = state

    def _serve(self, step: int, ends: str, fresh: bool) -> None:
        for name in self.running:
            if fresh or name not in self.heard:
                self.heard[name] = self.world.accepted
            self._act(name, step, ends)

    def _act(self, name: str, step: int, ends: str) -> None:
        world, heard = self.world, self.heard[name]
        wanted, attempt = heard["wanted"], heard["attempt"]
        said = self.unheard or world.status.get("job") or {}
        if heard["master"] not in ("", name) or said.get("state") == "Ended":
            self._leave_pod(name)
            return
        if name in self.resting:
            if wanted == "Suspend":
                return
        elif self.serves.get(name, attempt) != attempt:
            self._leave_pod(name)
            return
        self.resting.discard(name)
        self.serves[name] = attempt
        if wanted == "Run":
            self.served.setdefault(attempt, set()).add(name)
            if not ends:
                world.train(step, attempt=attempt)
                return
            world.say("Ended", outcome=ends, reason="Why", attempt=attempt)
        else:
            world.lose_workers()
            if wanted == "Suspend":
                self.resting.add(name)
                world.say("Suspended", attempt=attempt)
                return
            world.say("Ended", outcome="Stopped", attempt=attempt)
        self._leave_pod(name)

    def _leave_pod(self, name: str) -> None:
        if name in self.ghosts:
            self.ghosts.remove(name)
            return
        self.world.pods[name] = replace(self.world.pods[name], phase="Succeeded")

    # --- what always holds -------------------------------------------------------------------

    @invariant()
    def no_attempt_has_two_masters(self) -> None:
        assert all(len(pods) == 1 for pods in self.served.values()), self.served

    @invariant()
    def what_is_told_goes_on_from_what_was(self) -> None:
        told, before = jobs.job(self.world.raw()).told, self.before
        if told.conditions:
            assert [one.type for one in told.conditions] == list(Kind)
            assert all(one.last_transition_time for one in told.conditions)
            assert not (told.holds(Kind.COMPLETE) and told.holds(Kind.FAILED))
            assert not (told.holds(Kind.SUSPENDED) and told.holds(Kind.READY))
            assert told.phase in list(Phase)
        if before is not None and before.accepted is not None:
            assert told.accepted is not None
            assert told.accepted.attempt >= before.accepted.attempt
            assert told.accepted.generation >= before.accepted.generation
            assert before.accepted.wanted != "Stop" or told.accepted.wanted == "Stop"
            assert told.active_seconds >= before.active_seconds
            assert told.master.restarts >= before.master.restarts
            for kind in (Kind.COMPLETE, Kind.FAILED):
                assert told.holds(kind) or not before.holds(kind)
        self.before = told

    @invariant()
    def a_job_that_is_gone_left_nobody_unsaved(self) -> None:
        world = self.world
        if not world.gone or world.deleted_at is None:
            return
        told, state = jobs.job(world.raw()).told, jobs.job(world.raw()).state
        late = world.now - (world.deleted_at or 0) >= DRAIN + masters.PATIENCE or bool(
            told.completion_time
        )
        trains = any(one.role == "worker" and one.alive for one in world.pods.values())
        assert late or not trains or (state is not None and state.state == "Ended")

    def teardown(self) -> None:
        """Left alone, it comes to rest, with one master where one is needed."""
        world = self.world
        self.hear()
        world.template = ""
        world.edit(**POD, worker={"replicas": 2}, suspend=False)
        for _ in range(6):
            self.leave()
            world.settle()
            if world.gone:
                return
            if world.masters():
                self.serve(0, "", True)
            world.now += DRAIN + masters.PATIENCE if not world.masters() else 1.0
            self.no_attempt_has_two_masters()
            self.what_is_told_goes_on_from_what_was()
        world.settle()
        told = jobs.job(world.raw()).told
        over = told.holds(Kind.COMPLETE) or told.holds(Kind.FAILED)
        outcome = (world.status.get("job") or {}).get("outcome")
        if world.deleted_at is None and outcome in ("Succeeded", "Failed"):
            assert over, "whoever came to it, and whenever it was heard"
        if world.deleted_at is None and not over:
            assert world.accepted["wanted"] == "Run"
            assert world.masters() == [told.master.pod]
            assert self.serves[told.master.pod] == world.accepted["attempt"]
            assert told.phase == Phase.RUNNING


Operated.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestOperated = Operated.TestCase

"""The rows of the reference's table that are about nodes, room, and what people do to a job: operator and master as two
processes under their own service accounts, on a real API server, many jobs side by side.
"""

from collections.abc import Iterator

import pytest

from elastic.proto import elasticjob
from scripts.kubernetes.client import CORE
from tests.k8s.crew import Row, Rows, Running, Stage
from tests.k8s.operated import GROUP

pytestmark = pytest.mark.xdist_group("rows-of-nodes")  # one stage for all of them

row = Rows()
TWO = {"min": 2, "max": 4, "lastCallSeconds": 0}


@pytest.fixture(scope="module")
def running(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Running]:
    yield from row.begin(stage, request)


@row
def a_node_that_is_not_ready_is_left_once_its_agent_is_silent(stage: Stage) -> None:
    """3, 4. Its pod never ends: nothing waits for that, and nobody tears it away."""
    pool = stage.pool("silent", 3, 4, 5)
    with stage.job("silent", scheduling=pool, hotSpares={"count": 1}) as job:
        job.wait_spares(1)
        stays, lost = job.wait_size(2)
        (spare,) = {*job.names()} - {stays, lost}
        replacement = f"{lost.removesuffix('-r0')}-r1"
        round_ = job.crew.round("silent")
        node = job.cluster.node_of(lost)
        job.cluster.fault(node, "silent")
        job.cluster.wait_condition(lost, "Ready", "False")
        assert "deletionTimestamp" not in job.pod(lost)["metadata"]
        job.crew.away.add(lost)
        job.wait_world(stays, spare)
        job.wait_runs(replacement)
        assert job.cluster.node_of(replacement) != node
        assert job.crew.round("silent") == round_ + 1
        job.wait_failures((lost, "NodeLost", "ReplacePodAvoidNode"))
        assert job.pod(lost)["metadata"]["deletionGracePeriodSeconds"] > 0
        job.wait_spares(1)
        waits = {
            t["key"]: t.get("tolerationSeconds") for t in job.pod(spare)["spec"]["tolerations"]
        }
        assert (
            waits["node.kubernetes.io/not-ready"] == waits["node.kubernetes.io/unreachable"] == 30
        )


@row
def a_node_that_is_deleted_takes_its_pod_and_no_more(stage: Stage) -> None:
    """4."""
    pool = stage.pool("deleted", 6, 7)
    with stage.job("deleted", scheduling=pool) as job:
        job.wait_world(job.worker(0), job.worker(1))
        job.space.client.delete(f"{CORE}/nodes/{job.cluster.node_of(job.worker(1))}")
        job.wait_world(job.worker(0), job.worker(1, 1))


@row
def an_operator_that_starts_anew_touches_nothing_and_goes_on(stage: Stage) -> None:
    """10."""
    with stage.job("again") as job:
        job.wait_world(job.worker(0), job.worker(1))
        job.wait("it says so", lambda: job.holds("Ready"))
        before = job.uids()
        round_ = job.crew.round("again")
        stage.restart_operator()
        job.scale(3)
        job.wait_world(*(job.worker(slot) for slot in range(3)))
        assert before <= job.uids()
        assert job.crew.round("again") == round_ + 1
        assert job.status()["master"]["restarts"] == 0


@row
def pods_that_find_no_node_are_done_without_until_there_is_one(stage: Stage) -> None:
    """12."""
    pool = stage.pool("full", 8, 9)
    asks = {"resources": {"requests": {"cpu": "40"}}}
    pending = {"timeoutSeconds": 2, "policy": "ShrinkToMin"}
    with stage.job(
        "full", worker={"replicas": 3}, container=asks, scheduling={**pool, "pending": pending},
        elastic={**TWO, "scaleUpCooldownSeconds": 1},
    ) as job:  # fmt: skip
        job.wait_size(2)
        job.wait("why is said", lambda: job.condition("Scheduled").get("reason") == "Unschedulable")
        assert "Insufficient cpu" in job.condition("Scheduled")["message"]
        job.wait("they train", lambda: job.holds("Ready") and job.holds("Degraded"))
        assert job.names() == [job.worker(slot) for slot in range(3)], "the request stays open"
        stage.pool("full", 10)
        job.wait_world(*(job.worker(slot) for slot in range(3)))
        job.wait("all is well", lambda: job.holds("Scheduled") and job.holds("Degraded", "False"))


@row
def a_quota_is_a_condition_and_waited_for(stage: Stage) -> None:
    """13. Of GPUs, which no other job here has; the master of one may ask for more than there is, too."""
    space = stage.cluster.namespace
    space.limit(**{"requests.nvidia.com/gpu": "1"})
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    many = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    with (
        stage.job("quota", container=gpus, nprocPerNode=1) as job,
        stage.job("quota-master", master=many) as other,
    ):
        for one in (job, other):
            one.wait("a refusal", lambda: one.holds("QuotaReserved", "False"))  # noqa: B023
            found = one.condition("QuotaReserved")
            assert found["reason"] == one.status()["reason"] == "QuotaExceeded"
            assert "exceeded quota" in found["message"]
        assert other.names("master") == []
        job.wait("one trains meanwhile", lambda: len(job.crew.world("quota")) == 1)
        space.limit(**{"requests.nvidia.com/gpu": "100"})
        for one in (job, other):
            one.wait_world(one.worker(0), one.worker(1))
            one.wait("it says so", lambda: one.holds("QuotaReserved"))  # noqa: B023
        assert job.status()["master"]["restarts"] == other.status()["master"]["restarts"] == 0


@row
def a_deleted_job_waits_for_its_ranks_unless_it_is_forced(stage: Stage) -> None:
    """14."""
    with stage.job("stop", flashCheckpoint={"drainSeconds": 1000}) as job:
        job.wait_world(job.worker(0), job.worker(1))
        job.crew.deaf.update((job.worker(0), job.worker(1)))
        job.space.client.delete(job.path)
        job.wait("it waits", lambda: job.status()["phase"] == "Stopping")
        assert elasticjob.FINALIZER in job.raw()["metadata"]["finalizers"]
        owner = job.pod(job.worker(0))["metadata"]["ownerReferences"][0]
        assert (owner["controller"], owner["blockOwnerDeletion"]) == (True, True)
        notes = {elasticjob.FORCE_DELETE: "true"}
        job.space.client.merge(job.path, {"metadata": {"annotations": notes}})
        job.wait("it is gone", lambda: not job.raw())
        job.wait("its pods are, too", lambda: not job.names() and not job.names("master"))


@row
def a_suspended_job_has_no_pods_spares_among_them(stage: Stage) -> None:
    """15; 18: a queue that evicts a job does that, and restarts are not counted."""
    with stage.job("rest", hotSpares={"count": 1}) as job:
        job.wait_size(2)
        job.wait_spares(1)
        masters, before = job.names("master"), job.uids()
        job.edit(suspend=True)
        job.wait("it is suspended", lambda: job.holds("Suspended"))
        assert (job.names(), job.names("master")) == ([], masters)
        assert job.status()["phase"] == "Suspended"
        job.edit(suspend=False)
        job.wait_size(2)
        job.wait_spares(1)
        assert len(job.names()) == 3
        assert len(before & job.uids()) == 1, "the master's pod"
        state = job.state()
        assert state is not None
        assert (state.attempt, state.restarts_counted) == (2, 0)
        assert job.status()["accepted"]["attempt"] == 2
        assert job.names("master") == masters


@row
def a_scale_is_checked_and_costs_one_rendezvous(stage: Stage) -> None:
    """16."""
    with stage.job("scale", worker={"replicas": 4}, elastic={**TWO, "nodeUnit": 2}) as job:
        four = [job.worker(slot) for slot in range(4)]
        job.wait_world(*four)
        round_ = job.crew.round("scale")
        job.scale(3)
        job.wait("it is refused", lambda: job.condition("Accepted").get("reason") == "InvalidSpec")
        assert "write 2 or 4" in job.condition("Accepted")["message"]
        assert job.crew.round("scale") == round_
        job.scale(2)
        job.wait_world(*four[:2])
        job.wait("the others are gone", lambda: job.names() == four[:2])
        assert job.crew.round("scale") == round_ + 1
        job.scale(4)
        job.wait_world(*four[:2], job.worker(2, 1), job.worker(3, 1))
        assert job.crew.round("scale") == round_ + 2
        assert job.counted() == 0


@row
def what_is_left_of_a_job_of_the_same_name_is_not_taken_for_ones_own(stage: Stage) -> None:
    """19. Its pods stay for ever; and a stranger bears all of our labels."""
    with stage.job("name") as job:
        job.wait_world(job.worker(0), job.worker(1))
        old = {job.worker(0): "", "name-master-r1": ""}
        for pod in old:
            old[pod] = job.pod(pod)["metadata"]["uid"]
            hold = {"metadata": {"finalizers": ["test.elastic-runtime.dev/hold"]}}
            job.space.client.merge(job.space.path("pods", pod), hold)
        job.remove()
        job.wait("it is gone", lambda: not job.raw())
        job.wait("others are", lambda: [*job.names(), *job.names("master")] == [*old])
        job.space.client.create(job.space.path(elasticjob.PLURAL, group=GROUP), job.body())
        job.wait_world(job.worker(0, 1), job.worker(1))
        labels = job.pod(job.worker(0, 1))["metadata"]["labels"]
        spec = {"containers": [{"name": "main", "image": "simulated"}]}
        stranger = {"metadata": {"name": "stranger", "labels": labels}, "spec": spec}
        job.space.client.create(job.space.path("pods"), stranger)
        job.scale(3)
        job.wait_world(job.worker(0, 1), job.worker(1), job.worker(2))
        assert {pod: job.pod(pod)["metadata"]["uid"] for pod in old} == old
        job.wait("it counts its own", lambda: job.status()["replicas"] == 3)
        assert "deletionTimestamp" not in job.pod("stranger")["metadata"]
        assert job.status()["master"]["pod"] != "name-master-r1"
        for pod in old:
            job.space.client.merge(job.space.path("pods", pod), {"metadata": {"finalizers": None}})


@row
def thirty_of_thirty_two_pods_are_lost_at_once(stage: Stage) -> None:
    """20."""
    with stage.job("mass", worker={"replicas": 32}, elastic={"min": 2, "max": 32, "lastCallSeconds": 5}) as job:  # fmt: skip
        first = [job.worker(slot) for slot in range(32)]
        job.wait_world(*first)
        round_ = job.crew.round("mass")
        for pod in first[2:]:
            job.space.client.delete(job.space.path("pods", pod), gracePeriodSeconds=0)
        job.wait_world(*first[:2], *(job.worker(slot, 1) for slot in range(2, 32)))
        assert job.crew.round("mass") <= round_ + 2


@row
def a_hot_spare_takes_the_place_of_one_that_is_lost(stage: Stage) -> None:
    """21."""
    with stage.job("spare", hotSpares={"count": 1}) as job:
        job.wait_spares(1)
        lost, stays = job.wait_size(2)
        (spare,) = {*job.names()} - {lost, stays}
        state = job.state()
        assert state is not None
        assert (state.world_size, state.workers.ready) == (2, 2)
        job.end(lost, 137)
        job.wait_world(stays, spare)
        made = f"{lost.removesuffix('-r0')}-r1"
        job.wait("another one is made", lambda: job.crew.attached(made))
        job.wait_spares(1)
        assert {*job.crew.world("spare")} == {stays, spare}
        assert job.status()["desiredReplicas"] == 2


@pytest.mark.parametrize("one", row.all, ids=lambda one: str(one.__name__))
def test_row(running: Running, one: Row) -> None:
    running[one].result()

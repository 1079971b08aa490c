"""The rows of the reference's table that are about how pods end: operator and master as two processes under their own
service accounts, on a real API server, many jobs side by side.
"""

from collections.abc import Iterator

import pytest

from elastic.proto.ending import Ended, Ending, to_json
from tests.k8s.crew import Row, Rows, Running, Stage, Staged

TRIES = {"command": ["sh", "-c", "exec elastic-run --max-restarts=9 train.py"]}
pytestmark = pytest.mark.xdist_group("rows-of-ends")  # one stage for all of them

row = Rows()


@pytest.fixture(scope="module")
def running(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Running]:
    yield from row.begin(stage, request)


@row
def out_of_memory_twice_at_a_similar_step_is_the_script(stage: Stage) -> None:
    """1."""
    with stage.job("oom") as job:
        first, second = job.worker(1), job.worker(1, 1)
        job.wait_world(job.worker(0), first)
        job.end(first, 137, "OOMKilled")
        job.wait_world(job.worker(0), second)
        job.wait_failures((first, "OOMKilled", "ReplacePod"))
        assert job.counted() == 1
        job.end(second, 137, "OOMKilled")
        assert "more memory" in job.wait_failed("OOMKilled")
        assert job.worker(1, 2) not in job.names()


@row
def out_of_memory_at_another_step_is_not(stage: Stage) -> None:
    """1. The agent's own words tell of a cgroup's OOM where the container was not killed for it."""
    with stage.job("ooms") as job:
        job.wait_world(job.worker(0), job.worker(1))
        job.crew.steps["ooms"] = 100
        job.wait_step(100)
        said = to_json(Ending(kind=Ended.OOM, step=100, rank=1, reason="rank 1 ran out of memory"))
        job.end(job.worker(1), 1, message=said)
        job.wait_world(job.worker(0), job.worker(1, 1))
        job.crew.steps["ooms"] = 5000
        job.wait_step(5000)
        job.end(job.worker(1, 1), 137, "OOMKilled")
        job.wait_world(job.worker(0), job.worker(1, 2))
        ends = ((job.worker(1, attempt), "OOMKilled", "ReplacePod") for attempt in (0, 1))
        job.wait_failures(*ends)
        assert not job.holds("Failed")


@row
def a_rank_that_runs_out_of_memory_twice_is_the_script(stage: Stage) -> None:
    """1. The kernel ended it alone, and its agent tells: the pod stays."""
    with stage.job("oom-rank") as job:
        pods = (job.worker(0), job.worker(1))
        job.wait_world(*pods)
        for step in (100, 104):
            job.crew.steps["oom-rank"] = step
            job.wait_step(step)
            round_ = job.crew.round("oom-rank")
            job.crew.fail(pods[1], exit_code=-9, oom_killed=True)
            if step == 100:
                job.wait("they start again", lambda: job.crew.round("oom-rank") > round_)  # noqa: B023
                job.wait_world(*pods)
        assert "more memory" in job.wait_failed("OOMKilled")


@row
def what_is_taken_away_is_replaced_and_not_counted(stage: Stage) -> None:
    """2. Only a node that ran short is avoided."""
    avoid = {"requireConfirmations": 1, "maxAvoided": "4"}
    sizes = {"min": 1, "max": 5, "lastCallSeconds": 0}
    with stage.job("taken", worker={"replicas": 5}, elastic=sizes, nodePolicy=avoid) as job:
        before = [job.worker(slot) for slot in range(5)]
        job.wait_world(*before)
        short = job.cluster.node_of(before[0])
        job.evict(before[0], "The node was low on resource: memory.")
        job.preempt(before[1])
        for pod, reason in (
            (before[2], "EvictionByEvictionAPI"), (before[3], "TerminationTarget"),
            (before[4], "DeletionByTaintManager"),
        ):  # fmt: skip
            kind = "TerminationTarget" if reason == "TerminationTarget" else "DisruptionTarget"
            condition = {"type": kind, "status": "True", "reason": reason}
            job.patch_status(pod, {"conditions": [condition]})
            job.space.client.delete(job.space.path("pods", pod))
        after = [job.worker(slot, 1) for slot in range(5)]
        job.wait_world(*after)
        told = [
            (before[0], "Evicted", "ReplacePodAvoidNode"), (before[1], "Preempted", "ReplacePod"),
            (before[2], "Evicted", "ReplacePod"), (before[3], "Preempted", "ReplacePod"),
            (before[4], "Evicted", "ReplacePod"),
        ]  # fmt: skip
        job.wait("all are told of", lambda: sorted(job.failures()) == sorted(told))
        state = job.state()
        assert state is not None
        assert state.restarts_counted == 0
        assert [one.node for one in state.avoided_nodes] == [short]
        assert job.cluster.node_of(after[0]) != short


@row
def one_worker_that_ends_well_is_not_the_job(stage: Stage) -> None:
    """5."""
    with stage.job("done") as job:
        job.wait_world(job.worker(0), job.worker(1))
        job.end(job.worker(1), 0)
        job.wait_world(job.worker(0))
        assert not job.holds("Complete")
        assert job.worker(1, 1) not in job.names(), "who is done is not replaced"
        job.crew.finish(job.worker(0))
        job.wait("it is complete", lambda: job.holds("Complete"))


@row
def an_error_of_the_script_is_tried_in_place_until_it_is_the_same_again(stage: Stage) -> None:
    """6."""
    with stage.job("error", container=TRIES) as job:
        pods = (job.worker(0), job.worker(1))
        job.wait_world(*pods)
        for times in (1, 2, 3):
            round_ = job.crew.round("error")
            job.crew.fail(pods[1], exit_code=1, error_type="ValueError", message="no", frame="t:1")
            if times < 3:
                job.wait("they start again", lambda: job.crew.round("error") > round_)  # noqa: B023
                job.wait_world(*pods)
        assert "3 times" in job.wait_failed("UserError")
        assert {name.rpartition("-")[2] for name in job.names()} <= {"r0"}


@row
def an_import_that_fails_before_the_first_step_is_tried_once(stage: Stage) -> None:
    """7."""
    with stage.job("import", container=TRIES) as job:
        pods = (job.worker(0), job.worker(1))
        job.wait_world(*pods)
        round_ = job.crew.round("import")
        job.crew.fail(pods[0], exit_code=1, error_type="ModuleNotFoundError",
                      message="No module named 'x'", frame="t:1")  # fmt: skip
        job.wait_failed("UserError")
        assert job.crew.round("import") == round_


@row
def a_command_line_that_makes_no_sense_fails_at_once(stage: Stage) -> None:
    """7."""
    _fails_at_once(stage, "usage", 2, "makes no sense")


@row
def a_command_that_cannot_be_executed_fails_at_once(stage: Stage) -> None:
    """7."""
    _fails_at_once(stage, "exec", 126, "cannot be executed")


@row
def a_command_that_is_not_there_fails_at_once(stage: Stage) -> None:
    """7."""
    _fails_at_once(stage, "lacks", 127, "not in the image")


def _fails_at_once(stage: Stage, name: str, code: int, words: str) -> None:
    with stage.job(name, worker={"replicas": 1}) as job:
        job.wait_runs(job.worker(0))
        job.end(job.worker(0), code)
        assert words in job.wait_failed("UserError")
        assert job.worker(0, 1) not in job.names()


@row
def whoever_is_to_be_told_is_told(stage: Stage) -> None:
    """`notify`: here a command, which runs in its master's pod."""
    told = stage.folder / "notices"
    with stage.job("told", worker={"replicas": 1}, notify=[f"cat >> {told}"]) as job:
        job.wait_runs(job.worker(0))
        job.end(job.worker(0), 2)
        job.wait_failed("UserError")
        job.wait("it is told", lambda: told.exists() and '"job_failed"' in told.read_text())


@row
def a_slot_that_crashes_again_and_again_leaves_its_node(stage: Stage) -> None:
    """8."""
    pool = stage.pool("crash", 3)
    limits = {"maxAvoided": "1"}
    with stage.job("crash", worker={"replicas": 1}, scheduling=pool, nodePolicy=limits) as job:
        nodes = set()
        for attempt, code in enumerate((135, 134, 139)):
            job.wait_world(job.worker(0, attempt))
            nodes.add(job.cluster.node_of(job.worker(0, attempt)))
            job.end(job.worker(0, attempt), code)
        ends = ("ReplacePod", "ReplacePod", "ReplacePodAvoidNode")
        job.wait_failures(
            *((job.worker(0, attempt), "Crashed", end) for attempt, end in enumerate(ends))
        )
        stage.pool("crash", 4)
        job.wait_world(job.worker(0, 3))
        state = job.state()
        assert state is not None
        assert "/dev/shm" in state.last_failures[0].reason
        assert state.restarts_counted == 3
        assert [one.node for one in state.avoided_nodes] == [*nodes]


@row
def what_becomes_of_nodes_may_be_edited_while_it_trains(stage: Stage) -> None:
    """17: of that, what its pods were not started with. Their node has said itself that it is not fit."""
    with stage.job("policy", worker={"replicas": 1}, nodePolicy={"onFault": "None"}) as job:

        def avoided() -> list[str]:
            return [one.node for one in state.avoided_nodes] if (state := job.state()) else []

        def edit(policy: str) -> None:
            job.edit(nodePolicy={"onFault": policy})
            made = job.raw()["metadata"]["generation"]
            job.wait(
                "its master goes by that",
                lambda: (s := job.state()) is not None and s.generation == made,
            )

        first, second, third = (job.worker(0, attempt) for attempt in range(3))
        job.wait_world(first)
        job.end(first, 211)
        job.wait_world(second)
        job.wait("that is told", lambda: [pod for pod, _, _ in job.failures()] == [first])
        assert avoided() == []
        edit("AvoidForJob")
        node = job.cluster.node_of(second)
        job.end(second, 211)
        job.wait_world(third)
        job.wait("its node is avoided", lambda: avoided() == [node])
        assert job.cluster.node_of(third) != node
        edit("None")
        job.wait("it is avoided no more", lambda: avoided() == [])
        assert job.crew.world("policy") == [third]
        assert job.status()["master"]["restarts"] == 0


@row
def what_an_image_lacks_is_a_condition_and_waited_for(stage: Stage) -> None:
    """11."""
    variable = {"name": "K", "valueFrom": {"secretKeyRef": {"name": "late", "key": "k"}}}
    idle = ["sh", "-c", "trap 'exit 143' TERM; sleep 1000 & wait"]
    container = {"command": idle, "env": [variable]}
    with stage.job("late", simulated=False, container=container) as job:
        _wait_unstarted(job, 'secret "late" not found')
        made = {"metadata": {"name": "late"}, "stringData": {"k": "here"}}
        job.space.client.create(job.space.path("secrets"), made)
        job.wait_world(job.worker(0), job.worker(1))
        job.wait("it says so", lambda: job.holds("Scheduled") and job.holds("Ready"))


@row
def enough_others_start_without_one_whose_image_is_not_there(stage: Stage) -> None:
    """11."""
    with stage.job("image", worker={"replicas": 3}, elastic={"min": 2, "max": 3, "lastCallSeconds": 0}) as job:  # fmt: skip
        stage.crew.away.add(job.worker(2))
        job.wait_runs(job.worker(2))
        waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
        job.patch_container(job.worker(2), {"running": None, "waiting": waiting}, phase="Pending")
        job.wait_world(job.worker(0), job.worker(1))
        _wait_unstarted(job, "ImagePullBackOff")
        job.wait("they train", lambda: job.holds("Ready"))
        running = {"waiting": None, "running": {"startedAt": "2026-11-26T17:00:00Z"}}
        job.patch_container(job.worker(2), running, phase="Running")
        stage.crew.away.discard(job.worker(2))
        job.wait_world(*(job.worker(slot) for slot in range(3)))


@row
def a_name_that_is_no_images_fails_at_its_deadline(stage: Stage) -> None:
    """11. The master has the same image: the operator sees it wait."""
    with stage.job("bad", container={"image": "Not An Image"}, preRunningDeadlineSeconds=5) as job:
        _wait_unstarted(job, "InvalidImageName")
        assert "InvalidImageName" in job.wait_failed("ImagePullFailed")


def _wait_unstarted(job: Staged, words: str) -> None:
    job.wait(words, lambda: words in job.condition("Scheduled").get("message", ""))
    found = job.condition("Scheduled")
    assert (found["status"], found["reason"]) == ("False", "ImagePullFailed")


@pytest.mark.parametrize("one", row.all, ids=lambda one: str(one.__name__))
def test_row(running: Running, one: Row) -> None:
    running[one].result()

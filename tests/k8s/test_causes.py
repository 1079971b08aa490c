"""Every row of the reference's table: how a pod ends, and what is done."""

import re
from dataclasses import replace

import pytest

from elastic.k8s.causes import (
    Action,
    Cause,
    Rule,
    held_up,
    judge,
    of_an_image,
    progressed,
    remember,
)
from elastic.k8s.observed import Pod, pod
from elastic.proto.elasticjob import Past
from elastic.proto.ending import Ended, Ending, to_json

RUNNING = Pod(name="gpt-worker-3-r0", uid="u", slot=3, attempt=0, node="n7", phase="Running")


def over(code: int | None = None, **more: object) -> Pod:
    phase = "Succeeded" if code == 0 else "Failed"
    return replace(RUNNING, exit_code=code, phase=more.pop("phase", phase), **more)  # type: ignore[arg-type]


def words(kind: Ended, step: int = 0, **more: object) -> str:
    return to_json(Ending(kind=kind, step=step, reason="because", **more))  # type: ignore[arg-type]


def disrupted(reason: str) -> Pod:
    return over(143, conditions=(("DisruptionTarget", "True", reason),))


REPLACE, ELSEWHERE, FAIL = Action.REPLACE, Action.REPLACE_ELSEWHERE, Action.FAIL


@pytest.mark.parametrize(
    ("ended", "cause", "action", "counts"),
    [
        (over(137, ended="OOMKilled"), Cause.OOM, REPLACE, True),
        (over(137, last_words=words(Ended.OOM)), Cause.OOM, REPLACE, True),
        (over(137, ended="Error"), Cause.KILLED, REPLACE, True),
        (over(137, reason="Evicted"), Cause.EVICTED, ELSEWHERE, False),
        (over(None, reason="Evicted"), Cause.EVICTED, ELSEWHERE, False),
        (over(None, reason="Preempting"), Cause.PREEMPTED, REPLACE, False),
        (disrupted("PreemptionByScheduler"), Cause.PREEMPTED, REPLACE, False),
        (disrupted("EvictionByEvictionAPI"), Cause.EVICTED, REPLACE, False),
        (disrupted("DeletionByTaintManager"), Cause.EVICTED, REPLACE, False),
        (disrupted("TerminationByKubelet"), Cause.EVICTED, ELSEWHERE, False),
        (disrupted("DeletionByPodGC"), Cause.NODE_LOST, ELSEWHERE, False),
        (disrupted("OfTheFuture"), Cause.PREEMPTED, REPLACE, False),
        (over(None, reason="NodeLost"), Cause.NODE_LOST, ELSEWHERE, False),
        (over(None, reason="Terminated"), Cause.PREEMPTED, REPLACE, False),
        (over(None, reason="UnexpectedAdmissionError"), Cause.REFUSED, ELSEWHERE, False),
        (over(None, reason="OutOfcpu"), Cause.REFUSED, REPLACE, False),
        (over(None), Cause.NODE_LOST, ELSEWHERE, False),
        (over(None, reason="DeadlineExceeded"), Cause.USER_ERROR, FAIL, True),
        (over(143, reason="DeadlineExceeded"), Cause.USER_ERROR, FAIL, True),
        (replace(RUNNING, deleting=True), Cause.DELETED, REPLACE, False),
        (over(0), Cause.COMPLETED, Action.IGNORE, False),
        (over(None, phase="Succeeded"), Cause.COMPLETED, Action.IGNORE, False),
        (over(1), Cause.USER_ERROR, REPLACE, True),
        (over(2), Cause.USER_ERROR, FAIL, True),
        (over(126), Cause.USER_ERROR, FAIL, True),
        (over(127), Cause.USER_ERROR, FAIL, True),
        (over(134), Cause.CRASHED, REPLACE, True),
        (over(135), Cause.CRASHED, REPLACE, True),
        (over(136), Cause.CRASHED, REPLACE, True),
        (over(139), Cause.CRASHED, REPLACE, True),
        (over(130), Cause.STOPPED, REPLACE, False),
        (over(143), Cause.STOPPED, REPLACE, False),
        (over(210), Cause.MASTER_LOST, REPLACE, False),
        (over(211), Cause.UNHEALTHY, ELSEWHERE, False),
        (over(212), Cause.STRAGGLER, ELSEWHERE, False),
        (over(213), Cause.DRAINED, REPLACE, False),
        (over(214), Cause.RENDEZVOUS_TIMEOUT, REPLACE, True),
        (over(215), Cause.HANG, REPLACE, True),
        (over(216), Cause.BELOW_MIN, REPLACE, False),
        (over(1, last_words=words(Ended.STOPPED)), Cause.STOPPED, REPLACE, False),
        (over(1, last_words=words(Ended.HARDWARE)), Cause.HARDWARE, ELSEWHERE, False),
        (over(1, last_words=words(Ended.USER_ERROR)), Cause.USER_ERROR, REPLACE, True),
    ],
)  # fmt: skip
def test_rows(ended: Pod, cause: Cause, action: Action, counts: bool) -> None:
    verdict = judge(ended, Past())
    assert (verdict.cause, verdict.action, verdict.counts) == (cause, action, counts)
    assert verdict.reason.startswith("gpt-worker-3-r0: ")


def test_the_runtimes_words_are_told_of_a_container_that_it_could_not_start() -> None:
    """Of one that ran, its last words are whatever its script wrote."""
    missing = over(128, ended="StartError", last_words='exec: "train": not found\nin $PATH')
    said = 'gpt-worker-3-r0: its container could not be started: exec: "train": not found in $PATH'
    assert judge(missing, Past()).reason == said
    ran = over(128, ended="Error", last_words="loss 3.2")
    assert judge(ran, Past()).reason == "gpt-worker-3-r0: its container could not be started"


@pytest.mark.parametrize(
    "said",
    [
        "OCI runtime create failed: error running hook: nvidia-container-cli: initialization error: nvml error: driver not loaded",
        'could not select device driver "nvidia" with capabilities: [[gpu]]',
    ],
)  # fmt: skip
def test_a_node_without_a_device_or_its_driver_is_avoided(said: str) -> None:
    verdict = judge(over(128, ended="StartError", last_words=said), Past())
    assert (verdict.cause, verdict.action, verdict.counts) == (
        Cause.HARDWARE, Action.REPLACE_ELSEWHERE, False,
    )  # fmt: skip
    assert said[:80] in verdict.reason
    ran = over(128, ended="Error", last_words=said)
    assert judge(ran, Past()).cause is Cause.USER_ERROR, "its script's words"


def test_sigbus_has_a_hint() -> None:
    assert "/dev/shm" in judge(over(135), Past()).reason


def test_what_kueue_takes_back_is_preempted() -> None:
    taken = over(143, conditions=(("TerminationTarget", "True", "StoppedByKueue"),))
    verdict = judge(taken, Past())
    assert (verdict.cause, verdict.action, verdict.counts) == (Cause.PREEMPTED, REPLACE, False)


def after(*ends: Pod, steps: tuple[int, ...]) -> Past:
    past = Past()
    for ended, step in zip(ends, steps, strict=True):
        past = remember(past, ended, judge(ended, past), step)
    return past


@pytest.mark.parametrize(
    ("first", "second", "action"),
    [
        (100, 105, FAIL),
        (100, 300, REPLACE),
        (0, 0, FAIL),
        (1000, 1090, FAIL),
        (1000, 1200, REPLACE),
    ],
)
def test_out_of_memory_twice(first: int, second: int, action: Action) -> None:
    """At a similar step it is the script; it never loops."""
    past = after(over(137, ended="OOMKilled"), steps=(first,))
    again = over(137, ended="OOMKilled", last_words=words(Ended.OOM, second))
    assert judge(again, past).action is action


def test_one_that_was_killed_for_its_memory_left_no_words() -> None:
    """The job's step says where that was."""
    killed = over(137, ended="OOMKilled")
    past = after(killed, steps=(100,))
    assert judge(killed, past, step=105).action is FAIL
    assert judge(killed, past, step=5000).action is REPLACE


def test_crashes_on_many_nodes_blame_none() -> None:
    past = after(over(139), over(139), steps=(5, 6))
    assert judge(replace(over(139), node="n8"), past).action is REPLACE


def test_crashes_in_a_row_blame_the_node() -> None:
    past = after(over(139), over(139), steps=(5, 6))
    assert judge(over(139), past).action is ELSEWHERE
    assert (
        judge(over(139), after(over(139), over(143), over(139), steps=(5, 6, 7))).action is REPLACE
    )


def test_the_same_error_three_times_without_a_step() -> None:
    past = after(over(1), over(1), steps=(0, 0))
    assert judge(over(1), past).action is FAIL
    assert judge(over(1), progressed(past)).action is REPLACE
    assert judge(over(1), after(over(1), over(3), steps=(0, 0))).action is REPLACE
    assert judge(over(3), past).action is REPLACE
    assert judge(over(1), after(over(137), over(137), steps=(0, 0))).action is REPLACE


RULES = (
    Rule(name="quiet", exit_codes=(42,), action=Action.IGNORE, counts=False),
    Rule(name="cuda", patterns=(r"CUDA error: \w+",), action=ELSEWHERE),
    Rule(name="spot", conditions=("DisruptionTarget",), action=Action.SHRINK),
    Rule(name="oom", reasons=("OOMKilled",), action=FAIL, counts=True),
    Rule(name="any other", exit_codes=(0, 137), among=False, action=Action.RESTART_JOB),
)


@pytest.mark.parametrize(
    ("ended", "rule", "action", "counts"),
    [
        (over(42), "quiet", Action.IGNORE, False),
        (over(1, last_words="RuntimeError: CUDA error: misaligned"), "cuda", ELSEWHERE, True),
        (disrupted("PreemptionByScheduler"), "spot", Action.SHRINK, False),
        (over(137, ended="OOMKilled"), "oom", FAIL, True),
        (over(7), "any other", Action.RESTART_JOB, True),
        (over(137), "", REPLACE, True),
        (over(0), "", Action.IGNORE, False),
        (replace(RUNNING, deleting=True), "", REPLACE, False),
    ],
)
def test_the_users_rules_come_first_in_their_order(
    ended: Pod, rule: str, action: Action, counts: bool
) -> None:
    verdict = judge(ended, Past(), RULES)
    assert (verdict.rule, verdict.action, verdict.counts) == (rule, action, counts)


@pytest.mark.parametrize(
    ("ended", "proof"),
    [
        (over(211), True),
        (over(1, last_words=words(Ended.HARDWARE)), True),
        (over(212), False),
        (over(None, reason="NodeLost"), False),
        (over(1, last_words="RuntimeError: CUDA error: misaligned"), True),
    ],
)
def test_what_is_proof_against_a_node(ended: Pod, proof: bool) -> None:
    verdict = judge(ended, Past(), RULES[1:2])
    assert (verdict.action, verdict.proof) == (ELSEWHERE, proof)


@pytest.mark.parametrize("ended", [over(0), over(None, phase="Succeeded")])
@pytest.mark.parametrize(
    "rule",
    [Rule(name="all", action=FAIL), Rule(name="not 3", action=FAIL, exit_codes=(3,), among=False)],
)
def test_success_is_judged_by_no_rule(ended: Pod, rule: Rule) -> None:
    verdict = judge(ended, Past(), (rule,))
    assert (verdict.cause, verdict.action, verdict.rule) == (Cause.COMPLETED, Action.IGNORE, "")


@pytest.mark.parametrize(
    ("waiting", "message", "hopeless"),
    [
        ("ImagePullBackOff", "not found", False),
        ("ErrImagePull", "unauthorized: authentication required", True),
        ("InvalidImageName", "", True),
        ("CreateContainerConfigError", 'secret "x" not found', False),
    ],
)
def test_containers_that_do_not_start(waiting: str, message: str, hopeless: bool) -> None:
    found = held_up(replace(RUNNING, waiting=waiting, waiting_message=message))
    assert found is not None
    assert (found.image, found.hopeless) == (True, hopeless)
    assert re.search(waiting, found.why)
    assert of_an_image(found.why)
    assert held_up(replace(RUNNING, waiting="ContainerCreating")) is None
    unplaced = held_up(replace(RUNNING, unschedulable="0/3 nodes: ErrImagePull"))
    assert unplaced is not None
    assert not unplaced.image
    assert not of_an_image(unplaced.why)


def test_a_pod_is_read_from_raw_json() -> None:
    raw = {
        "metadata": {
            "name": "gpt-worker-3-r1", "uid": "u", "creationTimestamp": "2026-11-26T17:00:00Z",
            "deletionTimestamp": "2026-11-26T17:01:00Z",
        },
        "spec": {"nodeName": "n7"},
        "status": {
            "phase": "Failed",
            "conditions": [{"type": "Ready", "status": "False"}, {"type": "X", "status": "True", "reason": "Y"}],
            "containerStatuses": [
                {"name": "sidecar", "state": {"running": {}}},
                {"name": "main", "state": {"terminated": {"exitCode": 3, "reason": "Error", "message": "m"}}},
            ],
        },
    }  # fmt: skip
    found = pod(raw, 3, 1)
    assert (found.exit_code, found.ended, found.last_words, found.node) == (3, "Error", "m", "n7")
    assert (found.over, found.alive, found.deleting) == (True, False, True)
    assert found.conditions[1] == ("X", "True", "Y")
    assert pod({}, 0, 0).alive
    main = {"state": {"waiting": {"reason": "PodInitializing"}}}
    before = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}
    status = {"containerStatuses": [main], "initContainerStatuses": [{"state": {}}, before]}
    found = pod({"status": status}, 0, 0)
    assert (found.waiting, found.waiting_message) == ("ErrImagePull", "no such")
    waits = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "full",
    }
    assert pod({"status": {"conditions": [waits]}}, 0, 0).unschedulable == "full"


def test_no_rule_judges_success() -> None:
    every = Rule(name="every", action=Action.FAIL)
    assert judge(over(0), Past(), (every,)).action is Action.IGNORE
    assert judge(over(1), Past(), (every,)).action is Action.FAIL


def test_a_templates_own_deadline_blames_no_node() -> None:
    found = judge(over(None, reason="DeadlineExceeded"), Past())
    assert (found.cause, found.action) == (Cause.USER_ERROR, Action.FAIL)
    assert "spec.activeDeadlineSeconds" in found.reason

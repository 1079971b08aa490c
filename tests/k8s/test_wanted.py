"""What the spec says to launcher and master, and what the launcher says to the status."""

from dataclasses import replace

import pytest

from elastic import supplied
from elastic.k8s.causes import Action, judge
from elastic.k8s.observed import Pod
from elastic.k8s.placing import Limits
from elastic.k8s.spec import read
from elastic.k8s.supply import Memory, Plan
from elastic.k8s.wanted import limits, wanted
from elastic.master.policy import Policy
from elastic.proto.elasticjob import Past

SPEC = read(
    {
        "image": "x",
        "worker": {"replicas": 4},
        "elastic": {
            "min": 2,
            "max": 8,
            "nodeUnit": 2,
            "scaleUpCooldownSeconds": 7,
            "lastCallSeconds": 3,
        },
        "hotSpares": {"count": 1},
        "flashCheckpoint": {"drainSeconds": 90},
        "healthCheck": {
            "preflight": "Full",
            "excludeStragglers": True,
            "hang": {"action": "DumpOnly"},
        },
        "failurePolicy": {
            "maxRestarts": 5,
            "rules": [
                {
                    "name": "quiet",
                    "match": {
                        "exitCodes": {"operator": "NotIn", "values": [3]},
                        "reasons": ["Error"],
                    },
                    "action": "Ignore",
                    "countsTowardLimit": False,
                }
            ],
        },
        "scheduling": {"pending": {"timeoutSeconds": 60, "policy": "Fail"}},
        "nodePolicy": {"maxAvoided": "3", "ttlSeconds": 50, "requireConfirmations": 1},
    }
)


def test_of_the_launcher() -> None:
    found = wanted(SPEC)
    assert (found.replicas, found.least, found.unit, found.spares) == (4, 2, 2, 1)
    assert (found.pending_timeout, found.pending, found.cooldown, found.drain) == (
        60.0,
        "Fail",
        7.0,
        150.0,
    )
    pod = Pod(name="p", uid="u", slot=0, attempt=0, phase="Failed", exit_code=9, ended="Error")
    assert found.hopeless == 300.0
    assert wanted(replace(SPEC, pre_running_deadline_seconds=20)).hopeless == 300.0
    assert wanted(replace(SPEC, pre_running_deadline_seconds=900)).hopeless == 900.0
    verdict = judge(pod, Past(), found.rules)
    assert (verdict.rule, verdict.action, verdict.counts) == ("quiet", Action.IGNORE, False)
    assert judge(replace(pod, exit_code=3), Past(), found.rules).rule == ""


def test_of_nodes_that_are_avoided() -> None:
    assert limits(SPEC) == Limits(most="3", ttl=50.0, confirmations=1)
    none = replace(SPEC, node_policy=replace(SPEC.node_policy, on_fault="None"))
    assert limits(none).count(1000) == 0


def test_of_the_master() -> None:
    assert supplied.policy(SPEC) == Policy(
        min_nodes=2, max_nodes=4, node_unit=2, supplied=True, last_call=3.0, fault_budget=5, precheck="full",
        exclude_straggler=True, hang_action="dump", drain_timeout=90.0,
    )  # fmt: skip
    sizes = read({"image": "x", "elastic": {"min": 2, "max": 8, "discreteSizes": [8, 2]}})
    assert (supplied.policy(sizes).sizes, wanted(sizes).sizes) == ((2, 8), (2, 8))
    off = read({"image": "x", "healthCheck": {"preflight": "Off", "hang": {"enabled": False}}})
    assert (supplied.policy(off).precheck, supplied.policy(off).hang_action) == ("off", "ignore")


@pytest.mark.parametrize(
    ("said", "action"), [("DumpAndRestart", "recover"), ("DumpOnly", "dump"), ("Fail", "fail")]
)
def test_of_a_hang(said: str, action: str) -> None:
    spec = read({"image": "x", "healthCheck": {"hang": {"action": said}}})
    assert supplied.policy(spec).hang_action == action


def test_the_status_of_workers() -> None:
    assert supplied.workers(None, "quota").refused == "quota"
    pending = tuple((f"p{n}", f"p{n}: no room") for n in range(20))
    plan = Plan(memory=Memory(), desired=4, ready=6, waiting=1, spares=1, pending=pending)
    found = supplied.workers(plan, "")
    assert (found.desired, found.ready, found.waiting, found.spares) == (4, 4, 1, 1)
    assert found.pending == tuple(f"p{n}: no room" for n in range(10))


@pytest.mark.parametrize(
    ("command", "restarts"),
    [
        (["elastic-run", "--max-restarts=3", "train.py"], 3),
        (["/usr/bin/torchrun", "--nnodes", "4", "--max_restarts", "2", "train.py"], 2),
        (["elastic-run", "train.py", "--max-restarts=7"], 0),
        (["bash", "-c", "cd /x && exec elastic-run --max-restarts 4 -m x"], 4),
        (["sh", "-c", "echo 'left open"], 0),
        (["elastic-run", "--no-such-flag", "train.py"], 0),
        (["sleep", "inf"], 0),
    ],
)
def test_the_scripts_own_errors_are_as_its_command_says(command: list[str], restarts: int) -> None:
    assert supplied.policy(read({"image": "i", "command": command})).max_restarts == restarts


def test_flags_that_no_field_stands_for_are_as_its_command_says() -> None:
    own = "--rank-unit 2 --preparation=3 --lease 9 --below-min-timeout 60 --hang-floor 30 --straggler-interval 7"
    fields = "--nnodes 1:9 --node-unit 3 --last-call 99 --fault-budget 0 --precheck full --drain-timeout 1"
    command = f"elastic-run {own} --failure-grace 4 {fields} --hang-action dump train.py".split()
    plain = supplied.policy(read({"image": "i"}))
    assert supplied.policy(read({"image": "i", "command": command})) == replace(
        plain, rank_unit=2, preparation=3.0, lease=9.0, below_min_timeout=60.0, hang_floor=30.0,
        straggler_interval=7.0, failure_grace=4.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "flag", ["--max-restarts=-1", "--rank-unit=0", "--hang-floor=0", "--lease=x"]
)
def test_flags_that_make_no_sense_end_no_master(flag: str) -> None:
    command = ["elastic-run", "--max-restarts=3", flag, "train.py"]
    assert supplied.policy(read({"image": "i", "command": command})) == supplied.policy(
        read({"image": "i"})
    )

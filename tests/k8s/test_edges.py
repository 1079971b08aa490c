"""The last values that each field of a spec takes, and the first that it does not."""

import re
from typing import Any

import pytest

from elastic.k8s import rules
from elastic.k8s.crd import reference
from tests.k8s.test_rules import GOOD, failing

EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "worker.replicas": ([1, 10000], [0, 10001, "1", 1.5, True]),
    "worker.disruptionBudget": (["None", "ProtectMin"], ["", "none"]),
    "elastic.min": ([1], [0, 10001]),
    "elastic.max": ([1, 10000], [0, 10001]),
    "elastic.nodeUnit": ([1], [0, 10001]),
    "elastic.discreteSizes": ([[], [1] * 64], [[0], [1] * 65, "1", [None]]),
    "elastic.scaleUpCooldownSeconds": ([0], [-1]),
    "elastic.lastCallSeconds": ([0], [-1, "30s"]),
    "hotSpares.count": ([0, 1], [-1, 1001]),
    "master.resources": (
        [{}, {"limits": {"cpu": 0.5, "memory": "1e9"}}],
        [[], {"limits": {"memory": "1GB"}}],
    ),
    "master.storageClaim": (["", "disk"], [1]),
    "master.maxRestarts": ([0], [-1]),
    "master.serviceAccountName": (["x"], [{}]),
    "healthCheck.preflight": (["Off", "Quick", "Full"], ["off", True]),
    "healthCheck.excludeStragglers": ([True], ["true", 1]),
    "healthCheck.hang.enabled": ([False], ["no"]),
    "healthCheck.hang.action": (["DumpOnly", "Fail"], ["Dump"]),
    "flashCheckpoint.memory": (
        ["0", "64Gi", "1e9", "2Ei", "1.5T"],
        ["lots", "1.5.5Gi", "64gb", 64],
    ),
    "flashCheckpoint.drainSeconds": ([1, 86400], [0, 86401]),
    "failurePolicy.maxRestarts": ([0, 1_000_000], [-1, 1_000_001]),
    "failurePolicy.rules": (
        [[], [failing(name="n" * 63)]],
        [[failing(name="n" * 64)], [failing(action="x")], [{}]],
    ),
    "failurePolicy.rules.0.match.exitCodes.values": ([[0], [255]], [[], [-1], [256], ["1"]]),
    "failurePolicy.rules.0.match.exitCodes.operator": (["In", "NotIn"], ["Is"]),
    "failurePolicy.rules.0.match.reasons": ([["x"] * 32], [["x"] * 33]),
    "failurePolicy.rules.0.match.podConditions": ([["x"] * 32], [["x"] * 33]),
    "failurePolicy.rules.0.match.logPatterns": ([["x" * 500]], [["x" * 501], ["x"] * 33, ["("]]),
    "failurePolicy.rules.0.countsTowardLimit": ([False], ["no"]),
    "scheduling.gang.provider": (["None", "Volcano", "Coscheduling"], ["Kueue", "volcano"]),
    "scheduling.gang.scheduleTimeoutSeconds": ([1], [0]),
    "scheduling.queue": ([""], ["q", "q" * 254]),
    "scheduling.priorityClassName": (["p" * 253], ["p" * 254]),
    "scheduling.schedulerName": (["p" * 253], ["p" * 254]),
    "scheduling.nodeSelector": ([{}, {"a": "b"}], [{"a": 1}, []]),
    "scheduling.tolerations": ([[{}] * 64], [[{}] * 65, ["x"]]),
    "scheduling.affinity": ([{}, {"nodeAffinity": None}], [[], {"nodeAffinity": "x"}]),
    "scheduling.pending.timeoutSeconds": ([1], [0]),
    "scheduling.pending.policy": (["Wait", "Fail"], ["Stay"]),
    "nodePolicy.onFault": (["None"], ["Avoid"]),
    "nodePolicy.maxAvoided": (["0", "99999", "100%", "0%"], ["101%", "100000", "-1", "x", 3]),
    "nodePolicy.ttlSeconds": ([1], [0]),
    "nodePolicy.requireConfirmations": ([1, 100], [0, 101]),
    "cleanup.podPolicy": (["All", "None"], ["Some"]),
    "cleanup.ttlSecondsAfterFinished": ([0], [-1]),
    "suspend": ([True], ["yes", 1]),
    "managedBy": (["kueue.x-k8s.io/multikueue"], ["me"]),
    "nprocPerNode": (["auto", "gpu", "cpu", "8", 9999, 1], ["banana", 0, -1, 10000, "08", "", {}]),
    "image": (["i"], [1, ""]),
    "command": ([["a"]], ["a", [1]]),
    "args": ([["a"]], ["a", [1]]),
    "env": ([[{"name": "A"}] * 1024], [[{"name": "A"}] * 1025, [{}], [{"name": "RANK"}]]),
    "env.0.valueFrom": ([{"fieldRef": {}}], ["x"]),
    "env.0.value": (["x"], [1]),
    "env.0.name": (["A"], [1, "WORLD_SIZE"]),
    "workingDir": (["/x"], [1]),
    "notify": ([["u"] * 16], [["u"] * 17, "u"]),
    "activeDeadlineSeconds": ([1], [0]),
    "preRunningDeadlineSeconds": ([1], [0]),
}


def edged(path: str, value: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {**GOOD, "elastic": {}, "worker": {}}
    if "rules.0" in path:
        spec["failurePolicy"] = {"rules": [failing(match={"exitCodes": {"values": [1]}})]}
    if "env.0" in path:
        spec["env"] = [{"name": "A"}]
    node: Any = spec
    *keys, last = path.split(".")
    for key in keys:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    node[last] = value
    return spec


@pytest.mark.parametrize("path", EDGES)
def test_a_field_takes_its_edge_and_nothing_beyond_it(path: str) -> None:
    taken, refused = EDGES[path]
    for value in taken:
        assert rules.violations("job", edged(path, value)) == (), value
    for value in refused:
        assert rules.violations("job", edged(path, value)), value


def test_each_field_has_its_edges() -> None:
    rows = re.findall(r"^\| `([^`]+)`", reference(), re.MULTILINE)
    fields = {row.replace("[]", ".0") for row in rows} - {"scheduling", "worker.template"}
    parts = {
        f"failurePolicy.rules.0.{name}" for name in ("match", "match.exitCodes", "name", "action")
    }
    assert fields - parts == set(EDGES) - {"env"}  # whose own row it has not

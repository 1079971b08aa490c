"""A pod's status from its containers, and its volumes' mounts: pure."""

from pathlib import Path

import pytest

from scripts.kubernetes import volumes
from scripts.kubernetes.containers import Ended
from scripts.kubernetes.status import Run, container_id, pod_status, restarts, terminated
from tests.k8s.cluster import Object

ENDED = Ended(code=1, reason="Error", message="m", started="s", finished="f")
MANIFEST: Object = {"name": "main", "image": "local"}
RUNNING: Object = {"running": {"startedAt": "s"}}


def told(*main: Run, phase: str = "Running", **extra: object) -> Object:
    return pod_status(
        uid="u", phase=phase, address="127.0.0.9", started="s", init=[], main=main,
        initialized=True, extra=dict(extra),
    )  # fmt: skip


def conditions(status: Object) -> dict[str, str]:
    return {each["type"]: each["status"] for each in status["conditions"]}


def test_ready_is_when_all_containers_run() -> None:
    one, two = Run(manifest=MANIFEST, state=RUNNING), Run(manifest=MANIFEST)
    assert conditions(told(one))["Ready"] == "True"
    assert conditions(told(one, two))["Ready"] == "False"
    assert conditions(told(one, phase="Failed"))["Ready"] == "False"


def test_a_container_that_has_ended_tells_how() -> None:
    run = Run(manifest=MANIFEST, state=terminated(ENDED, "id"), restarts=2)
    (container,) = told(run)["containerStatuses"]
    ended = container["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (1, "Error", "m")
    assert (container["ready"], container["restartCount"]) == (False, 2)
    assert container["containerID"] == container_id("u", run)


def test_words_and_conditions_of_an_eviction_are_beside_the_kubelets_own() -> None:
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    status = told(phase="Failed", reason="Evicted", message="low", conditions=[disrupted])
    assert (status["reason"], status["message"]) == ("Evicted", "low")
    assert conditions(status)["DisruptionTarget"] == "True"
    assert conditions(status)["Initialized"] == "True"


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        ("Always", 0, True), ("Always", 1, True), ("OnFailure", 0, False),
        ("OnFailure", 1, True), ("Never", 1, False),
    ],
)  # fmt: skip
def test_who_is_started_again(policy: str, code: int, again: bool) -> None:
    assert restarts(policy, code) is again


def test_mounts_come_outer_before_inner(tmp_path: Path) -> None:
    kinds: list[Object] = [{"emptyDir": {}}, {"hostPath": {"path": "/opt"}}, {"secret": {}}]
    names = ("scratch", "host", "secret")
    pod = {
        "spec": {
            "automountServiceAccountToken": False,
            "volumes": [{"name": name, **kind} for name, kind in zip(names, kinds, strict=True)],
        }
    }
    mounts = [
        {"name": "scratch", "mountPath": "/data/inner", "subPath": "part"},
        {"name": "host", "mountPath": "/data", "readOnly": True},
        {"name": "secret", "mountPath": "/s"},
    ]
    found = volumes.binds(pod, {"volumeMounts": mounts}, tmp_path)
    assert [(bind["target"], bind["read_only"]) for bind in found] == [
        ("/s", True), ("/data", True), ("/data/inner", False),
    ]  # fmt: skip
    assert [bind["source"] for bind in found][1:] == ["/opt", str(tmp_path / "scratch" / "part")]


def test_an_account_is_mounted_where_clients_look(tmp_path: Path) -> None:
    (bind,) = volumes.binds({"spec": {}}, {}, tmp_path)
    assert bind["target"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert volumes.binds({"spec": {"automountServiceAccountToken": False}}, {}, tmp_path) == []

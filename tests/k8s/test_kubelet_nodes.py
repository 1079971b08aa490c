"""Nodes that crash, hang, fall silent, are cordoned and deleted; owners that are deleted."""

from pathlib import Path

import pytest

from scripts.kubernetes.client import CORE
from tests.k8s.cluster import Cluster, Namespace, Object, run_kubelet
from tests.waiting import wait_for

SLEEPS = ("sleep", "1000")
AWAY = {"effect": "NoExecute", "key": "node.kubernetes.io/unreachable", "operator": "Exists"}


def test_a_crashed_node_is_not_ready_and_its_pod_stays_terminating(cluster: Cluster) -> None:
    cluster.start("lost", *SLEEPS, tolerations=[{**AWAY, "tolerationSeconds": 1}])
    cluster.start("spared", *SLEEPS)
    for name in ("lost", "spared"):
        cluster.wait_phase(name, "Running")
    node = cluster.node_of("lost")
    assert cluster.node_of("spared") != node  # the emptiest node is taken
    cluster.fault(node, "crash")
    cluster.wait_condition("lost", "Ready", "False")
    found = cluster.namespace.client.get(f"{CORE}/nodes/{node}")
    assert {each["effect"] for each in found["spec"]["taints"]} == {"NoSchedule", "NoExecute"}
    wait_for("it is deleted", lambda: "deletionTimestamp" in _metadata(cluster, "lost"))
    cluster.start("elsewhere", *SLEEPS)
    cluster.wait_phase("elsewhere", "Running")
    assert cluster.node_of("elsewhere") != node
    assert cluster.phase("lost") == "Running"  # nobody there to say otherwise

    cluster.fault(node, None)
    cluster.wait_gone("lost")
    assert cluster.phase("spared") == "Running"


def test_a_crashed_node_that_comes_back_starts_again_what_may(cluster: Cluster) -> None:
    cluster.start("again", *SLEEPS, restartPolicy="OnFailure", nodeSelector=_first(cluster))
    cluster.start("once", *SLEEPS, nodeSelector=_first(cluster))
    for name in ("again", "once"):
        cluster.wait_phase(name, "Running")
    node = cluster.node_of("again")
    cluster.fault(node, "crash")
    cluster.wait_condition("again", "Ready", "False")
    cluster.fault(node, None)
    pod = cluster.wait_phase("once", "Failed")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    cluster.wait_condition("again", "Ready", "True")
    pod = cluster.wait_phase("again", "Running")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1


def test_a_silent_nodes_processes_run_on(cluster: Cluster) -> None:
    program = "while :; do echo x; sleep 0.05; done"
    cluster.start("talks", "sh", "-c", program)
    cluster.wait_phase("talks", "Running")
    cluster.fault(cluster.node_of("talks"), "silent")
    cluster.wait_condition("talks", "Ready", "False")
    before = len(cluster.log("talks"))
    wait_for("it talks on", lambda: len(cluster.log("talks")) > before + 4)
    cluster.fault(cluster.node_of("talks"), None)
    cluster.wait_condition("talks", "Ready", "True")


def test_a_frozen_nodes_processes_stop_and_go_on(cluster: Cluster) -> None:
    program = "while :; do echo x; sleep 0.05; done"
    cluster.start("stops", "sh", "-c", f"({program}) & {program}")
    cluster.wait_phase("stops", "Running")
    cluster.fault(cluster.node_of("stops"), "frozen")
    cluster.wait_condition("stops", "Ready", "False")  # written after they had been stopped
    before = len(cluster.log("stops"))
    cluster.start("later", "sh", "-c", "sleep 0.5")
    cluster.wait_phase("later", "Succeeded")
    assert len(cluster.log("stops")) == before
    cluster.fault(cluster.node_of("stops"), None)
    wait_for("it goes on", lambda: len(cluster.log("stops")) > before + 4)
    cluster.wait_condition("stops", "Ready", "True")


def test_a_deleted_nodes_pods_go_with_it(cluster: Cluster) -> None:
    cluster.start("orphan", *SLEEPS)
    cluster.wait_phase("orphan", "Running")
    cluster.namespace.client.delete(f"{CORE}/nodes/{cluster.node_of('orphan')}")
    cluster.wait_gone("orphan")


def test_a_cordoned_node_gets_no_new_pod(cluster: Cluster) -> None:
    nodes = [f"{cluster.namespace.name}-node-{number}" for number in range(3)]
    for name in nodes[1:]:
        cluster.namespace.client.merge(f"{CORE}/nodes/{name}", {"spec": {"unschedulable": True}})
    for number in range(3):
        cluster.start(f"p{number}", *SLEEPS)
        cluster.wait_phase(f"p{number}", "Running")
        assert cluster.node_of(f"p{number}") == nodes[0]


def test_affinity_keeps_a_pod_from_a_node(cluster: Cluster) -> None:
    first = f"{cluster.namespace.name}-node-0"
    avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [first]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [avoid]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    for number in range(3):
        cluster.start(f"p{number}", *SLEEPS, affinity=affinity)
        cluster.wait_phase(f"p{number}", "Running")
        assert cluster.node_of(f"p{number}") != first


def test_gpus_are_counted(namespace: Namespace, tmp_path: Path) -> None:
    asked = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    with run_kubelet(namespace, tmp_path / "kubelet", "--nodes=1", "--gpus=8") as cluster:
        cluster.start("first", *SLEEPS, container=asked, terminationGracePeriodSeconds=0)
        cluster.wait_phase("first", "Running")
        cluster.start("second", *SLEEPS, container=asked)
        condition = cluster.wait_condition("second", "PodScheduled", "False")
        assert condition["message"] == "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
        cluster.namespace.client.delete(namespace.path("pods", "first"))
        cluster.wait_phase("second", "Running")


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_what_is_owned_goes_with_its_owner(cluster: Cluster, policy: str) -> None:
    kube, within = cluster.namespace.client, cluster.namespace
    owner = kube.create(within.path("configmaps"), {"metadata": {"name": "owner"}})
    reference = {
        "apiVersion": "v1", "kind": "ConfigMap", "name": "owner",
        "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    metadata = {"name": "owned", "ownerReferences": [reference]}
    container = {"name": "main", "image": "local", "command": list(SLEEPS)}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    cluster.create({"metadata": metadata, "spec": spec})
    cluster.start("free", *SLEEPS)
    for name in ("owned", "free"):
        cluster.wait_phase(name, "Running")
    kube.delete(within.path("configmaps", "owner"), propagationPolicy=policy)
    # The owner is read first: both may go between the two answers.
    owner_left = within.find("configmaps", "owner") is not None
    if policy == "Foreground" and cluster.pod("owned"):
        assert owner_left
    cluster.wait_gone("owned")
    wait_for("the owner is gone", lambda: within.find("configmaps", "owner") is None)
    assert cluster.phase("free") == "Running"


def test_the_kubelet_takes_everything_with_it(namespace: Namespace, tmp_path: Path) -> None:
    with run_kubelet(namespace, tmp_path / "kubelet") as cluster:
        cluster.start("left", "sh", "-c", "while :; do echo x; sleep 0.05; done")
        cluster.wait_phase("left", "Running")
    length = len(cluster.log("left"))
    nodes = namespace.client.get(f"{CORE}/nodes")["items"]
    assert not [n for n in nodes if n["metadata"]["name"].startswith(namespace.name)]
    assert len(cluster.log("left")) == length
    assert not list((cluster.folder / "pods").iterdir())


def _metadata(cluster: Cluster, name: str) -> Object:
    pod = cluster.pod(name)
    return dict(pod["metadata"]) if pod else {}


def _first(cluster: Cluster) -> Object:
    return {"kubernetes.io/hostname": f"{cluster.namespace.name}-node-0"}

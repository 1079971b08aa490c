"""Where pods go, by tables."""

import pytest

from scripts.kubernetes.quantities import amount
from scripts.kubernetes.scheduling import Room, misfit, place, rooms, tolerates
from tests.k8s.cluster import Object

TAINT = {"key": "k", "value": "v", "effect": "NoSchedule"}


def node(
    name: str = "n", *, cpu: str = "4", taints: tuple[Object, ...] = (), **spec: object
) -> Object:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "zone": "a"}},
        "spec": {"taints": list(taints), **spec},
        "status": {"allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "10"}},
    }


def pod(cpu: str = "1", *, on: str = "", phase: str = "Running", **spec: object) -> Object:
    container = {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}
    made: Object = {
        "metadata": {"name": "p", "labels": {"app": "a"}},
        "spec": {"containers": [container], **spec},
        "status": {"phase": phase},
    }
    if on:
        made["spec"]["nodeName"] = on
    return made


def room(*pods: Object) -> Room:
    made = Room(node())
    for each in pods:
        made.take(each)
    return made


def affinity(operator: str, *values: str) -> Object:
    expression = {"key": "zone", "operator": operator, "values": list(values)}
    terms = [{"matchExpressions": [expression]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


@pytest.mark.parametrize(
    ("spec", "of_node", "reason"),
    [
        ({}, {}, ""),
        ({"cpu": "3500m"}, {}, "Insufficient cpu"),  # another one takes 1 of its 4
        ({"cpu": "3"}, {}, ""),
        ({"nodeSelector": {"zone": "a"}}, {}, ""),
        ({"nodeSelector": {"zone": "b"}}, {}, "node(s) didn't match node selector"),
        ({"affinity": affinity("In", "a", "b")}, {}, ""),
        ({"affinity": affinity("NotIn", "a")}, {}, "node(s) didn't match node selector"),
        ({"affinity": affinity("Exists")}, {}, ""),
        ({"affinity": affinity("DoesNotExist")}, {}, "node(s) didn't match node selector"),
        ({}, {"taints": (TAINT,)}, "node(s) had taints that the pod didn't tolerate"),
        ({"tolerations": [{"key": "k", "value": "v"}]}, {"taints": (TAINT,)}, ""),
        ({}, {"unschedulable": True}, "node(s) had taints that the pod didn't tolerate"),
    ],
)
def test_whether_a_pod_fits(spec: Object, of_node: Object, reason: str) -> None:
    assert misfit(pod(**spec), node(**of_node), room(pod("1"))) == reason


def test_two_that_repel_each_other() -> None:
    term = {"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    shy = pod(affinity=apart)
    assert misfit(shy, node(), room()) == ""
    assert misfit(shy, node(), room(pod())) == "node(s) didn't match pod anti-affinity rules"


def test_the_emptiest_node_that_fits() -> None:
    nodes = [node("a"), node("b"), node("c", cpu="1")]
    pods = [pod(on="a"), pod(on="a"), pod(on="b"), pod(on="b", phase="Failed")]
    there = rooms(nodes, pods)
    assert {name: len(each.pods) for name, each in there.items()} == {"a": 2, "b": 1, "c": 0}
    assert place(pod("1"), nodes, there) == ("c", "")
    assert place(pod("2"), nodes, there) == ("b", "")
    found, why = place(pod("5"), nodes, there)
    assert (found, why) == (None, "0/3 nodes are available: 3 Insufficient cpu.")


@pytest.mark.parametrize(
    ("toleration", "holds"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Exists"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "other"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_tolerations(toleration: Object, holds: bool) -> None:
    assert (tolerates(pod(tolerations=[toleration]), TAINT) is not None) is holds


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2.0), (3, 3.0), ("1Ki", 1024.0), ("1.5Gi", 1.5 * 2**30), ("1G", 1e9)],
)
def test_amounts(text: str | int, value: float) -> None:
    assert amount(text) == pytest.approx(value)

"""Which node a pod goes to: pure, as far as our manifests ask."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from scripts.kubernetes.quantities import amount

Object = dict[str, Any]
UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


class Room:
    """What a node has left."""

    def __init__(self, node: Object) -> None:
        self.free = {name: amount(value) for name, value in node["status"]["allocatable"].items()}
        self.pods: list[Object] = []

    def take(self, pod: Object) -> None:
        """It is there now."""
        self.pods.append(pod)
        for name, value in requests(pod).items():
            self.free[name] = self.free.get(name, 0) - value


def rooms(nodes: Iterable[Object], pods: Iterable[Object]) -> dict[str, Room]:
    """Of each node, by its name, with the pods that have not ended on it."""
    found = {node["metadata"]["name"]: Room(node) for node in nodes}
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if name in found and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            found[name].take(pod)
    return found


def place(
    pod: Object, nodes: Iterable[Object], rooms: Mapping[str, Room]
) -> tuple[str | None, str]:
    """The node with the fewest pods among those that fit; None, and why, in the scheduler's words."""
    reasons: Counter[str] = Counter()
    fitting = []
    for node in nodes:
        name = node["metadata"]["name"]
        if reason := misfit(pod, node, rooms[name]):
            reasons[reason] += 1
        else:
            fitting.append((len(rooms[name].pods), name))
    if fitting:
        return min(fitting)[1], ""
    listed = ", ".join(f"{times} {reason}" for reason, times in sorted(reasons.items()))
    return None, f"0/{len(rooms)} nodes are available: {listed}."


def misfit(pod: Object, node: Object, room: Room) -> str:
    """Why the pod cannot go to that node; empty where it can."""
    if not _tolerated(pod, node):
        return "node(s) had taints that the pod didn't tolerate"
    if not _selected(pod, node):
        return "node(s) didn't match node selector"
    if _repelled(pod, room.pods):
        return "node(s) didn't match pod anti-affinity rules"
    for name, value in requests(pod).items():
        if value > room.free.get(name, 0) + 1e-9:
            return f"Insufficient {name}"
    return ""


def requests(pod: Object) -> dict[str, float]:
    """What a pod reserves, and one place for itself."""
    total: dict[str, float] = {"pods": 1.0}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        asked = (resources.get("limits") or {}) | (resources.get("requests") or {})
        for name, value in asked.items():
            total[name] = total.get(name, 0.0) + amount(value)
    return total


def tolerates(pod: Object, taint: Object) -> Object | None:
    """The pod's toleration of that taint."""
    for toleration in pod["spec"].get("tolerations", []):
        if toleration.get("effect") not in (None, "", taint["effect"]):
            continue
        if toleration.get("key") not in (None, "", taint["key"]):
            continue
        exists = toleration.get("operator", "Equal") == "Exists"
        if exists or toleration.get("value", "") == taint.get("value", ""):
            return dict(toleration)
    return None


def taints(node: Object) -> list[Object]:
    """Its taints, being cordoned among them."""
    found = list(node["spec"].get("taints", []))
    return [*found, UNSCHEDULABLE] if node["spec"].get("unschedulable") else found


def _tolerated(pod: Object, node: Object) -> bool:
    keeping = ("NoSchedule", "NoExecute")
    return all(tolerates(pod, taint) for taint in taints(node) if taint["effect"] in keeping)


def _selected(pod: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels", {})
    wanted = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    name = {"metadata.name": node["metadata"]["name"]}
    return any(
        _matches(term.get("matchExpressions", []), labels)
        and _matches(term.get("matchFields", []), name)
        for term in required["nodeSelectorTerms"]
    )


def _matches(expressions: Iterable[Object], labels: Mapping[str, str]) -> bool:
    for each in expressions:
        value = labels.get(each["key"])
        holds = {
            "In": value in each.get("values", []),
            "NotIn": value not in each.get("values", []),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not holds[each["operator"]]:
            return False
    return True


def _repelled(pod: Object, there: Iterable[Object]) -> bool:
    """By a required anti-affinity within one node."""
    affinity = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", []):
        selector = term.get("labelSelector") or {}
        for other in there:
            labels = other["metadata"].get("labels", {})
            exact = (selector.get("matchLabels") or {}).items()
            if all(labels.get(key) == value for key, value in exact) and _matches(
                selector.get("matchExpressions", []), labels
            ):
                return True
    return False

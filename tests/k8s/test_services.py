"""Which pods a Service leads to, and the names that pods know: pure."""

from scripts.kubernetes.services import backends, hosts, target_port
from tests.k8s.cluster import Object


def pod(name: str, *, ready: bool = True, phase: str = "Running", **spec: str) -> Object:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": name, "namespace": "n", "labels": {"app": "a"}},
        "spec": {"containers": [{"ports": [{"name": "web", "containerPort": 81}]}], **spec},
        "status": {"podIP": f"ip-{name}", "phase": phase, "conditions": conditions},
    }


def service(address: str, **spec: object) -> Object:
    return {
        "metadata": {"name": "s", "namespace": "n"},
        "spec": {"clusterIP": address, "selector": {"app": "a"}, **spec},
    }


def test_ready_pods_alone_unless_it_says_otherwise() -> None:
    pods = [pod("b"), pod("a"), pod("c", ready=False), pod("d", phase="Failed")]
    names = [each["metadata"]["name"] for each in backends(service("None"), pods)]
    assert names == ["a", "b"]
    early = service("None", publishNotReadyAddresses=True)
    assert [each["metadata"]["name"] for each in backends(early, pods)] == ["a", "b", "c"]
    assert backends(service("None", selector=None), pods) == []


def test_names_of_a_services_own_address() -> None:
    text = hosts([service("127.9.0.5")], [pod("a")], "n")
    assert text == "127.9.0.5 s.n.svc.cluster.local s.n.svc s.n s\n"
    assert hosts([service("127.9.0.5")], [], "other").split()[-1] == "s.n"


def test_names_of_pods_behind_a_headless_one() -> None:
    pods = [pod("a", hostname="h", subdomain="s"), pod("b")]
    first, second = hosts([service("None")], pods, "n").splitlines()
    assert first.split()[0] == "ip-a"
    assert {"s", "h.s", "h.s.n.svc.cluster.local"} <= set(first.split())
    assert second.split() == ["ip-b", "s.n.svc.cluster.local", "s.n.svc", "s.n", "s"]


def test_a_port_by_name_is_the_containers() -> None:
    assert target_port({"port": 80, "targetPort": "web"}, pod("a")) == 81
    assert target_port({"port": 80}, pod("a")) == 80

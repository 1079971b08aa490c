"""The API server that all else here runs on: real, with RBAC, for two programs at once."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.kubernetes import assets
from scripts.kubernetes.client import CORE, ApiError, Client, access
from scripts.kubernetes.server import Server, account_kubeconfig, serve
from tests.k8s.cluster import Namespace
from tests.waiting import wait_for


def test_an_account_may_do_what_its_role_says_and_nothing_else(
    namespace: Namespace, kube_server: Server
) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    namespace.client.create(namespace.path("serviceaccounts"), {"metadata": {"name": "nobody"}})
    namespace.allow("reader", rule)
    nobody, reader = (
        Client(access(_kubeconfig(namespace, kube_server, name))) for name in ("nobody", "reader")
    )
    with pytest.raises(ApiError, match=r"403: .*cannot list resource \"pods\""):
        nobody.get(namespace.path("pods"))
    _until_allowed(reader, namespace.path("pods"))
    with pytest.raises(ApiError, match="403"):
        reader.get(f"{CORE}/pods")  # the role ends with its namespace
    with pytest.raises(ApiError, match="403"):
        reader.get(namespace.path("secrets"))
    nobody.close()
    reader.close()


def test_a_watch_tells_what_changes(namespace: Namespace) -> None:
    kube = namespace.client
    listed = kube.get(namespace.path("configmaps"))
    kube.create(namespace.path("configmaps"), {"metadata": {"name": "a"}, "data": {"k": "1"}})
    kube.merge(namespace.path("configmaps", "a"), {"data": {"k": "2"}})
    kube.delete(namespace.path("configmaps", "a"))
    events = kube.watch(
        namespace.path("configmaps"),
        resourceVersion=listed["metadata"]["resourceVersion"],
        timeoutSeconds=20,
    )
    seen = [next(events)["type"] for _ in range(3)]
    assert seen == ["ADDED", "MODIFIED", "DELETED"]


def test_two_servers_at_once_share_nothing(kube_server: Server, namespace: Namespace) -> None:
    if not kube_server.pids:
        pytest.skip("KUBECONFIG names the server, so there is no second one")
    with serve(kube_server.folder / "second", assets.find()) as second:
        other = Client(access(second.kubeconfig))
        names = [each["metadata"]["name"] for each in other.get(f"{CORE}/namespaces")["items"]]
        assert namespace.name not in names
        addresses = [
            each.get(f"{CORE}/namespaces/default/services/kubernetes")["spec"]["clusterIP"]
            for each in (other, namespace.client)
        ]
        assert len(set(addresses)) == 2
        other.close()


def test_a_quota_is_kept(namespace: Namespace) -> None:
    def create(name: str) -> None:
        body = {"metadata": {"name": name}}
        namespace.client.create(namespace.path("configmaps"), body)

    namespace.limit(**{"count/configmaps": "1"})
    _until_refused(create)
    namespace.limit(**{"count/configmaps": "100"})

    def created() -> bool:
        try:
            create("after")
        except ApiError:
            return False
        return True

    wait_for("the quota is large enough", created, seconds=30)


def _until_refused(create: Callable[[str], None]) -> None:
    """The server's admission learns of a quota through a watch of its own."""
    numbers = itertools.count()

    def refused() -> bool:
        try:
            create(f"c{next(numbers)}")
        except ApiError as error:
            return "exceeded quota: quota" in error.message
        return False

    wait_for("the quota is used up", refused, seconds=30)


def _kubeconfig(namespace: Namespace, server: Server, account: str) -> Path:
    path = server.folder / f"{namespace.name}-{account}.kubeconfig"
    account_kubeconfig(namespace.kubeconfig, namespace.name, account, path)
    return path


def _until_allowed(client: Client, path: str) -> None:
    """The server's authorizer learns of a binding through a watch of its own."""

    def allowed() -> bool:
        try:
            client.get(path)
        except ApiError:
            return False
        return True

    wait_for("the binding has taken effect", allowed, seconds=30)

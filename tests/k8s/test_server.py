"""The API server that all else here runs on: real, with RBAC, for two programs at once."""

import pytest

from scripts.kubernetes import assets
from scripts.kubernetes.client import CORE, ApiError, Client, access
from scripts.kubernetes.server import Server, account_kubeconfig, serve
from tests.k8s.cluster import Namespace
from tests.waiting import wait_for

RBAC = "/apis/rbac.authorization.k8s.io/v1"


def test_an_account_may_do_what_its_role_says_and_nothing_else(
    namespace: Namespace, kube_server: Server
) -> None:
    kube = namespace.client
    kube.create(namespace.path("serviceaccounts"), {"metadata": {"name": "reader"}})
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    role = {"metadata": {"name": "reads"}, "rules": rules}
    kube.create(namespace.path("roles", group=RBAC), role)
    path = kube_server.folder / f"{namespace.name}.kubeconfig"
    account_kubeconfig(namespace.kubeconfig, namespace.name, "reader", path)
    reader = Client(access(path))
    with pytest.raises(ApiError, match=r"403: .*cannot list resource \"pods\""):
        reader.get(namespace.path("pods"))

    binding = {
        "metadata": {"name": "reads"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reads"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace.name}],
    }
    kube.create(namespace.path("rolebindings", group=RBAC), binding)
    _until_allowed(reader, namespace.path("pods"))
    with pytest.raises(ApiError, match="403"):
        reader.get(f"{CORE}/pods")  # the role ends with its namespace
    with pytest.raises(ApiError, match="403"):
        reader.get(namespace.path("secrets"))
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


def _until_allowed(client: Client, path: str) -> None:
    """The server's authorizer learns of a binding through a watch of its own."""

    def allowed() -> bool:
        try:
            client.get(path)
        except ApiError:
            return False
        return True

    wait_for("the binding has taken effect", allowed, seconds=30)

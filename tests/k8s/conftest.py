"""One API server a worker, a namespace a test."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.kubernetes import assets
from scripts.kubernetes.client import CORE, Client, access
from scripts.kubernetes.server import Server, serve


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """A test's own."""

    name: str
    """Unique, for the nodes that its kubelet makes, too."""
    client: Client
    """Of an administrator."""
    kubeconfig: Path
    """The same."""

    def path(self, plural: str, name: str = "", group: str = CORE) -> str:
        """Of a list, or of one object; group: such as /apis/apps/v1."""
        return f"{group}/namespaces/{self.name}/{plural}" + (f"/{name}" if name else "")


@pytest.fixture(scope="session")
def kube_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real API server; skipped where none can be had, failed in CI."""
    folder = tmp_path_factory.mktemp("kubernetes")
    if named := os.environ.get("KUBECONFIG"):
        yield Server(kubeconfig=Path(named), folder=folder, pids=())
        return
    try:
        found = assets.find()
    except assets.Unavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with serve(folder, found) as server:
        yield server


@pytest.fixture(scope="session")
def kube(kube_server: Server) -> Iterator[Client]:
    """An administrator's calls."""
    client = Client(access(kube_server.kubeconfig))
    yield client
    client.close()


@pytest.fixture
def namespace(kube_server: Server, kube: Client) -> Namespace:
    """A fresh one, with its default service account. What is left in it goes with the server:
    no controller runs here that would empty it."""
    name = f"t{uuid.uuid4().hex[:8]}"
    kube.create(f"{CORE}/namespaces", {"metadata": {"name": name}})
    made = Namespace(name=name, client=kube, kubeconfig=kube_server.kubeconfig)
    kube.create(made.path("serviceaccounts"), {"metadata": {"name": "default"}})
    return made

"""One API server a worker, a namespace a test."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scripts.kubernetes import assets
from scripts.kubernetes.client import ApiError, Client, access
from scripts.kubernetes.server import Server, reach
from tests.k8s.cluster import Cluster, Namespace, make_namespace, run_kubelet
from tests.k8s.crew import Crew, Stage
from tests.k8s.operated import operated
from tests.waiting import wait_for

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="session")
def kube_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real API server; skipped where none can be had, failed in CI."""
    folder = tmp_path_factory.mktemp("kubernetes")
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(reach(folder))
        except assets.Unavailable as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        yield found


@pytest.fixture(scope="session")
def kube(kube_server: Server) -> Iterator[Client]:
    """An administrator's calls."""
    client = Client(access(kube_server.kubeconfig))
    yield client
    client.close()


@pytest.fixture
def namespace(kube_server: Server, kube: Client) -> Namespace:
    """A fresh one."""
    return make_namespace(kube_server, kube)


@pytest.fixture
def cluster(namespace: Namespace, tmp_path: Path) -> Iterator[Cluster]:
    """The namespace with three nodes on which its pods run."""
    with run_kubelet(namespace, tmp_path / "kubelet") as made:
        yield made


@pytest.fixture(scope="module")
def stage(
    crd: None, kube_server: Server, kube: Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """An operator, a kubelet and agents for many jobs."""
    space, folder = make_namespace(kube_server, kube), tmp_path_factory.mktemp("stage")
    with (
        run_kubelet(space, folder / "kubelet", "--nodes=12") as cluster,
        operated(space, folder) as operator,
        Crew(space) as crew,
    ):
        made = Stage(cluster, folder, operator, crew)
        try:
            yield made
        finally:
            made.operator.process.kill()
            made.operator.process.wait()


@pytest.fixture(scope="session")
def crd(kube: Client) -> None:
    """The server knows ElasticJobs."""
    file = Path(__file__).parents[2] / "k8s" / "manifests" / "crd.yaml"
    body = yaml.safe_load(file.read_text())
    kube.make(CRDS, body)  # an apply by the server, which knows no CEL, would not leave it out
    wait_for("elasticjobs", lambda: _served(kube))


def _served(kube: Client) -> bool:
    try:
        kube.get("/apis/elastic-runtime.dev/v1alpha1/elasticjobs")
    except ApiError as error:
        if error.code not in (404, 429):  # a newer server's while it takes a changed CRD up
            raise
        return False
    return True

"""A namespace whose pods run, and words for what tests say of them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import prctl
from scripts.kubernetes import accounts, words
from scripts.kubernetes.client import CORE, ApiError, Client
from scripts.kubernetes.kubelet import READY
from scripts.kubernetes.server import Server
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]


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

    def allow(self, account: str, *rules: Object) -> None:
        """A service account with a role of these rules, made."""
        accounts.allow(self.client, self.name, account, *rules)

    def limit(self, **hard: str) -> None:
        """A ResourceQuota, or another one in its place. Its controller, which does not run here,
        would count what is there; so this counts from nothing."""
        path = self.path("resourcequotas", "quota")
        body = {"spec": {"hard": hard}}
        made = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, **body}
        self.client.apply(path, made)
        status = {"hard": hard, "used": dict.fromkeys(hard, "0")}
        self.client.merge(f"{path}/status", {"status": status})

    def find(self, plural: str, name: str, group: str = CORE) -> Object | None:
        """An object; None where it is not there."""
        try:
            return self.client.get(self.path(plural, name, group))
        except ApiError as error:
            if error.code == 404:
                return None
            raise


def make_namespace(server: Server, client: Client) -> Namespace:
    """A fresh one, with its default service account. What is left in it goes with the server:
    no controller runs here that would empty it."""
    name = f"t{uuid.uuid4().hex[:8]}"
    client.create(f"{CORE}/namespaces", {"metadata": {"name": name}})
    made = Namespace(name=name, client=client, kubeconfig=server.kubeconfig)
    client.create(made.path("serviceaccounts"), {"metadata": {"name": "default"}})
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A namespace with a kubelet."""

    namespace: Namespace
    """Whose pods run."""
    folder: Path
    """The kubelet's."""

    def start(self, name: str, *command: str, **spec: Any) -> None:
        """A pod of one container, `main`; spec: of the pod; `container` and `labels` beside it."""
        container = {"name": "main", "image": "local", **spec.pop("container", {})}
        if command:
            container["command"] = list(command)
        metadata = {"name": name, "labels": spec.pop("labels", {})}
        pod_spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 20,
            "automountServiceAccountToken": False,
            "containers": [container],
            **spec,
        }
        self.create({"metadata": metadata, "spec": pod_spec})

    def create(self, pod: Object) -> None:
        """Any pod."""
        self.namespace.client.create(self.namespace.path("pods"), pod)

    def pod(self, name: str) -> Object | None:
        """As it is now."""
        return self.namespace.find("pods", name)

    def phase(self, name: str) -> str:
        """Empty: it is not there."""
        pod = self.pod(name)
        return pod["status"]["phase"] if pod else ""

    def wait_phase(self, name: str, phase: str, seconds: float = 60) -> Object:
        """Until it has that phase; the pod."""
        try:
            wait_for(f"{name} is {phase}", lambda: self.phase(name) == phase, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.pod(name)}\n{self.logs()}") from error
        pod = self.pod(name)
        assert pod is not None
        return pod

    def wait_gone(self, name: str, seconds: float = 60) -> None:
        """Until its object is no more."""
        wait_for(f"{name} is gone", lambda: self.pod(name) is None, seconds)

    def wait_condition(self, name: str, kind: str, status: str) -> Object:
        """Until a condition of the pod says so; the condition."""
        wait_for(
            f"{name}: {kind}={status}", lambda: self._condition(name, kind, status) is not None
        )
        found = self._condition(name, kind, status)
        assert found is not None
        return found

    def _condition(self, name: str, kind: str, status: str) -> Object | None:
        pod = self.pod(name)
        conditions = pod["status"].get("conditions", []) if pod else []
        matching = [c for c in conditions if (c["type"], c["status"]) == (kind, status)]
        return matching[0] if matching else None

    def state(self, name: str) -> Object:
        """Of its first container."""
        pod = self.pod(name)
        statuses = pod["status"].get("containerStatuses", []) if pod else []
        return dict(statuses[0]["state"]) if statuses else {}

    def log(self, name: str, container: str = "main") -> str:
        """What a pod has printed so far, with all its restarts."""
        path = self.folder / "logs" / f"{name}.{container}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """What all pods have printed, and the kubelet, if there is one."""
        paths = [*self.folder.glob("kubelet.log"), *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def ask(self, name: str, what: str, value: object) -> None:
        """An annotation of scripts.kubernetes.words on a pod."""
        text = value if isinstance(value, str) else json.dumps(value)
        body = {"metadata": {"annotations": {what: text}}}
        self.namespace.client.merge(self.namespace.path("pods", name), body)

    def fault(self, node: str, kind: str | None) -> None:
        """`crash`, `frozen` or `silent`; None: it is back."""
        body = {"metadata": {"annotations": {words.FAULT: kind}}}
        self.namespace.client.merge(f"{CORE}/nodes/{node}", body)

    def node_of(self, name: str) -> str:
        """Where a pod runs."""
        pod = self.pod(name)
        assert pod is not None
        return str(pod["spec"]["nodeName"])


def free_port() -> int:
    """Pods share this machine's ports, and who is to host a master by name listens on all addresses."""
    with socket.socket() as found:
        found.bind(("0.0.0.0", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def run_kubelet(namespace: Namespace, folder: Path, *arguments: str) -> Iterator[Cluster]:
    """A process of its own, ready; arguments: of scripts.kubernetes.kubelet."""
    if os.geteuid():
        assert not os.environ.get("CI"), "the test kubelet needs root"
        pytest.skip("the test kubelet needs root")
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "scripts.kubernetes.kubelet"]
    command += [f"--kubeconfig={namespace.kubeconfig}", f"--namespace={namespace.name}"]
    with (folder / "kubelet.log").open("wb") as log:
        kubelet = subprocess.Popen(
            [*command, f"--folder={folder}", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True,
            # A test run that is killed leaves no pod; noqa: it is one call of libc's.
            preexec_fn=prctl.set_pdeathsig,  # noqa: PLW1509
        )  # fmt: skip
    assert kubelet.stdout is not None
    try:
        said = kubelet.stdout.readline().strip()
        if said != READY:
            kubelet.wait(30)
            raise AssertionError((folder / "kubelet.log").read_text())
        yield Cluster(namespace=namespace, folder=folder)
    finally:
        kubelet.terminate()
        try:
            kubelet.wait(60)
        finally:
            kubelet.kill()
            kubelet.wait()
            kubelet.stdout.close()

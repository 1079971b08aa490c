"""A small kubelet, scheduler, garbage collector and node controller for tests and the demo.

    python -m scripts.kubernetes.kubelet --kubeconfig FILE --namespace NAME --folder DIR

It looks after one namespace: its pods run as local processes on simulated nodes of its own, which
are named after the namespace. What a test wants to go wrong it writes as an annotation:
scripts/kubernetes/words.py. Needs root, for the containers' mounts and limits.
"""

import argparse
import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from urllib3.exceptions import HTTPError

from scripts.kubernetes import nodes, sandbox, scheduling, services, words
from scripts.kubernetes.client import CORE, ApiError, Client, access
from scripts.kubernetes.containers import TEMPORARY
from scripts.kubernetes.environment import Lookup
from scripts.kubernetes.garbage import Collector
from scripts.kubernetes.mirror import Mirror, key
from scripts.kubernetes.pods import Pod
from scripts.kubernetes.server import CLAIM_PORT, account_token

_LOG = logging.getLogger(__name__)
Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
READY = "kubelet: ready"
"""Printed once the nodes are there."""
CALLS = 16
"""At the same time."""
SHARE = 16
"""Of a kubelet's addresses: so many third numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of one kubelet."""

    kubeconfig: Path
    """Of an administrator."""
    namespace: str
    """Whose pods it runs."""
    folder: Path
    """Of volumes, and of `logs/<pod>.<container>.log`."""
    nodes: int
    """How many."""
    resources: dict[str, str]
    """Of each node: cpu, memory, nvidia.com/gpu."""


class Kubelet:
    """Everything of one namespace; satisfies pods.Host."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = Client(access(settings.kubeconfig))
        self._threads = ThreadPoolExecutor(CALLS)
        self._claim, self._addresses = _claim_addresses(self._client)
        self._pods: dict[str, Pod] = {}
        self._faults: dict[str, str] = {}
        self._preempted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._schedule, self._route = asyncio.Event(), asyncio.Event()
        self._controllers = nodes.Controllers(self._client, self.call)
        self._proxies = services.Proxies()
        self.folder = settings.folder / "pods"
        self.base = _image_environment(self._client)
        within = f"{CORE}/namespaces/{settings.namespace}"
        mine = f"{words.NODE_OF}={settings.namespace}"
        self._node_objects = Mirror(
            self._client, f"{CORE}/nodes", self._node_changed, labelSelector=mine
        )
        self._service_objects = Mirror(
            self._client, f"{within}/services", lambda *_: self._route.set()
        )
        self._pod_objects = Mirror(self._client, f"{within}/pods", self._pod_changed)
        self._collector = Collector(self._client, settings.namespace, self.call)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; then its nodes are deleted and its processes ended."""
        settings = self._settings
        for number in range(settings.nodes):
            name = f"{settings.namespace}-node-{number}"
            made = nodes.node(name, settings.namespace, settings.resources, {})
            await self.call(self._client.create, f"{CORE}/nodes", made)
            await self._controllers.came_back(name)
        for mirror in (self._node_objects, self._service_objects, self._pod_objects):
            await mirror.ready.wait()
        for work in (self._scheduling(), self._routing(), self._collector.run()):
            self._spawn(work)
        print(READY, flush=True)
        await stop.wait()
        for pod in list(self._pods.values()):
            pod.gone()
        await asyncio.gather(*(pod.task for pod in self._pods.values()), return_exceptions=True)
        for name in [each["metadata"]["name"] for each in self._node_objects.objects.values()]:
            await self.call(self._client.delete, f"{CORE}/nodes/{name}")

    # What a pod has from its kubelet.

    def address(self) -> str:
        return next(self._addresses)

    def quiet(self, node: str) -> bool:
        return bool(self._faults.get(node))

    def hosts(self, pod: Object, address: str) -> str:
        own = f"127.0.0.1 localhost\n{address} {pod['metadata']['name']}\n"
        # Its own address is not in its status yet, and who hosts a master looks for its name first.
        itself = {**pod, "status": {**pod.get("status", {}), "podIP": address}}
        pods = {**self._pod_objects.objects, key(pod): itself}.values()
        listed = self._service_objects.objects.values()
        return own + services.hosts(listed, pods, pod["metadata"]["namespace"])

    def lookup(self, namespace: str) -> Lookup:
        def found(plural: str, name: str) -> Object | None:
            try:
                return self._client.get(f"{CORE}/namespaces/{namespace}/{plural}/{name}")
            except ApiError as error:
                if error.code == 404:
                    return None
                raise

        return found

    def account(self, pod: Object) -> dict[str, bytes]:
        name, namespace = pod["spec"].get("serviceAccountName"), pod["metadata"]["namespace"]
        token = account_token(self._client, namespace, name or "default")
        authority = self._client.access.authority
        return {
            "token": token.encode(),
            "ca.crt": authority.read_bytes() if authority else b"",
            "namespace": namespace.encode(),
        }

    async def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    async def write_status(self, pod: Object, found: Object) -> None:
        path = f"{nodes.pod_path(pod)}/status"
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": found}
        await self.call(lambda: self._client.call("PATCH", path, body, kind=nodes.STRATEGIC))

    async def confirm_deletion(self, pod: Object) -> None:
        exact = {"uid": pod["metadata"]["uid"]}
        path = nodes.pod_path(pod)
        await self.call(
            lambda: self._client.delete(path, gracePeriodSeconds=0, preconditions=exact)
        )

    # What changes.

    def _pod_changed(self, pod: Object | None, last: Object) -> None:
        self._schedule.set()
        self._route.set()
        uid = last["metadata"]["uid"]
        if pod is None:
            if uid in self._pods:
                self._pods[uid].gone()
            return
        asked = pod["metadata"].get("annotations") or {}
        if words.PREEMPT in asked and uid not in self._preempted:
            self._preempted.add(uid)
            self._spawn(self._controllers.preempt(pod))
        if uid in self._pods:
            self._pods[uid].update(pod)
        elif (node := pod["spec"].get("nodeName")) and self._faults.get(node) == "gone":
            self._spawn(self._controllers.was_deleted(node, [pod]))  # bound while it went
        elif self._runs(pod):
            made = self._pods[uid] = Pod(pod, self)
            made.task.add_done_callback(lambda task: self._left(uid, task))

    def _runs(self, pod: Object) -> bool:
        node = pod["spec"].get("nodeName")
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        return f"/{node}" in self._node_objects.objects and not ended

    def _left(self, uid: str, task: asyncio.Task[None]) -> None:
        self._pods.pop(uid, None)
        if not task.cancelled() and (error := task.exception()):
            _LOG.error("a pod's work has failed", exc_info=error)

    def _node_changed(self, node: Object | None, last: Object) -> None:
        self._schedule.set()
        name = last["metadata"]["name"]
        before, fault = self._faults.get(name, ""), nodes.fault(node)
        self._faults[name] = fault
        if fault == before:
            return
        objects = [
            pod for pod in self._pod_objects.objects.values() if pod["spec"].get("nodeName") == name
        ]
        running = [self._pods[pod["metadata"]["uid"]] for pod in objects
                   if pod["metadata"]["uid"] in self._pods]  # fmt: skip
        for pod in running:
            if fault in ("crash", "gone"):
                pod.crash()
            elif "frozen" in (fault, before):
                pod.freeze(still=fault == "frozen")
        if fault == "gone":
            self._spawn(self._controllers.was_deleted(name, objects))
        elif fault:
            self._spawn(self._controllers.fell_silent(name, objects))
        else:
            self._spawn(self._controllers.came_back(name))
            for pod in running:
                pod.update(pod.manifest)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Loops.

    async def _scheduling(self) -> None:
        """Bind what waits, oldest first; one round after each change."""
        while True:
            await self._schedule.wait()
            self._schedule.clear()
            ready = [
                each
                for each in self._node_objects.objects.values()
                if not self._faults.get(each["metadata"]["name"])
            ]
            rooms = scheduling.rooms(ready, self._pod_objects.objects.values())
            waiting = [
                pod
                for pod in self._pod_objects.objects.values()
                if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
            ]
            calls = []
            for pod in sorted(waiting, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
                name, reason = scheduling.place(pod, ready, rooms)
                if name is not None:
                    rooms[name].take(pod)
                    calls.append(self.call(self._bind, pod, name))
                elif reason != _unschedulable(pod):
                    calls.append(self.call(self._refuse, pod, reason))
            await asyncio.gather(*calls)

    def _bind(self, pod: Object, node: str) -> None:
        metadata = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        self._quietly(
            lambda: self._client.create(
                f"{nodes.pod_path(pod)}/binding", {"metadata": metadata, "target": target}
            )
        )

    def _refuse(self, pod: Object, reason: str) -> None:
        condition = {
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": reason,
        }  # fmt: skip
        path = f"{nodes.pod_path(pod)}/status"
        body = {"status": {"conditions": [condition]}}
        self._quietly(lambda: self._client.call("PATCH", path, body, kind=nodes.STRATEGIC))

    def _quietly(self, function: Callable[[], object]) -> None:
        """Refused because it changed meanwhile: the change starts another round."""
        try:
            function()
        except ApiError as error:
            if error.code not in (404, 409):
                _LOG.warning("scheduling: %s", error)
        except (HTTPError, OSError) as error:
            _LOG.warning("scheduling: %s", error)

    async def _routing(self) -> None:
        while True:
            await self._route.wait()
            self._route.clear()
            listed = self._service_objects.objects.values(), self._pod_objects.objects.values()
            await self._proxies.update(*map(list, listed))
            for pod in list(self._pods.values()):
                pod.rewrite_hosts()


def _unschedulable(pod: Object) -> str | None:
    """What it has been told already."""
    for each in pod.get("status", {}).get("conditions", []):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return str(each.get("message", ""))
    return None


def _image_environment(client: Client) -> Mapping[str, str]:
    """This machine is every image, with our programs on its path."""
    url = urlsplit(client.access.url)
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": "/run",  # empty: whoever runs the tests may have a ~/.kube/config
        "TMPDIR": TEMPORARY,
        "KUBERNETES_SERVICE_HOST": str(url.hostname),
        "KUBERNETES_SERVICE_PORT": str(url.port),
    }


def _claim_addresses(client: Client) -> tuple[socket.socket, Iterator[str]]:
    """Loopback addresses for pods that no other kubelet of this machine gives out, and what holds
    them; in the upper half of its server's block."""
    first = client.get(f"{CORE}/namespaces/default/services/kubernetes")["spec"]["clusterIP"]
    block = first.split(".")[1] if first.startswith("127.") else "63"
    for third in range(128, 256, SHARE):
        claim = socket.socket()
        try:
            claim.bind((f"127.{block}.{third}.1", CLAIM_PORT))
        except OSError:
            claim.close()
            continue
        numbers = itertools.cycle(range(2, SHARE * 256 - 1))
        return claim, (f"127.{block}.{third + n // 256}.{n % 256}" for n in numbers)
    raise SystemExit(f"{128 // SHARE} test kubelets run on this server already")


def main() -> None:
    """Until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cpu", default="64")
    parser.add_argument("--memory", default="256Gi")
    parser.add_argument("--gpus", default="8")
    told = parser.parse_args()
    if os.geteuid():
        raise SystemExit("the test kubelet mounts what containers need: run it as root")
    logging.basicConfig(format="kubelet: %(message)s")
    sandbox.own_mounts()  # what it mounts goes with it, however it ends
    settings = Settings(
        kubeconfig=told.kubeconfig,
        namespace=told.namespace,
        folder=told.folder.resolve(),
        nodes=told.nodes,
        resources={"cpu": told.cpu, "memory": told.memory, "nvidia.com/gpu": told.gpus},
    )
    asyncio.run(_serve(settings))
    os._exit(0)  # its watches' threads would be waited for


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Kubelet(settings).run(stop)


if __name__ == "__main__":
    main()

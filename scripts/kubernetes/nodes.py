"""Simulated nodes, and what the node controllers do when one falls silent or is deleted."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from urllib3.exceptions import HTTPError

from scripts.kubernetes import words
from scripts.kubernetes.client import CORE, ApiError, Client
from scripts.kubernetes.containers import now
from scripts.kubernetes.scheduling import tolerates

_LOG = logging.getLogger(__name__)
Object = dict[str, Any]
STRATEGIC = "application/strategic-merge-patch+json"
UNREACHABLE = "node.kubernetes.io/unreachable"
NOT_READY = "node.kubernetes.io/not-ready"
"""Which the API server gives every new node."""
TAINTS = [{"key": UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute")]


def node(name: str, kubelet: str, resources: dict[str, str], labels: dict[str, str]) -> Object:
    """One that is ready."""
    amounts = {"pods": "500", **resources}
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, words.NODE_OF: kubelet, **labels},
        },
        "spec": {},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [ready_condition("True")],
        },
    }


def ready_condition(holds: str) -> Object:
    """Of a node: True, or Unknown once its kubelet is silent."""
    at = now()
    return {
        "type": "Ready",
        "status": holds,
        "reason": "KubeletReady" if holds == "True" else "NodeStatusUnknown",
        "message": "" if holds == "True" else "Kubelet stopped posting node status.",
        "lastHeartbeatTime": at,
        "lastTransitionTime": at,
    }


def fault(found: Object | None) -> str:
    """What has befallen a node: crash, frozen, silent, gone; empty: nothing."""
    if found is None:
        return "gone"
    return str((found["metadata"].get("annotations") or {}).get(words.FAULT, ""))


class Controllers:
    """The node lifecycle, taint and pod garbage controllers, for the nodes of one kubelet."""

    def __init__(self, client: Client, call: Callable[..., Any]) -> None:
        self._client, self._call = client, call
        self._evictions: dict[str, list[asyncio.Task[None]]] = {}

    async def fell_silent(self, name: str, pods: Iterable[Object]) -> None:
        """NotReady, tainted; its pods not ready, and deleted once they tolerate it no longer."""
        pods = list(pods)
        await self._write_node(name, "Unknown", TAINTS)
        unready = {"type": "Ready", "status": "False"}
        for pod in pods:
            await self._patch(pod, "/status", {"status": {"conditions": [unready]}})
        self._evictions[name] = [asyncio.create_task(self._evict(pod)) for pod in pods]

    async def came_back(self, name: str) -> None:
        """Ready again, and nobody is evicted any more."""
        for task in self._evictions.pop(name, []):
            task.cancel()
        await self._write_node(name, "True", [])

    async def was_deleted(self, name: str, pods: Iterable[Object]) -> None:
        """Its pods go with it, whatever ran there."""
        for task in self._evictions.pop(name, []):
            task.cancel()
        for pod in pods:
            await self._delete(pod, gracePeriodSeconds=0)

    async def preempt(self, pod: Object) -> None:
        """As the scheduler does: say so, then delete it."""
        message = "default-scheduler: preempting to accommodate a higher priority pod"
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": message,
        }
        await self._patch(pod, "/status", {"status": {"conditions": [condition]}})
        await self._delete(pod)

    async def _evict(self, pod: Object) -> None:
        toleration = tolerates(pod, TAINTS[1])
        if toleration is not None:
            seconds = toleration.get("tolerationSeconds")
            if seconds is None:
                return  # for ever
            await asyncio.sleep(seconds)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByTaintManager",
            "message": "Taint manager: deleting due to NoExecute taint",
        }
        await self._patch(pod, "/status", {"status": {"conditions": [condition]}})
        await self._delete(pod)

    async def _write_node(self, name: str, holds: str, taints: list[Object]) -> None:
        path = f"{CORE}/nodes/{name}"
        found = await self._try(lambda: self._client.get(path))
        if found is None:
            return
        kept = [
            t for t in found["spec"].get("taints", []) if t["key"] not in (UNREACHABLE, NOT_READY)
        ]
        await self._try(lambda: self._client.merge(path, {"spec": {"taints": [*kept, *taints]}}))
        status = {"status": {"conditions": [ready_condition(holds)]}}
        await self._try(
            lambda: self._client.call("PATCH", f"{path}/status", status, kind=STRATEGIC)
        )

    async def _patch(self, pod: Object, subresource: str, body: Object) -> None:
        path = pod_path(pod) + subresource
        await self._try(lambda: self._client.call("PATCH", path, body, kind=STRATEGIC))

    async def _delete(self, pod: Object, **options: object) -> None:
        exact = {"uid": pod["metadata"]["uid"]}
        await self._try(lambda: self._client.delete(pod_path(pod), preconditions=exact, **options))

    async def _try(self, function: Callable[[], Any]) -> Any:
        try:
            return await self._call(function)
        except ApiError as error:
            if error.code not in (404, 409):  # gone, or another one by now
                _LOG.warning("node controllers: %s", error)
        except (HTTPError, OSError) as error:
            _LOG.warning("node controllers: %s", error)
        return None


def pod_path(pod: Object) -> str:
    """Of its object."""
    return f"{CORE}/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"

"""A pod's status from what its containers do: pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scripts.kubernetes.containers import Ended

Object = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Run:
    """One container of a pod, over all its restarts."""

    manifest: Object
    """Its part of the pod's spec."""
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    """As containerStatuses has it."""
    last: Object = field(default_factory=dict)
    """lastState."""
    restarts: int = 0
    """In place."""

    @property
    def running(self) -> bool:
        """Now."""
        return "running" in self.state


def terminated(ended: Ended, container_id: str) -> Object:
    """A container's state after that."""
    return {
        "terminated": {
            "exitCode": ended.code,
            "reason": ended.reason,
            "startedAt": ended.started,
            "finishedAt": ended.finished,
            "containerID": container_id,
            **({"message": ended.message} if ended.message else {}),
        }
    }


def container_id(uid: str, run: Run) -> str:
    """Another one for each restart."""
    return f"test://{uid}-{run.manifest['name']}-{run.restarts}"


def restarts(policy: str, code: int) -> bool:
    """Whether a container that ended so is started again."""
    return policy == "Always" or (policy == "OnFailure" and code != 0)


def pod_status(
    *, uid: str, phase: str, address: str, started: str, init: Iterable[Run], main: Iterable[Run],
    initialized: bool, extra: Object,
) -> Object:  # fmt: skip
    """What the kubelet writes; extra: reason and message of the pod, and conditions of its own."""
    main = list(main)
    ready = phase == "Running" and all(run.running for run in main)
    unready = "PodCompleted" if phase in ("Succeeded", "Failed") else "ContainersNotReady"
    conditions = [
        _condition("Initialized", initialized, "ContainersNotInitialized"),
        _condition("ContainersReady", ready, unready),
        _condition("Ready", ready, unready),
        *extra.get("conditions", []),
    ]
    return {
        "phase": phase,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "hostIP": address,
        "startTime": started,
        "conditions": conditions,
        "initContainerStatuses": [_container(uid, run) for run in init],
        "containerStatuses": [_container(uid, run) for run in main],
        **{name: value for name, value in extra.items() if name != "conditions"},
    }


def _condition(kind: str, holds: bool, otherwise: str) -> Object:
    return {"type": kind, "status": str(holds), "reason": None if holds else otherwise}


def _container(uid: str, run: Run) -> Object:
    return {
        "name": run.manifest["name"],
        "image": run.manifest["image"],
        "imageID": run.manifest["image"],
        "containerID": "" if "waiting" in run.state else container_id(uid, run),
        "restartCount": run.restarts,
        "ready": run.running,
        "started": run.running,
        "state": run.state,
        "lastState": run.last,
    }

"""What a pod has from its kubelet, and how one of its containers is run with that."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from scripts.kubernetes import volumes
from scripts.kubernetes.containers import Plan, memory_limit
from scripts.kubernetes.environment import Lookup, command, environment

Object = dict[str, Any]


class Host(Protocol):
    """What a pod has from its kubelet."""

    folder: Path
    """Of all pods."""
    base: Mapping[str, str]
    """An image's environment."""

    def address(self) -> str:
        """One that no other pod has."""

    def quiet(self, node: str) -> bool:
        """The node says nothing now."""

    def hosts(self, pod: Object, address: str) -> str:
        """Text of its /etc/hosts."""

    def lookup(self, namespace: str) -> Lookup:
        """Reads Secrets and ConfigMaps."""

    def account(self, pod: Object) -> dict[str, bytes]:
        """Files of its service account."""

    async def call(self, function: Callable[[], object]) -> object:
        """A call that blocks, beside the loop."""

    async def write_status(self, pod: Object, found: Object) -> None:
        """May raise ApiError and HTTPError."""

    async def confirm_deletion(self, pod: Object) -> None:
        """Remove the object; may raise ApiError and HTTPError."""


def plan_of(pod: Object, container: Object, *, host: Host, folder: Path, address: str) -> Plan:
    """One run of a container; folder: the pod's. Raises ConfigError, and ApiError of a look-up."""
    metadata = pod["metadata"]
    environ = environment(
        pod,
        container,
        base=host.base,
        address=address,
        lookup=host.lookup(metadata["namespace"]),
    )
    logs = host.folder.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    hosts = {
        "source": str(folder / "hosts"), "target": "/etc/hosts", "read_only": True,
    }  # fmt: skip
    return Plan(
        name=f"{metadata['uid']}-{container['name']}",
        hostname=pod["spec"].get("hostname") or metadata["name"],
        command=command(container, environ),
        environ=environ,
        cwd=container.get("workingDir") or "/",
        binds=[hosts, *volumes.binds(pod, container, folder / "volumes")],
        shm_bytes=volumes.SHM_BYTES,
        memory_bytes=memory_limit(container),
        message_path=container.get("terminationMessagePath", "/dev/termination-log"),
        log=logs / f"{metadata['name']}.{container['name']}.log",
    )

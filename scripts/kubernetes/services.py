"""Services by name and address: what kube-proxy and the cluster's DNS do, on loopback."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

Object = dict[str, Any]


def backends(service: Object, pods: Iterable[Object]) -> list[Object]:
    """The pods that a Service stands for now, in the order of their names."""
    selector = service["spec"].get("selector")
    early = service["spec"].get("publishNotReadyAddresses", False)
    if not selector:
        return []
    found = [
        pod
        for pod in pods
        if pod["metadata"]["namespace"] == service["metadata"]["namespace"]
        and selector.items() <= (pod["metadata"].get("labels") or {}).items()
        and pod.get("status", {}).get("podIP")
        and pod["status"].get("phase") not in ("Succeeded", "Failed")
        and (early or (_ready(pod) and "deletionTimestamp" not in pod["metadata"]))
    ]
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


def hosts(services: Iterable[Object], pods: Iterable[Object], namespace: str) -> str:
    """Lines of /etc/hosts for pods of that namespace, one for each name's address.

    A Service whose address is not on loopback, on a server that is not ours, leads to its pods
    straight away, as a headless one does."""
    pods = list(pods)
    lines = []
    for service in services:
        name, its = service["metadata"]["name"], service["metadata"]["namespace"]
        domain = f"{name}.{its}.svc.cluster.local"
        names = [domain, f"{name}.{its}.svc", f"{name}.{its}"]
        names += [name] if its == namespace else []
        if str(service["spec"].get("clusterIP")).startswith("127."):
            lines.append(f"{service['spec']['clusterIP']} {' '.join(names)}")
            continue
        for pod in backends(service, pods):
            own = []
            if pod["spec"].get("subdomain") == name and pod["spec"].get("hostname"):
                own = [f"{pod['spec']['hostname']}.{each}" for each in names]
            lines.append(f"{pod['status']['podIP']} {' '.join([*names, *own])}")
    return "".join(f"{line}\n" for line in sorted(lines))


def target_port(port: Object, pod: Object) -> int:
    """Of a Service's port in one of its pods, where a name may stand for it."""
    wanted = port.get("targetPort", port["port"])
    if isinstance(wanted, int):
        return wanted
    for container in pod["spec"]["containers"]:
        for each in container.get("ports", []):
            if each.get("name") == wanted:
                return int(each["containerPort"])
    return int(port["port"])


class Proxies:
    """Listens at each Service's address while it has a pod behind it; refuses while it has none."""

    def __init__(self) -> None:
        self._listening: dict[tuple[str, int], asyncio.Server] = {}
        self._targets: dict[tuple[str, int], tuple[str, int]] = {}
        self._flows: set[asyncio.Task[None]] = set()

    async def update(self, services: Iterable[Object], pods: Iterable[Object]) -> None:
        """Make it so."""
        pods = list(pods)
        targets = {}
        for service in services:
            address = service["spec"].get("clusterIP") or "None"
            found = backends(service, pods)
            if address.startswith("127.") and found:
                for port in service["spec"].get("ports", []):
                    pod = found[0]
                    to = (pod["status"]["podIP"], target_port(port, pod))
                    targets[address, int(port["port"])] = to
        self._targets = targets
        for place in self._listening.keys() - targets.keys():
            self._listening.pop(place).close()
        for place in targets.keys() - self._listening.keys():
            with contextlib.suppress(OSError):  # tried again with the next change
                self._listening[place] = await self._listen(place)

    async def _listen(self, place: tuple[str, int]) -> asyncio.Server:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._flows.add(task)
            task.add_done_callback(self._flows.discard)
            with contextlib.suppress(OSError):
                await _forward(reader, writer, self._targets.get(place))

        return await asyncio.start_server(accept, *place)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: tuple[str, int] | None
) -> None:
    """One connection, both ways, until both ends have ended."""
    try:
        if to is None:
            return
        back, forth = await asyncio.open_connection(*to)
        try:
            await asyncio.gather(_copy(reader, forth), _copy(back, writer))
        finally:
            forth.close()
    finally:
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(2**16):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


def _ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

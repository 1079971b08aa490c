"""A controller whose connections to a real API server are cut and held up: as many pods as wanted in the
end, none twice.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from elastic.k8s.kernel import reflector, writes
from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.pacing import Pace
from elastic.k8s.kernel.queue import Queue
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import PODS
from elastic.k8s.kernel.writes import Writer, together
from tests.k8s.cluster import Namespace
from tests.k8s.fake.store import Json

pytestmark = pytest.mark.xdist_group("kubernetes")
SLOTS = 5


class Wire:
    """What lies between the controller and the server."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def to(self, host: str, port: int) -> AsyncIterator[int]:
        """The port of this end."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            carrying.add(task)
            try:
                far_reader, far_writer = await asyncio.open_connection(host, port)
                self._writers |= {writer, far_writer}
                await asyncio.gather(self.carry(reader, far_writer), self.carry(far_reader, writer))
                self._writers -= {writer, far_writer}
            finally:
                writer.transport.abort()
                carrying.discard(task)

        carrying: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self.cut()
            for task in tuple(carrying):
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    uid: str
    slot: int
    attempt: int


def project(item: Json) -> Pod:
    slot, attempt = item["metadata"]["name"].removeprefix("s").split("-r")
    name, uid = item["metadata"]["name"], item["metadata"]["uid"]
    return Pod(name=name, uid=uid, slot=int(slot), attempt=int(attempt))


def pod(namespace: str, slot: int, attempt: int) -> Json:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "job", "uid": "job-uid"}
    return {
        "metadata": {
            "name": f"s{slot}-r{attempt}",
            "namespace": namespace,
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {
            "containers": [{"name": "main", "image": "none"}],
            "automountServiceAccountToken": False,
        },
    }


class Controller:
    """A pod in each slot, under a new name after each loss."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.namespace, self.queue = namespace, Queue[str](first=0.01, most=0.2)
        self.writer = Writer(api, manager="test", patience=0.5)
        self.last: dict[int, int] = dict.fromkeys(range(SLOTS), 0)
        self.cache: Reflector[Pod] = Reflector(
            api, PODS, project=project, changed=self._change, namespace=namespace, silence=0.5
        )

    def _change(self, old: Pod | None, new: Pod | None) -> None:
        one = new or old
        assert one is not None
        self.last[one.slot] = max(self.last[one.slot], one.attempt)
        see = self.writer.expectations.see
        see(self.namespace, one.name, one.uid, leaving=new is None)
        self.queue.add("job")

    async def look(self, key: str) -> float | None:
        if self.writer.expectations.pending(key, asyncio.get_running_loop().time()):
            return 0.05
        have = {one.slot for one in self.cache}
        missing = [
            pod(self.namespace, slot, self.last[slot] + 1)
            for slot in range(SLOTS)
            if slot not in have
        ]
        _, error = await together(missing, lambda one: self.writer.create(key, PODS, one))
        if error is not None:
            raise error
        return None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_connections_that_are_cut_and_held_up_make_no_pod_twice(
    namespace: Namespace, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "PAUSE", 0.02)
    monkeypatch.setattr(reflector, "LONG_PAUSE", 0.1)
    monkeypatch.setattr(writes, "EXPECTED", 5.0)

    async def main() -> None:
        config = yaml.safe_load(namespace.kubeconfig.read_text())
        there = urlsplit(config["clusters"][0]["cluster"]["server"])
        assert there.hostname
        wire, chance, losses = Wire(), random.Random(seed), 0
        async with (
            wire.to(there.hostname, there.port or 443) as port,
            await Api.connect(kubeconfig=str(namespace.kubeconfig)) as straight,
        ):
            config["clusters"][0]["cluster"]["server"] = f"https://{there.hostname}:{port}"
            path = tmp_path / "config"
            path.write_text(yaml.safe_dump(config))
            async with await Api.connect(kubeconfig=str(path), pace=Pace(1000, 100)) as api:
                controller = Controller(api, namespace.name)
                seen: dict[str, Pod] = {}

                def note(old: Pod | None, new: Pod | None) -> None:
                    if new is not None:
                        seen[new.uid] = new

                witness: Reflector[Pod] = Reflector(
                    straight, PODS, project=project, changed=note, namespace=namespace.name
                )
                async with asyncio.TaskGroup() as group:
                    running = [
                        group.create_task(witness.run()),
                        group.create_task(controller.cache.run()),
                        group.create_task(controller.queue.run(controller.look)),
                    ]
                    async with asyncio.timeout(120):
                        await witness.synced.wait()
                        await controller.cache.synced.wait()
                        controller.queue.add("job")
                        for _ in range(25):
                            losses += await disturb(wire, chance, straight, witness)
                        await whole(controller, witness)
                    for task in running:
                        task.cancel()
                names = [one.name for one in seen.values()]
                assert len(names) == len(set(names)) == SLOTS + losses

    asyncio.run(main())


async def disturb(
    wire: Wire, chance: random.Random, straight: Api, witness: "Reflector[Pod]"
) -> int:
    """Something happens; returns how many pods were lost."""
    action = chance.choice(["cut", "hold", "lose", "lose", "wait"])
    pods = list(witness)
    if action == "cut":
        wire.cut()
    elif action == "hold":
        wire.open.clear()
        await asyncio.sleep(chance.uniform(0.0, 0.8))
        wire.open.set()
    elif action == "lose" and pods:
        one = chance.choice(pods)
        name, space = one.name, witness._namespace
        await straight.delete(PODS, space, name, uid=one.uid, grace=0)
        async with asyncio.timeout(60):
            while witness.get(space, name) is not None:
                await asyncio.sleep(0.01)
        return 1
    else:
        await asyncio.sleep(chance.uniform(0.0, 0.1))
    return 0


async def whole(controller: Controller, witness: "Reflector[Pod]") -> None:
    """Wait until there is a pod in each slot, and nothing is on the way."""
    while True:
        now = asyncio.get_running_loop().time()
        slots = sorted(one.slot for one in witness)
        settled = (
            slots == list(range(SLOTS))
            and {one.uid for one in witness} == {one.uid for one in controller.cache}
            and not controller.writer.expectations.pending("job", now)
            and not len(controller.queue)
        )
        if settled:
            return
        await asyncio.sleep(0.02)

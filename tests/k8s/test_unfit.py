"""A machine that fails its check: its pod ends as such, and another comes elsewhere, so far as that can help. A real
launcher and a master's core, on a fake server; agents, their probes and the kubelet are played here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from elastic.k8s.causes import Cause
from elastic.k8s.kernel.writes import Writer
from elastic.k8s.launcher import Supplier
from elastic.k8s.pods import REQUIRED, Owner, worker
from elastic.k8s.spec import Spec
from elastic.k8s.wanted import limits, wanted
from elastic.master.endings import kind_of
from elastic.master.events import Event
from elastic.master.launcher import Saved
from elastic.master.state import Job
from elastic.proto import schema
from elastic.proto.elasticjob import UID_LABEL
from elastic.proto.ending import Ending, to_json
from elastic.supplied import Supplied, policy
from tests.k8s.fake.server import Server, serve
from tests.k8s.fake.soon import soon
from tests.k8s.fake.store import Json, Place
from tests.master.builders import Core, attached, left, spare
from tests.master.probing import answer, in_pairs, pair

SPACE, NAME, UID, PODS = "space", "job", "job-uid", "v1/pods"
MACHINES = [f"m{number}" for number in range(8)]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    soon(monkeypatch)


class Master:
    """Nothing but its core, as a launcher sees it."""

    saved, metrics = Saved(), ""

    def __init__(self, core: Core) -> None:
        self.core = core

    @property
    def job(self) -> Job:
        return self.core.job

    def now(self) -> float:
        return self.core.now

    def fold(self, event: Event) -> None:
        self.core.feed(event)

    async def changed(self, timeout: float) -> None:
        await asyncio.sleep(timeout)


class World:
    def __init__(self, server: Server, supplier: Supplier, core: Core, bad: set[str]) -> None:
        self._store, self.supplier, self.core, self._bad = server.store, supplier, core, bad
        self.placed: dict[str, str] = {}
        """Machines, by the names of all pods that there were."""

    def _pods(self) -> list[tuple[Place, Json]]:
        return sorted(
            (one for one in self._store.items.items() if one[0][0] == PODS), key=lambda one: one[0]
        )

    async def play(self, turns: int = 12) -> None:
        """Until the launcher has nothing more to do: it has looked again, and again, since anything was done."""
        still = 0
        while still < 2:
            still = 0 if await self._act() else still + 1
            assert (turns := turns - (still == 0)), "there is no end of it"
            before = self.supplier.said
            async with asyncio.timeout(30):
                while self.supplier.said is before or not self._seen():
                    self.supplier.wake()
                    await asyncio.sleep(0.01)

    def _seen(self) -> bool:
        shown = {one.name: one.phase for one in self.supplier.pods}
        return shown == {key[2]: _phase(item) for key, item in self._pods()}

    async def _act(self) -> bool:
        """Whether anything happens to a pod, or a node."""
        core, acted = self.core, False
        for place, item in self._pods():
            phase = _phase(item)
            if phase == "Pending":
                await self._start(place, item)
            elif phase == "Running" and core.order(place[2]).kind == "exit":
                await self._end(place)
            acted |= _phase(self._store.items[place]) != phase
        if in_pairs(core):
            pair(core, at=core.now + 1)
            acted = True
        spare(core)
        core.tick(core.now + 1)
        return acted

    async def _start(self, place: Place, item: Json) -> None:
        """On the first machine that is free, and that it does not keep away from; its agent is there, and probes it."""
        name, core = place[2], self.core
        taken = {self.placed[key[2]] for key, one in self._pods() if _phase(one) == "Running"}
        machine = next(m for m in MACHINES if m not in taken | _avoided(item))
        self.placed[name] = machine
        status = {"phase": "Running"}
        await self._store.patch(place, {"spec": {"nodeName": machine}, "status": status})
        core.feed(attached(name), core.now + 1)
        answer(core, name, "faulty" if machine in self._bad else "ok", at=core.now + 1)

    async def _end(self, place: Place) -> None:
        """As elastic-run does, where its master has it end."""
        told = self.core.order(place[2])
        said = Ending(kind=kind_of(told.exit_code, told.ending.cause), reason=told.reason)
        ended = {"exitCode": said.code(told.exit_code, detailed=True), "message": to_json(said)}
        state = [{"name": "main", "state": {"terminated": ended}}]
        self.core.feed(left(place[2]))
        await self._store.patch(place, {"status": {"phase": "Failed", "containerStatuses": state}})


def _phase(item: Json) -> str:
    return str(item.get("status", {}).get("phase", "Pending"))


def _avoided(item: Json) -> set[str]:
    affinity = item["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get(REQUIRED, {}).get("nodeSelectorTerms", [])
    return {node for term in terms for one in term["matchFields"] for node in one["values"]}


@contextlib.asynccontextmanager
async def working(bad: set[str], replicas: int = 3, **more: Json) -> AsyncIterator[World]:
    """bad: machines on which the check fails."""
    spec = schema.load(Spec, {"image": "i", "worker": {"replicas": replicas}, **more}, "spec")
    owner = Owner(namespace=SPACE, name=NAME, uid=UID)
    async with serve() as server, server.api() as api:
        supplier = Supplier(
            api, Writer(api, manager="test"), namespace=SPACE, job=NAME, uid=UID, label=UID_LABEL,
            wanted=wanted(spec), limits=limits(spec), make=lambda new, avoid: worker(owner, spec, new, avoid),
        )  # fmt: skip
        core = Core(policy(spec))
        tasks = [
            asyncio.create_task(supplier.watch()),
            asyncio.create_task(Supplied(supplier).run(Master(core))),
        ]
        try:
            world = World(server, supplier, core, bad)
            async with asyncio.timeout(30):
                while len(supplier.pods) < replicas:
                    await asyncio.sleep(0.01)
            yield world
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)


def test_the_pod_is_replaced_elsewhere_and_the_job_begins() -> None:
    async def main() -> None:
        async with working({"m1"}) as world:
            await world.play()
            assert sorted(world.core.seats()) == [
                "job-worker-0-r0",
                "job-worker-1-r1",
                "job-worker-2-r0",
            ]
            assert world.placed["job-worker-1-r1"] == "m3"
            (avoided,) = world.supplier.placing.avoided
            assert (avoided.node, avoided.cause) == ("m1", Cause.UNHEALTHY)
            (failure,) = world.supplier.failures
            assert (failure.pod, failure.exit_code) == ("job-worker-1-r0", 211)
            assert failure.reason.endswith("its check failed: matmul: gpu3: 1 elements differ")

    asyncio.run(main())


def test_what_fails_on_all_machines_replaces_none() -> None:
    async def main() -> None:
        async with working({*MACHINES}) as world:
            await world.play()
            assert len(world.placed) == 3
            assert world.core.order("job-worker-0-r0").kind == "wait"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("action", "pods"), [("", 3), ("ReplacePodAvoidNode", 3), ("ReplacePod", 2)]
)
def test_where_each_other_machine_fails_there_is_an_end(action: str, pods: int) -> None:
    """A rule that avoids none has the pod come back."""
    rule = {"name": "r", "match": {"reasons": ["HealthCheckFailed"]}, "action": action}
    rules: Json = {"failurePolicy": {"rules": [rule]}} if action else {}

    async def main() -> None:
        bad = {"m1", *MACHINES[3:]}
        async with working(bad, nodePolicy={"maxAvoided": "2"}, **rules) as world:
            await world.play()
            again = [f"job-worker-1-r{number}" for number in range(pods)]
            assert sorted(world.placed) == ["job-worker-0-r0", *again, "job-worker-2-r0"]
            assert world.core.order(again[-1]).kind == "wait"
            assert world.core.seats() == []

    asyncio.run(main())


def test_a_job_that_avoids_nothing_waits() -> None:
    async def main() -> None:
        async with working({"m1"}, nodePolicy={"onFault": "None"}) as world:
            await world.play()
            assert len(world.placed) == 3
            assert world.core.order("job-worker-1-r0").kind == "wait"

    asyncio.run(main())

"""An operator whose API server refuses, forgets to answer and loses its watches: in the end there is what there
should be, and at no moment two of anything. On a fake server, since a real one does none of that when asked.
"""

import asyncio
import contextlib
import copy
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from elastic.k8s.kernel import writes
from elastic.k8s.kernel.health import Health
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.operator import LEASE, Operator
from elastic.proto import elasticjob, schema
from elastic.proto.elasticjob import JobState
from tests.k8s.fake.server import Server, serve
from tests.k8s.fake.soon import REFUSALS, soon
from tests.k8s.fake.store import Json, Place

JOBS = f"{elasticjob.GROUP}/{elasticjob.VERSION}/{elasticjob.PLURAL}"
PODS, SECRETS = "v1/pods", "v1/secrets"
RBAC = "rbac.authorization.k8s.io/v1"
SPACE = "space"
JOB: Place = (JOBS, SPACE, "job")
SPEC = {"image": "i", "worker": {"replicas": 2}, "elastic": {"min": 1, "max": 4}}
ACTS = ("create", "scale", "suspend", "resume", "lose", "delete")
WATCHES = ("drop", "end", "torn", "gone", "error")
TURNS = 40


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    soon(monkeypatch)


class World:
    """Jobs on a server; people, a garbage collector and faults."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server, self._store, self._random = server, server.store, random.Random(seed)
        self.runs: dict[str, bool] = {}
        """By name, of each job that is to be there: whether it is to run."""
        self._made = 0

    async def act(self) -> None:
        """Something that a person does, or that happens to a pod."""
        chance = self._random
        what = chance.choice(ACTS if self.runs else ACTS[:1])
        if what == "create":
            name, self._made = f"job-{self._made}", self._made + 1
            body = {
                "metadata": {"generation": 1},
                "spec": {**SPEC, "worker": {"replicas": chance.randint(1, 4)}},
            }
            await self._store.create((JOBS, SPACE, name), body)
            self.runs[name] = True
            return
        name = chance.choice(sorted(self.runs))
        if what == "scale":
            await self._edit(name, {"worker": {"replicas": chance.randint(1, 4)}})
        elif what in ("suspend", "resume"):
            await self._edit(name, {"suspend": what == "suspend"})
            self.runs[name] = what == "resume"
        elif what == "lose":
            for place in self._pods(self._uid(name)):
                await self._store.delete(place, "")
        else:
            await self._store.delete((JOBS, SPACE, name), "")
            del self.runs[name]

    async def _edit(self, name: str, spec: Json) -> None:
        place = JOBS, SPACE, name
        generation = self._store.get(place)["metadata"]["generation"] + 1
        await self._store.patch(place, {"metadata": {"generation": generation}, "spec": spec})

    def go_wrong(self, what: str) -> None:
        chance = self._random
        if what == "watches":
            self._server.faults.end_watch(chance.choice(WATCHES), after=chance.randint(0, 3))
            if chance.random() < 0.3:
                self._server.break_watches()
            if chance.random() < 0.3:
                self._store.compact()  # who comes back is too late
            return
        times, after = chance.randint(1, 3), chance.random() < 0.5
        self._server.faults.refuse(REFUSALS[what], times=times, after=after)

    async def collect(self) -> None:
        """The garbage collector; and no job has two masters at any moment."""
        while True:
            async with self._store.changed:
                await self._store.changed.wait()
            there = {item["metadata"]["uid"] for item in self._store.items.values()}
            masters = Counter[str]()
            for place, item in list(self._store.items.items()):
                owner = _owner(item)
                if owner and owner not in there:
                    await self._store.delete(place, "")
                elif place[0] == PODS:
                    masters[owner] += 1
            assert not masters or max(masters.values()) == 1, masters

    # --- what there should be --------------------------------------------------------------------

    def wrong(self) -> str:
        """The first thing that is not as it should be; empty: all is."""
        jobs = {place[2]: item for place, item in self._store.items.items() if place[0] == JOBS}
        if set(jobs) != set(self.runs):
            return f"jobs are {sorted(jobs)}, not {sorted(self.runs)}"
        for name, job in jobs.items():
            if found := self._wrong_with(name, job):
                return f"{name}: {found}"
        owners = {_owner(self._store.items[place]) for place in self._places(PODS)}
        orphans = owners - {job["metadata"]["uid"] for job in jobs.values()}
        return f"pods of {orphans}" if orphans else ""

    def _wrong_with(self, name: str, job: Json) -> str:
        status, meta = job.get("status") or {}, job["metadata"]
        accepted, runs = status.get("accepted") or {}, self.runs[name]
        if (accepted.get("generation"), status.get("observedGeneration")) != (
            meta["generation"],
        ) * 2:
            return "its spec is not looked at"
        if accepted["wanted"] != ("Run" if runs else "Suspend"):
            return f"it is to be {accepted['wanted']}"
        if accepted["spec"]["worker"]["replicas"] != job["spec"]["worker"]["replicas"]:
            return "it is of another size"
        if meta.get("finalizers") != [elasticjob.FINALIZER]:
            return f"its finalizers are {meta.get('finalizers')}"
        if not runs:
            return "" if status["phase"] == "Suspended" else f"it is {status['phase']}"
        pods, pod = [place[2] for place in self._pods(meta["uid"])], status["master"]["pod"]
        if pods != [pod]:
            return f"its pods are {pods}, not {pod}"
        for collection in (
            "v1/services",
            "v1/serviceaccounts",
            f"{RBAC}/roles",
            f"{RBAC}/rolebindings",
        ):
            if _owner(self._store.items.get((collection, SPACE, f"{name}-master"))) != meta["uid"]:
                return f"no {collection}"
        token = self._store.items.get((SECRETS, SPACE, f"{name}-token"))
        return "" if _owner(token) == meta["uid"] else "no token"

    def twice(self) -> list[str]:
        """Pods that were made more than once under a name, which would be two masters of one attempt, and other
        tokens than the first one of a job that is there."""
        tokens = {(SECRETS, SPACE, f"{name}-token") for name in self.runs}
        made = Counter(place for place, _ in self._store.created)
        return [
            place[2]
            for place, count in made.items()
            if count > 1 and (place[0] == PODS or place in tokens)
        ]

    def _uid(self, name: str) -> str:
        return str(self._store.get((JOBS, SPACE, name))["metadata"]["uid"])

    def _places(self, collection: str) -> list[Place]:
        return [place for place in self._store.items if place[0] == collection]

    def _pods(self, uid: str) -> list[Place]:
        return [place for place in self._places(PODS) if _owner(self._store.items[place]) == uid]


def _owner(item: Json | None) -> str:
    owners: list[dict[str, Any]] = item["metadata"].get("ownerReferences", []) if item else []
    return str(owners[0]["uid"]) if owners else ""


async def settled(world: World) -> None:
    try:
        async with asyncio.timeout(60):
            while world.wrong():
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise AssertionError(world.wrong()) from error


async def act_while(kinds: tuple[str, ...], seed: int) -> None:
    async with serve() as server, server.api() as api:
        world, chance = World(server, seed), random.Random(seed)
        lease = Lease(api, SPACE, LEASE, "one")
        operator = Operator(api, [SPACE], lease, Health("operator"))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(operator.run()), group.create_task(world.collect())]
            async with asyncio.timeout(60):
                while not lease.held():
                    await asyncio.sleep(0.01)
            for _ in range(TURNS):
                await world.act()
                if kinds and chance.random() < 0.7:
                    world.go_wrong(chance.choice(kinds))
                await asyncio.sleep(chance.uniform(0.0, 0.06))
            server.faults.calls.clear()  # the lease alone would meet what is left, until it is lost
            await settled(world)
            for task in tasks:
                task.cancel()
        assert world.twice() == []


@pytest.mark.parametrize("kinds", [(), *((kind,) for kind in (*REFUSALS, "watches"))], ids=str)
def test_whatever_goes_wrong_it_is_the_same_in_the_end(kinds: tuple[str, ...]) -> None:
    asyncio.run(act_while(kinds, 7))


def test_everything_goes_wrong_at_once() -> None:
    seed = random.randrange(1 << 30)
    try:
        asyncio.run(act_while((*REFUSALS, "watches", "watches"), seed))
    except* AssertionError as errors:
        raise AssertionError(f"seed {seed}: {errors.exceptions}") from errors


@contextlib.asynccontextmanager
async def one_job() -> AsyncIterator[tuple[Server, Place]]:
    """With an operator, and its master's pod, whose place it is."""
    async with serve() as server, server.api() as api:
        operator = Operator(api, [SPACE], Lease(api, SPACE, LEASE, "one"), Health("operator"))
        await server.store.create(JOB, {"metadata": {"generation": 1}, "spec": SPEC})
        working = asyncio.create_task(operator.run())
        try:
            async with asyncio.timeout(60):
                while not (pods := [one for one in server.store.items if one[0] == PODS]):
                    await asyncio.sleep(0.01)
                yield server, pods[0]
        finally:
            working.cancel()
            await asyncio.wait([working])


def test_an_end_that_the_watch_does_not_show_yet_is_asked_for() -> None:
    """Else the job would train again."""

    async def main() -> None:
        async with one_job() as (server, pod):
            store = server.store
            server.silent.add(JOBS)
            ended = JobState(generation=1, attempt=1, state="Ended", outcome="Succeeded")
            await store.patch(JOB, {"status": {"job": schema.dump(ended)}})
            await store.patch(pod, {"status": {"phase": "Succeeded"}})
            while store.get(JOB)["status"]["phase"] != "Succeeded":
                await asyncio.sleep(0.01)
            made = [place for place, _ in store.created if place[0] == PODS]
            assert made == [(PODS, SPACE, "job-master-r1")]

    asyncio.run(main())


def test_a_pod_that_could_not_be_taken_away_is_taken_away_later() -> None:
    async def main() -> None:
        async with one_job() as (server, pod):
            body = copy.deepcopy(server.store.get(pod))
            body["metadata"] = {key: body["metadata"][key] for key in ("labels", "ownerReferences")}
            server.faults.refuse(403, "DELETE")
            place = PODS, SPACE, "job-master-r7"
            await server.store.create(place, body)
            while place in server.store.items:
                await asyncio.sleep(0.01)
            assert not server.faults.calls

    asyncio.run(main())


def test_what_vanishes_while_it_is_put_right_is_made_again() -> None:
    """As where a garbage collector is at it. Nor is the job held up for as long as an answer is waited for."""

    async def main() -> None:
        async with one_job() as (server, pod):
            account: Place = ("v1/serviceaccounts", SPACE, "job-master")
            before = server.store.get(account)["metadata"]["uid"]
            server.vanishing.add(account)
            await server.store.delete(pod, "")
            async with asyncio.timeout(writes.PATIENCE / 2):
                while (
                    account not in server.store.items
                    or (PODS, SPACE, "job-master-r2") not in server.store.items
                ):
                    await asyncio.sleep(0.01)
            assert server.store.get(account)["metadata"]["uid"] != before
            assert not server.vanishing

    asyncio.run(main())

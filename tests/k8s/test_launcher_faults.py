"""A master whose API server refuses, forgets to answer and loses its watches, and which ends in the middle of it: there
are as many worker pods as wanted in the end, and at no moment two of one slot. On a fake server, since a real one does
none of that when asked; no agents run, and a kubelet takes its time with pods that are to go.
"""

import asyncio
import contextlib
import gc
import random
import secrets
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from elastic.job_master import JobMaster
from elastic.job_place import Place as Serving
from elastic.k8s.kernel.api import Api
from elastic.k8s.pods import Owner, worker
from elastic.k8s.spec import Spec
from elastic.k8s.supply import New
from elastic.proto import elasticjob, schema
from elastic.proto.elasticjob import Accepted, JobState
from elastic.proto.security import Security
from tests.k8s.fake.server import Server, serve
from tests.k8s.fake.soon import REFUSALS, soon
from tests.k8s.fake.store import Json, Place

SPACE, NAME, PODS = "space", "job", "v1/pods"
JOB: Place = (f"{elasticjob.GROUP}/{elasticjob.VERSION}/{elasticjob.PLURAL}", SPACE, NAME)
KUBELET = "test/kubelet"
"""A finalizer: the pod has still to end."""
MOST = 6
ACTS = (
    "scale",
    "scale",
    "lose",
    "lose",
    "lose",
    "evict",
    "die",
    "replace",
    "suspend",
    "resume",
    "resume",
)
WATCHES = {"watch lost": ("drop", "end", "torn"), "gone": ("gone", "error")}
KINDS = (*REFUSALS, *WATCHES)
TURNS = 40


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    soon(monkeypatch)


class World:
    """One job on a server, whose operator and kubelet are played here; people, and faults."""

    def __init__(self, server: Server, folder: Path, seed: int) -> None:
        self._server, self._store, self._random = server, server.store, random.Random(seed)
        self._folder, self._address = (
            folder,
            "127." + ".".join(str(1 + secrets.randbelow(253)) for _ in range(3)),
        )
        self._lives, self._pods_made = [0], 1
        """How many objects there had been when each attempt, and each life of a master, began."""
        self.replicas, self.runs, self.attempt, self.generation = 3, True, 1, 1

    # --- the operator ----------------------------------------------------------------------------

    async def accept(self) -> None:
        """What is wanted by now."""
        elastic = {"min": 1, "max": MOST, "lastCallSeconds": 0}
        said = Accepted(
            generation=self.generation,
            spec={"image": "i", "worker": {"replicas": self.replicas}, "elastic": elastic},
            wanted="Run" if self.runs else "Suspend",
            attempt=self.attempt,
            master=self._pod,
        )
        await self._store.patch(JOB, {"status": {"accepted": schema.dump(said)}})

    @property
    def _pod(self) -> str:
        """The master's."""
        return f"{NAME}-master-r{self._pods_made}"

    async def serve(self, api: Api) -> None:
        """The job's masters, in the pods that are named, one after the other."""
        while True:
            place = Serving(
                namespace=SPACE, name=NAME, folder=self._folder / self._pod, pod=self._pod,
                address=f"{self._address}:29500",
            )  # fmt: skip
            self._lives.append(len(self._store.created))
            self._master = asyncio.create_task(JobMaster(api, place, Security(), make).run())
            try:
                await asyncio.wait([self._master])
            finally:
                self._master.cancel()
                await asyncio.wait([self._master])
            if not self._master.cancelled():
                assert self._master.result() is None, "it says that the job has ended"

    async def end(self) -> None:
        """The master's process, whatever it does just now."""
        self._master.cancel()
        await asyncio.wait([self._master])

    # --- what happens ----------------------------------------------------------------------------

    async def act(self) -> None:
        """Something that a person does, or that happens to a pod."""
        chance, alive = self._random, [place for place, item in self._pods() if lives(item)]
        what = chance.choice(ACTS)
        if what in ("lose", "evict"):
            for place in chance.sample(alive, min(len(alive), chance.randint(1, 3))):
                if what == "lose":
                    await self._store.delete(place, "")
                else:
                    await self._store.patch(
                        place, {"status": {"phase": "Failed", "reason": "Evicted"}}
                    )
            return
        if what in ("die", "replace"):
            await self.end()
            self.attempt += what == "replace"
            self._pods_made = self.attempt
        elif what == "scale":
            self.replicas, self.generation = chance.randint(1, MOST), self.generation + 1
        else:
            if not self.runs and what == "resume":
                rests = (said := self._said()) is not None and said.state == "Suspended"
                self.attempt += 1
                self._pods_made = self._pods_made if rests else self.attempt
                self._lives.append(len(self._store.created))
            self.runs = what == "resume"
        await self.accept()

    def go_wrong(self, what: str) -> None:
        chance = self._random
        if what in WATCHES:
            for _ in range(2):  # of the job, and of its pods
                fault = chance.choice(WATCHES[what])
                self._server.faults.end_watch(fault, after=chance.randint(0, 3))
            if chance.random() < 0.5:
                if what == "gone":
                    self._store.compact()  # who comes back is too late
                self._server.break_watches()
            return
        times, after = chance.randint(1, 3), chance.random() < 0.5
        self._server.faults.refuse(REFUSALS[what], times=times, after=after)

    async def run_pods(self) -> None:
        """A kubelet, for which an end takes a while; and no slot has two pods at any moment."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02), self._store.changed:
                    await self._store.changed.wait()
            slots = Counter(
                place[2].rpartition("-r")[0] for place, item in self._pods() if lives(item)
            )
            assert not slots or max(slots.values()) == 1, slots
            for place, item in self._pods():
                if "deletionTimestamp" in item["metadata"] and self._random.random() < 0.3:
                    await self._store.patch(place, {"metadata": {"finalizers": None}})

    def _pods(self) -> list[tuple[Place, Json]]:
        return [(place, item) for place, item in self._store.items.items() if place[0] == PODS]

    # --- what there should be --------------------------------------------------------------------

    def wrong(self) -> str:
        """The first thing that is not as it should be; empty: all is."""
        names = [place[2] for place, item in self._pods() if lives(item)]
        if len(names) != (self.replicas if self.runs else 0):
            return f"there are {names}, of {self.replicas if self.runs else 0}"
        if (said := self._said()) is None or said.attempt != self.attempt:
            return f"attempt {self.attempt} says nothing"
        return "" if self.runs != (said.state == "Suspended") else f"it is {said.state}"

    def _said(self) -> JobState | None:
        return elasticjob.job_state(self._store.get(JOB).get("status") or {})

    def twice(self) -> list[str]:
        """Names under which one master has made more than one pod in an attempt."""
        found, ends = [], [*self._lives[1:], len(self._store.created)]
        for begin, end in zip(self._lives, ends, strict=True):
            made = Counter(p[2] for p, _ in self._store.created[begin:end] if p[0] == PODS)
            found += [name for name, count in made.items() if count > 1]
        return found


def lives(item: Json) -> bool:
    ended = (item.get("status") or {}).get("phase") == "Failed"
    return not ended and "deletionTimestamp" not in item["metadata"]


def make(uid: str, spec: Spec, new: New, avoid: tuple[str, ...]) -> dict[str, Any]:
    found = worker(Owner(namespace=SPACE, name=NAME, uid=uid), spec, new, avoid)
    found["metadata"]["finalizers"] = [KUBELET]
    return found


async def settled(world: World) -> None:
    try:
        async with asyncio.timeout(30):
            while world.wrong():
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise AssertionError(world.wrong()) from error


@contextlib.asynccontextmanager
async def working(folder: Path, seed: int) -> AsyncIterator[tuple[World, Server]]:
    """A world that has its first pods."""
    async with serve() as server, server.api() as api:
        world = World(server, folder, seed)
        await server.store.create(JOB, {"metadata": {"generation": 1}, "spec": {"image": "i"}})
        await world.accept()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(world.run_pods()), group.create_task(world.serve(api))]
            await settled(world)
            yield world, server
            for task in tasks:
                task.cancel()
        assert world.twice() == []


async def act_while(kinds: tuple[str, ...], folder: Path, seed: int) -> None:
    async with working(folder, seed) as (world, _):
        chance = random.Random(seed)
        for turn in range(TURNS):
            await world.act()
            if kinds and chance.random() < 0.7:
                world.go_wrong(chance.choice(kinds))
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            if turn % 10 == 9:
                await settled(world)


@pytest.mark.parametrize("kinds", [(), *((kind,) for kind in KINDS)], ids=str)
def test_whatever_goes_wrong_there_are_as_many_pods_as_wanted(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    asyncio.run(act_while(kinds, tmp_path, 7))


def test_everything_goes_wrong_at_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    try:
        asyncio.run(act_while(KINDS, tmp_path, seed))
    except* AssertionError as errors:
        raise AssertionError(f"seed {seed}: {errors.exceptions}") from errors


@contextlib.asynccontextmanager
async def lone(folder: Path) -> AsyncIterator[JobMaster]:
    """A master that has no job."""
    async with serve() as server, server.api() as api:
        place = Serving(
            namespace=SPACE, name=NAME, folder=folder, pod=f"{NAME}-master-r1", address="127.0.0.1:1"
        )  # fmt: skip
        yield JobMaster(api, place, Security(), make)


def test_a_master_that_is_ended_as_it_begins_leaves_nothing_unawaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with lone(tmp_path) as serving:
            master = asyncio.create_task(serving.run())
            await asyncio.sleep(0)  # it has begun, and what it waits for has not
            master.cancel()
            await asyncio.wait([master])
            assert master.cancelled()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(one.message) for one in said] == []


def test_a_master_that_is_ended_as_something_changes_ends(tmp_path: Path) -> None:
    """Python 3.11's `asyncio.wait_for` loses a cancellation that comes with what was waited for."""

    async def main() -> None:
        async with lone(tmp_path) as master:
            waits = asyncio.create_task(master._stirred_or_late())
            await asyncio.sleep(0)
            master._stirred.set()
            waits.cancel()
            await asyncio.wait([waits])
            assert waits.cancelled()

    asyncio.run(main())


def test_a_pod_that_came_and_went_while_no_watch_told_it_is_replaced(tmp_path: Path) -> None:
    """What was made counts until a list says that it is no more, and no longer."""

    async def main() -> None:
        async with working(tmp_path, 1) as (world, server):
            server.silent.add(PODS)
            world.replicas += 1
            await world.accept()
            unseen: Place = (PODS, SPACE, f"{NAME}-worker-3-r0")
            await settled(world)
            await server.store.delete(unseen, "")
            while unseen in server.store.items:
                await asyncio.sleep(0.01)
            server.store.compact()
            server.silent.discard(PODS)
            await settled(world)
            assert (PODS, SPACE, f"{NAME}-worker-3-r1") in server.store.items

    asyncio.run(main())

"""The operator on an API server that refuses, breaks off, loses its past and answers late: the same in the end."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from elastic.k8s.kernel.api import Json
from elastic.k8s.kernel.health import Health
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.operator import Operator
from elastic.proto.elasticjob import GROUP, PLURAL
from tests.k8s.fake.server import Server, serve

JOBS, FAULTS = 4, 60
COLLECTION = f"{GROUP}/v1alpha1/{PLURAL}"


@contextlib.asynccontextmanager
async def operated(server: Server) -> AsyncIterator[None]:
    api = server.api()
    operator = Operator(api, ["n"], Lease(api, "n", "operator", "test"), Health("operator"))
    running = asyncio.create_task(operator.run())
    try:
        yield
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()


def strike(server: Server, chance: random.Random) -> None:
    """One fault of any kind, for a call or a watch that comes."""
    match chance.randrange(8):
        case 0 | 1:
            server.faults.refuse(chance.choice([429, 500, 503]), "POST", "PATCH")
        case 2:
            server.faults.refuse(409, "PATCH", "DELETE")
        case 3:
            server.faults.refuse(500, "POST", after=True)
        case 4:
            server.faults.refuse(0, "POST", "PATCH", after=chance.random() < 0.5)
        case 5:
            server.faults.end_watch(chance.choice(["drop", "end", "torn", "gone", "error"]))
        case 6:
            server.break_watches()
        case 7:
            server.store.compact()


def of(server: Server, collection: str) -> dict[str, Json]:
    return {place[2]: item for place, item in server.store.items.items() if place[0] == collection}


def wrong(server: Server) -> str:
    """The first thing that is not as it should be; empty: all is."""
    pods, services = of(server, "v1/pods"), of(server, "v1/services")
    for name, job in of(server, COLLECTION).items():
        status = job.get("status") or {}
        if status.get("observedGeneration") != job["metadata"]["generation"]:
            return f"{name} is not looked at"
        accepted = status["accepted"]
        if accepted["spec"]["worker"]["replicas"] != job["spec"]["worker"]["replicas"]:
            return f"{name}: an edit is lost"
        masters = [pod for pod in pods if pod.startswith(f"{name}-master")]
        if masters != [status["master"]["pod"]]:
            return f"{name} has the masters {masters}"
        if f"{name}-master" not in services:
            return f"{name} has no Service"
    return ""


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_injected_the_same_is_there_in_the_end(seed: int) -> None:
    asyncio.run(strike_and_look(random.Random(seed)))


async def strike_and_look(chance: random.Random) -> None:
    async with serve() as server, operated(server):
        for number in range(JOBS):
            metadata = {"generation": 1, "finalizers": []}
            spec = {"image": "i", "worker": {"replicas": 2}, "elastic": {"min": 1, "max": 4}}
            place = (COLLECTION, "n", f"job-{number}")
            await server.store.create(place, {"metadata": metadata, "spec": spec})
            for _ in range(FAULTS // JOBS):
                strike(server, chance)
                await asyncio.sleep(chance.uniform(0.0, 0.02))
            edit = {"metadata": {"generation": 2}, "spec": {"worker": {"replicas": 3}}}
            await server.store.patch(place, edit)
        async with asyncio.timeout(60):
            while wrong(server):
                await asyncio.sleep(0.02)
        made = Counter(place[2] for place, _ in server.store.created if place[0] == "v1/pods")
        assert set(made.values()) == {1}, made

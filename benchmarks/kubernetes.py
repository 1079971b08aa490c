"""How fast a job's launcher replaces pods, and what a thousand of them cost, on a real API server.

    python -m benchmarks.kubernetes [lost] [thousand] [jobs] [pods]

No kubelet runs: pods are objects, so what is measured is ours and the server's, not an image's start. The
master is a real one, without agents. It and the operator have a service account each, with the rules that they
have in a cluster; they never run both: each is measured alone, and the other's part is played by an administrator.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import secrets
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from elastic.k8s.belongings import account
from elastic.k8s.crd import manifest
from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.health import Health
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.kernel.pacing import Pace
from elastic.k8s.kernel.writes import Writer
from elastic.k8s.launcher import Supplier, Told
from elastic.k8s.operator import BURST, QPS, Key, Operator
from elastic.k8s.placing import Limits
from elastic.k8s.pods import Owner, worker
from elastic.k8s.spec import read
from elastic.k8s.supply import New, Wanted
from elastic.master import events as ev
from elastic.master.main import MasterSettings, serve
from elastic.master.policy import Policy
from elastic.proto.elasticjob import (
    GROUP,
    KIND,
    PLURAL,
    ROLE_LABEL,
    UID_LABEL,
    VERSION,
    JobState,
    Training,
    Workers,
)
from elastic.proto.schema import dump
from elastic.proto.security import Security
from elastic.supplied import Supplied
from scripts.kubernetes import assets
from scripts.kubernetes.accounts import allow, operator_rules
from scripts.kubernetes.client import CORE, Client, access
from scripts.kubernetes.server import Server, account_kubeconfig
from scripts.kubernetes.server import serve as serve_api

PARTS = ("lost", "thousand", "jobs", "pods")
LOST, OF, TIMES = 30, 32, 5
JOBS, PODS_OF_ONE = 200, 1000
ROUND = 5.0
"""Seconds between two words of a master."""
ELASTICJOBS = f"/apis/{GROUP}/{VERSION}"


class Timed(Supplier):
    """Notes how long each turn takes that writes nothing: the reconcile itself."""

    turns: list[float]

    async def _turn(self, told: Told) -> float:
        began = time.perf_counter()
        pause = await super()._turn(told)
        if self.said is not None and not (self.said.create or self.said.delete):
            self.turns.append(time.perf_counter() - began)
        return pause


@contextlib.asynccontextmanager
async def launcher(server: Server, client: Client, replicas: int) -> AsyncIterator[Timed]:
    """Of a job in a namespace of its own, whose owner is a ConfigMap."""
    namespace = f"b{uuid.uuid4().hex[:8]}"
    client.create(f"{CORE}/namespaces", {"metadata": {"name": namespace}})
    client.create(
        f"{CORE}/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "default"}}
    )
    made = client.create(f"{CORE}/namespaces/{namespace}/configmaps", {"metadata": {"name": "job"}})
    uid = made["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "job", "uid": uid, "controller": True}

    def make(new: New, avoid: tuple[str, ...]) -> dict[str, Any]:
        name = f"job-worker-{new.slot}-r{new.attempt}"
        meta = {"name": name, "namespace": namespace, "labels": {UID_LABEL: uid}}
        spec = {"containers": [{"name": "main", "image": "local"}]}
        metadata = {**meta, "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    _, role, _ = account(Owner(namespace=namespace, name="job", uid=uid))
    address = "127." + ".".join(str(1 + secrets.randbelow(253)) for _ in range(3)) + ":29500"
    wanted = Wanted(replicas=replicas, least=2)
    with tempfile.TemporaryDirectory() as folder:
        config = acting(server, client, namespace, "job-master", role["rules"])
        async with await Api.connect(kubeconfig=str(config)) as api:
            supplier = Timed(
                api, Writer(api, manager="elasticjob-master"), namespace=namespace, job="job", uid=uid,
                label=UID_LABEL, wanted=wanted, limits=Limits(), make=make,
            )  # fmt: skip
            supplier.turns = []
            joined = Supplied(supplier)
            settings = MasterSettings(
                run_id="job", address=address, run_dir=Path(folder), job_uid=uid, security=Security(),
                policy=Policy(min_nodes=2, max_nodes=replicas, supplied=True),
            )  # fmt: skip
            watch = asyncio.create_task(supplier.watch())
            served = asyncio.create_task(serve(settings, joined))
            try:
                yield supplier
            finally:
                assert joined._master is not None
                joined._master.fold(ev.Stopping("measured"))
                await served
                watch.cancel()


def acting(
    server: Server, client: Client, namespace: str, name: str, rules: list[dict[str, Any]]
) -> Path:
    """A kubeconfig of a service account that may do this and no more."""
    allow(client, namespace, name, *rules)
    path = server.folder / f"{namespace}-{name}.kubeconfig"
    account_kubeconfig(server.kubeconfig, namespace, name, path)
    return path


async def until(true: Callable[[], bool], seconds: float = 300.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


def alive(supplier: Supplier) -> set[str]:
    return {found.name for found in supplier.pods if found.alive}


def delete(client: Client, paths: list[str]) -> None:
    for path in paths:
        client.delete(path)


async def lost(server: Server, client: Client) -> None:
    """From the moment at which the first of 30 pods is deleted until 30 others are in the cache."""
    took = []
    async with launcher(server, client, OF) as supplier:
        await until(lambda: len(alive(supplier)) == OF)
        for _ in range(TIMES):
            before = alive(supplier)
            gone = sorted(before)[:LOST]
            began = time.perf_counter()
            path = f"{CORE}/namespaces/{supplier._namespace}/pods"
            await asyncio.to_thread(delete, client, [f"{path}/{name}" for name in gone])
            deleted = time.perf_counter() - began
            await until(lambda: len(alive(supplier) - set(gone)) == OF)  # noqa: B023
            took.append(time.perf_counter() - began)
            print(f"  deleting took {deleted:.2f} s, all are replaced after {took[-1]:.2f} s")
            await asyncio.sleep(2.5)  # the pace of calls recovers, as it has in a job that trains
    print(
        f"{LOST} pods lost at once: replaced in {statistics.median(took):.2f} s (longest {max(took):.2f})"
    )


async def thousand(server: Server, client: Client) -> None:
    async with launcher(server, client, 1000) as supplier:
        began = time.perf_counter()
        await until(lambda: len(alive(supplier)) == 1000)
        print(f"  1,000 pods made in {time.perf_counter() - began:.1f} s, at 20 calls a second")
        supplier.turns.clear()
        await until(lambda: len(supplier.turns) >= 30)
        ordered = sorted(supplier.turns)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"1,000 pods of a job: a turn takes {ordered[len(ordered) * 99 // 100] * 1e3:.0f} ms (p99 of "
            f"{len(ordered)}), master and launcher {memory:.0f} MiB at most"
        )


# --- the operator ----------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Since the last time."""

    took: list[float]
    """Seconds of each look at a job."""
    resident: int
    """Bytes, now."""
    worked: float
    """Seconds of a processor, in all."""


class Clocked(Operator):
    """Notes how long it looks at each job, all calls to the server with it."""

    took: list[float]

    async def _look(self, key: Key) -> float | None:
        began = time.perf_counter()
        try:
            return await super()._look(key)
        finally:
            self.took.append(time.perf_counter() - began)


def operate(kubeconfig: str, namespace: str, asked: Pipe) -> None:
    """A process of its own, whose memory is the operator's: answers each word with what it has measured since."""
    asyncio.run(_operate(kubeconfig, namespace, asked))


async def _operate(kubeconfig: str, namespace: str, asked: Pipe) -> None:
    async with await Api.connect(kubeconfig=kubeconfig, pace=Pace(QPS, BURST)) as api:
        lease = Lease(api, namespace, "operator", "benchmark")
        one, process = Clocked(api, [namespace], lease, Health("operator")), psutil.Process()
        one.took = []

        def answer() -> None:
            asked.recv()
            times = process.cpu_times()
            asked.send((one.took, process.memory_info().rss, times.user + times.system))
            one.took = []

        asyncio.get_running_loop().add_reader(asked.fileno(), answer)
        await one.run()


@contextlib.contextmanager
def operator(server: Server, client: Client, namespace: str) -> Iterator[Pipe]:
    """In a namespace; the masters' part is played by who uses it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    config = acting(server, client, namespace, "operator", operator_rules())
    arguments = str(config), namespace, theirs
    process = context.Process(target=operate, args=arguments, daemon=True)
    process.start()
    try:
        measured(ours)
        yield ours
    finally:
        process.kill()
        process.join()


def measured(one: Pipe) -> Measured:
    one.send("")
    return Measured(*one.recv())


class Cast:
    """Jobs in a namespace, and what their masters say."""

    def __init__(self, client: Client) -> None:
        self._client, self.namespace = client, f"b{uuid.uuid4().hex[:8]}"
        client.create(f"{CORE}/namespaces", {"metadata": {"name": self.namespace}})
        accounts = f"{CORE}/namespaces/{self.namespace}/serviceaccounts"
        client.create(accounts, {"metadata": {"name": "default"}})
        self._jobs = f"{ELASTICJOBS}/namespaces/{self.namespace}/{PLURAL}"

    def make(self, name: str, replicas: int) -> str:
        spec = {"image": "simulated", "worker": {"replicas": replicas}, "elastic": {"min": 1}}
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name},
            "spec": spec,
        }
        return str(self._client.create(self._jobs, body)["metadata"]["uid"])

    def masters(self) -> int:
        found = self._client.get(
            f"{CORE}/namespaces/{self.namespace}/pods", labelSelector=f"{ROLE_LABEL}=master"
        )
        return len(found["items"])

    def say(self, name: str, step: int, pods: int) -> None:
        now = time.time()
        state = JobState(
            generation=1, attempt=1, state="Running", world_size=pods, round=1,
            workers=Workers(desired=pods, ready=pods), training=Training(step=step, stepped_at=now),
        )  # fmt: skip
        self._client.merge(f"{self._jobs}/{name}/status", {"status": {"job": dump(state)}})

    def pod(self, job: str, uid: str, slot: int) -> None:
        owner = Owner(namespace=self.namespace, name=job, uid=uid)
        body = worker(owner, read({"image": "i"}), New(slot=slot, attempt=0), ())
        self._client.create(f"{CORE}/namespaces/{self.namespace}/pods", body)


def crd(client: Client) -> None:
    client.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", manifest())


def said(one: Pipe, what: str) -> None:
    found = measured(one)
    took = sorted(found.took)
    print(
        f"{what}: a job is looked at in {took[len(took) // 2] * 1e3:.1f} ms (median), "
        f"{took[len(took) * 99 // 100] * 1e3:.0f} ms (p99 of {len(took)}); the operator has "
        f"{found.resident >> 20} MiB and has worked for {found.worked:.1f} s"
    )


async def jobs(server: Server, client: Client) -> None:
    """200 of them, each of whose masters says something every 5 s."""
    cast = Cast(client)
    with operator(server, client, cast.namespace) as one:
        began = time.perf_counter()
        for number in range(JOBS):
            await asyncio.to_thread(cast.make, f"job-{number}", 4)
        made = time.perf_counter() - began
        async with asyncio.timeout(300):
            while await asyncio.to_thread(cast.masters) < JOBS:
                await asyncio.sleep(0.2)
        print(
            f"  {JOBS} jobs made in {made:.1f} s; all have a master after {time.perf_counter() - began:.1f} s"
        )
        said(one, f"{JOBS} jobs begin")
        await train(cast, "jobs begin to train", one, steps=range(1, 3))
        await train(cast, f"{JOBS} jobs train", one, steps=range(3, 9))


async def train(cast: Cast, what: str, one: Pipe, steps: range) -> None:
    """Masters speak one after another, as those of jobs that nobody started together."""
    began = time.perf_counter()
    for word, (step, number) in enumerate(itertools.product(steps, range(JOBS))):
        await asyncio.sleep(max(0.0, word * ROUND / JOBS - (time.perf_counter() - began)))
        await asyncio.to_thread(cast.say, f"job-{number}", step, 4)
    lasted = time.perf_counter() - began
    print(f"  {len(steps) * JOBS} words of masters in {lasted:.1f} s")
    said(one, what)


async def pods(server: Server, client: Client) -> None:
    """One job of a thousand pods."""
    cast = Cast(client)
    with operator(server, client, cast.namespace) as one:
        uid = await asyncio.to_thread(cast.make, "job", PODS_OF_ONE)
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(cast.masters):
                await asyncio.sleep(0.1)
        measured(one)
        for slot in range(PODS_OF_ONE):
            await asyncio.to_thread(cast.pod, "job", uid, slot)
        said(one, f"a job gets {PODS_OF_ONE} pods")
        for step in range(1, 101):
            await asyncio.to_thread(cast.say, "job", step, PODS_OF_ONE)
            await asyncio.sleep(0.1)
        said(one, f"a job of {PODS_OF_ONE} pods trains")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", choices=(*PARTS, []), help="all without any")
    parts = parser.parse_args().part or PARTS
    with tempfile.TemporaryDirectory() as folder, serve_api(Path(folder), assets.find()) as server:
        client = Client(access(server.kubeconfig))
        crd(client)
        for part in parts:
            asyncio.run(
                {"lost": lost, "thousand": thousand, "jobs": jobs, "pods": pods}[part](
                    server, client
                )
            )
        client.close()


if __name__ == "__main__":
    main()

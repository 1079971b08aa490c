"""How fast a job's launcher replaces pods, and what a thousand of them cost, on a real API server.

    python -m benchmarks.kubernetes [lost] [thousand]

No kubelet runs: pods are objects, so what is measured is ours and the server's, not an image's start. The
master is a real one, without agents.
"""

import argparse
import asyncio
import contextlib
import resource
import secrets
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.writes import Writer
from elastic.k8s.launcher import Supplier, Told
from elastic.k8s.placing import Limits
from elastic.k8s.supply import New, Wanted
from elastic.master import events as ev
from elastic.master.main import MasterSettings, serve
from elastic.master.policy import Policy
from elastic.proto.elasticjob import UID_LABEL
from elastic.proto.security import Security
from elastic.supplied import Supplied
from scripts.kubernetes import assets
from scripts.kubernetes.client import CORE, Client, access
from scripts.kubernetes.server import Server
from scripts.kubernetes.server import serve as serve_api

PARTS = ("lost", "thousand")
LOST, OF, TIMES = 30, 32, 5


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

    address = "127." + ".".join(str(1 + secrets.randbelow(253)) for _ in range(3)) + ":29500"
    wanted = Wanted(replicas=replicas, least=2)
    api = await Api.connect(kubeconfig=str(server.kubeconfig))
    with tempfile.TemporaryDirectory() as folder:
        async with api:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", choices=(*PARTS, []), help="all without any")
    parts = parser.parse_args().part or PARTS
    with tempfile.TemporaryDirectory() as folder, serve_api(Path(folder), assets.find()) as server:
        client = Client(access(server.kubeconfig))
        for part in parts:
            asyncio.run({"lost": lost, "thousand": thousand}[part](server, client))
        client.close()


if __name__ == "__main__":
    main()

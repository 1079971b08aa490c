"""The master's launcher on a real API server: a real master in this process, its pods on a test kubelet."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.writes import Writer
from elastic.k8s.launcher import SILENT, Supplier
from elastic.k8s.placing import Limits
from elastic.k8s.spec import Spec
from elastic.k8s.supply import New, Wanted
from elastic.master import events as ev
from elastic.master.main import MasterSettings, serve
from elastic.master.policy import Policy
from elastic.master.state import Job, Result
from elastic.proto import env
from elastic.proto.security import Security
from elastic.supplied import Supplied, policy
from tests.k8s.cluster import Cluster, Namespace
from tests.k8s.operated import DEADLINE, SCRIPT

LABEL = "elastic-runtime.dev/job-uid"


@dataclass
class Running:
    supplier: Supplier
    master: Supplied
    served: "asyncio.Task[Result | None]"
    namespace: Namespace

    @property
    def job(self) -> Job:
        return self.master._there.job

    def names(self) -> list[str]:
        return sorted(found.name for found in self.supplier.pods if found.alive)

    async def until(self, what: str, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not true():
                assert not self.served.done() or true(), f"over before {what}: {self.served}"
                await asyncio.sleep(0.02)

    async def delete(self, *names: str) -> None:
        for name in names:
            path = self.namespace.path("pods", name)
            await asyncio.to_thread(self.namespace.client.delete, path)


def manifest(namespace: Namespace, owner: str, uid: str, pod: str, **spec: Any) -> dict[str, Any]:
    ref = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner, "uid": uid, "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod,
            "namespace": namespace.name,
            "labels": {LABEL: uid},
            "ownerReferences": [ref],
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 20,
            "automountServiceAccountToken": False,
            **spec,
        },
    }


@contextlib.asynccontextmanager
async def supplied(
    namespace: Namespace, folder: Path, wanted: Wanted, command: tuple[str, ...] = ("true",)
) -> AsyncIterator[Running]:
    made = namespace.client.create(namespace.path("configmaps"), {"metadata": {"name": "job"}})
    uid = made["metadata"]["uid"]
    address = "127." + ".".join(str(1 + secrets.randbelow(253)) for _ in range(3)) + ":29500"
    field = {"fieldRef": {"fieldPath": "status.podIP"}}

    def make(new: New, avoid: tuple[str, ...]) -> dict[str, Any]:
        name = f"job-worker-{new.slot}-r{new.attempt}"
        variables = {
            env.POD_JOB: "job",
            env.POD_NAME: name,
            env.POD_MASTER: address,
            env.POD_NODES: f"{wanted.least}:{wanted.replicas}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        listed = [{"name": k, "value": v} for k, v in variables.items()]
        container = {
            "name": "main",
            "image": "local",
            "command": list(command),
            "env": [{"name": "IP", "valueFrom": field}, *listed],
        }
        return manifest(namespace, "job", uid, name, containers=[container])

    decided = Policy(
        min_nodes=wanted.least, max_nodes=wanted.replicas, supplied=True, last_call=0.2,
        preparation=0.0, lease=2.0, drain_timeout=10.0,
    )  # fmt: skip
    async with await Api.connect(kubeconfig=str(namespace.kubeconfig)) as api:
        supplier = Supplier(
            api, Writer(api, manager="elasticjob-master"), namespace=namespace.name, job="job",
            uid=uid, label=LABEL, wanted=wanted, limits=Limits(), make=make,
        )  # fmt: skip
        joined = Supplied(supplier)
        settings = MasterSettings(
            run_id="job", address=address, run_dir=folder / "master", policy=decided,
            security=Security(), job_uid=uid, least_epoch=1 << 16,
        )  # fmt: skip
        watch = asyncio.create_task(supplier.watch())
        served = asyncio.create_task(serve(settings, joined))
        try:
            yield Running(supplier, joined, served, namespace)
        finally:
            if not served.done():
                joined._there.fold(ev.Stopping("the test is over"))
            await asyncio.wait([served], timeout=DEADLINE)
            for task in (served, watch):
                task.cancel()
            await asyncio.wait([served, watch])


def test_thirty_pods_are_lost_at_once(namespace: Namespace, tmp_path: Path) -> None:
    """No kubelet here: pods are objects, and gone when they are deleted."""

    async def body() -> None:
        async with supplied(namespace, tmp_path, Wanted(replicas=32, least=2)) as running:
            await running.until("32 pods", lambda: len(running.names()) == 32)
            before = running.names()
            await running.delete(*before[:30])
            await running.until("30 others", lambda: len(running.names()) == 32)
            names = running.names()
            assert len([n for n in names if n.endswith("-r1")]) == 30
            assert set(before[30:]) <= set(names)
            assert running.job.epoch == 1 << 16
            assert running.job.uid == running.supplier._uid

    asyncio.run(body())


def test_pods_of_others_are_left_alone(namespace: Namespace, tmp_path: Path) -> None:
    """One has our label and no owner, and another a name of ours."""

    async def body() -> None:
        async with supplied(namespace, tmp_path, Wanted(replicas=2, least=1)) as running:
            await running.until("2 pods", lambda: len(running.names()) == 2)
            uid, known = running.supplier._uid, running.supplier._writer.expectations
            assert known.pending(uid, 0.0) == 0, "what is seen is expected no more"
            spec = {"containers": [{"name": "main", "image": "local"}]}
            for name, labels in (("stranger", {LABEL: uid}), ("job-worker-2-r0", {})):
                pod = {"metadata": {"name": name, "labels": labels}, "spec": spec}
                namespace.client.create(namespace.path("pods"), pod)
            running.supplier.wanted = replace(running.supplier.wanted, replicas=3)
            running.supplier.wake()
            await running.until("3 pods", lambda: len(running.names()) == 3)
            assert running.names()[-1] == "job-worker-2-r1"
            running.supplier.makes = False
            await running.supplier.empty()
            assert namespace.find("pods", "stranger") is not None
            assert namespace.find("pods", "job-worker-2-r0") is not None

    asyncio.run(body())


def test_a_quota_is_waited_for_and_what_it_leaves_is_a_world(
    namespace: Namespace, tmp_path: Path
) -> None:
    async def body() -> None:
        namespace.limit(pods="0")
        wanted = Wanted(replicas=3, least=1, refusal=0.0)
        async with supplied(namespace, tmp_path, wanted) as running:
            await running.until("a refusal", lambda: bool(running.supplier.refused))
            assert "quota" in running.supplier.refused
            assert running.names() == []
            assert running.job.policy.max_nodes == 3  # type: ignore[union-attr]
            namespace.limit(pods="2")
            await running.until("a world of 2", lambda: running.job.policy.max_nodes == 2)  # type: ignore[union-attr]
            assert "quota" in running.supplier.refused
            assert len(running.names()) == 2
            quotas = running.supplier._quotas
            await running.until("quotas are watched", lambda: bool(len(quotas)))
            running.supplier._not_before = time.time() + 100 * DEADLINE
            namespace.limit(pods="100")
            await running.until("3 pods", lambda: len(running.names()) == 3)
            assert {n.rpartition("-")[2] for n in running.names()} == {"r0"}
            await running.until("nothing is refused", lambda: not running.supplier.refused)

    asyncio.run(body())


def test_a_silent_agent_is_given_up_sooner_than_its_node_is_suspected() -> None:
    """Row 3: at T+15 s a node that is NotReady is suspect, and its agent decides. Here the agent has by then."""
    assert policy(Spec()).lease + SILENT < 15


@pytest.mark.soak
def test_pods_train_one_is_deleted_and_the_world_is_scaled(
    cluster: Cluster, tmp_path: Path
) -> None:
    script, out, stop = (tmp_path / name for name in ("train.py", "out", "stop"))
    script.write_text(SCRIPT)
    command = (
        "elastic-run", "--nnodes", "9", "--local-addr=$(IP)", "--log-dir", str(tmp_path / "logs"),
        str(script), str(out), str(stop),
    )  # fmt: skip

    def worlds() -> list[str]:
        return out.read_text().split() if out.exists() else []

    async def body() -> None:
        wanted = Wanted(replicas=3, least=1)
        async with supplied(cluster.namespace, tmp_path, wanted, command) as running:
            await running.until("three train", lambda: worlds()[-1:] == ["3"])
            rounds = running.job.last_round
            victim = "job-worker-1-r0"
            await running.delete(victim)
            await running.until("a third pod", lambda: running.job.last_round >= rounds + 2)
            told = len(worlds())
            await running.until("three again", lambda: worlds()[told:][-1:] == ["3"])
            assert "job-worker-1-r1" in running.names()
            assert running.job.last_round == rounds + 2, "one rendezvous a change"
            assert running.job.recovery.faults == 0, "a drain costs nothing"
            rounds = running.job.last_round
            running.supplier.wanted = replace(wanted, replicas=2)
            running.supplier.wake()
            await running.until("two pods", lambda: len(running.names()) == 2)
            await running.until("two train", lambda: worlds()[-1:] == ["2"])
            assert running.job.last_round == rounds + 1
            stop.touch()
            result = await asyncio.wait_for(running.served, DEADLINE)
            assert result is not None
            assert (result.exit_code, result.outcome) == (0, "succeeded")

    asyncio.run(body())


def test_all_workers_end_well_though_the_job_is_not_over(cluster: Cluster, tmp_path: Path) -> None:
    async def body() -> None:
        wanted = Wanted(replicas=2, least=1)
        async with supplied(cluster.namespace, tmp_path, wanted) as running:
            result = await asyncio.wait_for(running.served, DEADLINE)
            assert result is not None
            assert result.exit_code == 1
            assert "does their command start elastic-run?" in result.reason

    asyncio.run(body())

"""A quota that changes: who was refused by it looks again at once, whatever pause it was in. On a real API server, under
the chart's role and the master's own.
"""

import asyncio
from pathlib import Path

import pytest

from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.health import Health
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.kernel.queue import Queue
from elastic.k8s.operator import LEASE, Operator
from scripts.kubernetes.client import Client, access
from scripts.kubernetes.server import account_kubeconfig
from tests.k8s.cluster import Cluster, Namespace
from tests.k8s.operated import ACCOUNT, DEADLINE, Job, allow_operator


async def rests(operator: Operator, job: Job) -> bool:
    """It has looked at what it has written itself, and waits."""
    newest = (await asyncio.to_thread(job.raw))["metadata"]["resourceVersion"]
    seen, queue = operator._jobs[job.space.name].get(job.space.name, job.name), operator._queue
    return seen is not None and seen.version == newest and not len(queue) and not queue._working


@pytest.mark.usefixtures("crd")
def test_a_master_is_made_once_a_quota_has_room(namespace: Namespace, tmp_path: Path) -> None:
    """Its operator pauses for far longer than this test waits after the first refusal."""
    allow_operator(namespace)
    config = tmp_path / "kubeconfig"
    account_kubeconfig(namespace.kubeconfig, namespace.name, ACCOUNT, config)
    namespace.limit(pods="0")
    job = Job(Cluster(namespace=namespace, folder=tmp_path), tmp_path)

    async def body() -> None:
        async with await Api.connect(kubeconfig=str(config)) as api:
            lease = Lease(api, namespace.name, LEASE, "me")
            operator = Operator(api, (namespace.name,), lease, Health("elasticjob_operator"))
            operator._queue = Queue(first=100 * DEADLINE, most=100 * DEADLINE)
            running = asyncio.create_task(operator.run())
            try:
                await asyncio.to_thread(
                    job.wait, "a refusal", lambda: job.status().get("reason") == "QuotaExceeded"
                )
                async with asyncio.timeout(DEADLINE):
                    while not await rests(operator, job):
                        await asyncio.sleep(0.1)
                namespace.limit(pods="100")
                await asyncio.to_thread(job.wait, "its master", lambda: bool(job.names("master")))
            finally:
                running.cancel()
                await asyncio.wait([running])

    asyncio.run(body())
    master = tmp_path / "master.kubeconfig"
    account_kubeconfig(namespace.kubeconfig, namespace.name, f"{job.name}-master", master)
    client = Client(access(master))
    (found,) = client.get(namespace.path("resourcequotas"))["items"]
    client.close()
    assert found["metadata"]["name"] == "quota"

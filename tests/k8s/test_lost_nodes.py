"""Nodes that are lost while pods train on them: a real master, its launcher, a real API server."""

import asyncio
from pathlib import Path

import pytest

from elastic.k8s.supply import Wanted
from scripts.kubernetes.client import CORE
from tests.k8s.cluster import Cluster
from tests.k8s.operated import SCRIPT
from tests.k8s.test_launcher import supplied


@pytest.mark.parametrize(
    "fault",
    ["crash", *(pytest.param(one, marks=pytest.mark.soak) for one in ("frozen", "deleted"))],
)
def test_training_goes_on_and_is_whole_again_elsewhere(
    cluster: Cluster, tmp_path: Path, fault: str
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
            victim = "job-worker-1-r0"
            node = await asyncio.to_thread(cluster.node_of, victim)
            rounds = running.job.last_round
            if fault == "deleted":
                await asyncio.to_thread(cluster.namespace.client.delete, f"{CORE}/nodes/{node}")
            else:
                await asyncio.to_thread(cluster.fault, node, fault)
            replacement = "job-worker-1-r1"
            await running.until("a replacement", lambda: replacement in running.names())
            await running.until("another round", lambda: running.job.last_round > rounds)
            told = len(worlds())
            await running.until("three again", lambda: worlds()[told + 5 :][-1:] == ["3"])
            assert await asyncio.to_thread(cluster.node_of, replacement) != node
            if fault == "frozen":  # who was given up wakes, and changes nothing
                rounds = running.job.last_round
                await asyncio.to_thread(cluster.fault, node, None)
                await asyncio.to_thread(cluster.wait_gone, victim)
                told = len(worlds())
                await running.until("they train on", lambda: len(worlds()) > told + 10)
                assert set(worlds()[told:]) == {"3"}
                assert running.job.last_round == rounds
            stop.touch()
            result = await asyncio.wait_for(running.served, 120)
            assert result is not None
            assert (result.exit_code, result.outcome) == (0, "succeeded")

    asyncio.run(body())

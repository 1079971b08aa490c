"""`elastic-run` in pods as other operators and platforms start them, with their very variables.

Kubeflow's PyTorchJob (release 1.9) and TrainJob (2.x): read in their controllers. The endpoint is
the name of a headless Service of the first replica, as theirs is.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.k8s.cluster import Cluster, Object, free_port

SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("world", dist.get_world_size(), "ranks", int(total), "node", os.environ["GROUP_RANK"])
dist.destroy_process_group()
"""


def pytorchjob(index: int, port: int) -> Mapping[str, str]:
    """With a Master: MASTER_ADDR and so on; the command line reads them."""
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": str(port),
        "PET_MASTER_PORT": str(port),
        "MASTER_ADDR": "job-master-0",
        "PET_MASTER_ADDR": "job-master-0",
        "WORLD_SIZE": "2",
        "RANK": str(index),
        "PET_NODE_RANK": str(index),
        "PET_NPROC_PER_NODE": "1",
        "PET_NNODES": "2",
    }


def elastic_pytorchjob(index: int, port: int) -> Mapping[str, str]:
    """With an elasticPolicy and no Master."""
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": f"job-worker-0:{port}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "2:2",
        "PET_MAX_RESTARTS": "3",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_ID": "job",
    }


def trainjob(index: int, port: int) -> Mapping[str, str]:
    """The second generation; a JobSet behind it."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": str(port),
        "JOB_COMPLETION_INDEX": str(index),
    }


def platform(index: int, port: int) -> Mapping[str, str]:
    """WORLD_SIZE and RANK count nodes, as many a cloud platform has it."""
    return {
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(index),
    }


PASTED = (
    "--nnodes=$(WORLD_SIZE)", "--node_rank=$(RANK)", "--nproc_per_node=1",
    "--master_addr=$(MASTER_ADDR)", "--master_port=$(MASTER_PORT)",
)  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "flags", "service", "subdomain"),
    [
        pytest.param(pytorchjob, PASTED, "job-master-0", "", id="PyTorchJob"),
        pytest.param(elastic_pytorchjob, (), "job-worker-0", "", id="PyTorchJob, elastic"),
        pytest.param(trainjob, (), "job", "job-node-0-0", id="TrainJob", marks=pytest.mark.soak),
        pytest.param(platform, PASTED, "job-master-0", "", id="platform", marks=pytest.mark.soak),
    ],
)
def test_two_nodes_of_somebody_elses_job(
    cluster: Cluster,
    tmp_path: Path,
    variables: Callable[[int, int], Mapping[str, str]],
    flags: Sequence[str],
    service: str,
    subdomain: str,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    spec = {"selector": {"index": "0"}, "clusterIP": "None", "publishNotReadyAddresses": True}
    cluster.namespace.client.create(
        cluster.namespace.path("services"),
        {"metadata": {"name": service}, "spec": {**spec, "ports": [{"port": 1}]}},
    )
    port = free_port()  # theirs are 23456 and 29500
    for index in range(2):
        given = {**variables(index, port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        given["ELASTIC_PRECHECK"] = "off"  # a health check is not what this is about
        env = [{"name": name, "value": value} for name, value in given.items()]
        named: Object = {"hostname": subdomain, "subdomain": service} if subdomain else {}
        cluster.start(
            f"pod-{index}", "elastic-run", *flags, str(script),
            container={"env": env},
            labels={"index": str(index)},
            **(named if index == 0 else {}),
        )  # fmt: skip
    said = []
    for index in range(2):
        cluster.wait_phase(f"pod-{index}", "Succeeded", 120)
        said += [line for line in cluster.log(f"pod-{index}").splitlines() if "world" in line]
    nodes = sorted(line.split("node ")[1] for line in said)
    assert nodes == ["0", "1"]
    assert all("world 2 ranks 2" in line for line in said)

"""Operator and master as two processes, each under its own service account, on a real API server."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.kubernetes import words
from tests.k8s.cluster import Cluster
from tests.k8s.operated import DEADLINE, Job, Operator, operated


@pytest.fixture
def replica(crd: None, cluster: Cluster, tmp_path: Path) -> Iterator[Operator]:
    with operated(cluster.namespace, tmp_path) as one:
        yield one


def test_a_job_from_its_first_pod_to_its_last_word(
    replica: Operator, cluster: Cluster, tmp_path: Path
) -> None:
    """It starts, loses its master's container and goes on in the same round, ends, and is told of."""
    job = Job(cluster, tmp_path)
    job.wait_steps(2)
    job.wait("it says so", lambda: job.holds("Ready") and job.status()["phase"] == "Running")
    before = job.state()
    assert before is not None
    cluster.ask("job-master-r1", words.EXIT, {"exitCode": 137})
    job.wait("that is counted", lambda: job.status()["master"]["restarts"] == 1)
    job.wait_steps(2, 20)
    job.finish()
    job.wait("it is complete", lambda: job.holds("Complete"))
    state, status = job.state(), job.status()
    assert state is not None
    assert (state.round, state.restarts) == (before.round, before.restarts)
    assert (status["phase"], status["reason"]) == ("Succeeded", "Finished")
    pod = cluster.wait_phase("job-master-r1", "Succeeded", DEADLINE)
    words_left = pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    assert json.loads(words_left)["class"] == "Finished"
    assert {"Accepted", "Ready", "Complete"} <= set(job.events())
    assert replica.end() == 0


def test_a_program_that_is_in_no_pod_says_so(cluster: Cluster) -> None:
    cluster.start("lost", sys.executable, "-m", "elastic.job_master")
    pod = cluster.wait_phase("lost", "Failed")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 2
    assert "runs in the master pod of an ElasticJob\n" in cluster.log("lost")

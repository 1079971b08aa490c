"""Operator and master as two processes, each under its own service account, on a real API server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.kubernetes import words
from scripts.kubernetes.client import MERGE, Client, Query
from tests.k8s.cluster import Cluster, Namespace
from tests.k8s.operated import (
    DEADLINE,
    Job,
    Operator,
    allow_operator,
    bury,
    operated,
    start_operator,
)

SAVES = Path(__file__).parents[1] / "e2e" / "harness" / "scripts" / "saves.py"


def steps(folder: Path) -> list[int]:
    """That were done, in order, as the ranks of SAVES tell; only memory has them."""
    told = folder / "told.jsonl"
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    return sorted(line["step"] for line in lines if line["kind"] == "computed")


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
    before = job.wait_state(2)
    cluster.ask("job-master-r1", words.EXIT, {"exitCode": 137})
    job.wait("that is counted", lambda: job.status()["master"]["restarts"] == 1)
    job.wait_steps(2, 20)
    job.finish()
    job.wait("it is complete", lambda: job.holds("Complete"))
    state, status = job.state(), job.status()
    assert state is not None
    assert (state.round, state.restarts) == (before.round, before.restarts), job.evidence()
    assert (status["phase"], status["reason"]) == ("Succeeded", "Finished")
    pod = cluster.wait_phase("job-master-r1", "Succeeded", DEADLINE)
    words_left = pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    assert json.loads(words_left)["class"] == "Finished"
    job.wait("events tell it", lambda: {"Accepted", "Ready", "Complete"} <= {*job.events()})
    assert replica.end() == 0


def test_what_an_edit_takes_away_goes_and_what_a_queue_suspends_is_preempted(
    crd: None, kube: Client, namespace: Namespace, tmp_path: Path
) -> None:
    """Its pods have no nodes here. Kueue is known by its name as a field manager, which its user agent is."""
    with operated(namespace, tmp_path):
        job = Job(Cluster(namespace=namespace, folder=tmp_path), tmp_path)
        budget = "poddisruptionbudgets", "job-worker", "/apis/policy/v1beta1"
        job.wait("it has a budget", lambda: namespace.find(*budget) is not None)
        job.edit(worker={"disruptionBudget": "None"})
        job.wait("it has none", lambda: namespace.find(*budget) is None)
        kueue: Query = {"fieldManager": "kueue"}
        kube.call("PATCH", job.path, {"spec": {"suspend": True}}, kind=MERGE, query=kueue)
        job.wait("it is suspended", lambda: job.holds("Suspended"))
        assert job.condition("Suspended")["reason"] == "Preempted"
        kube.call("PATCH", job.path, {"spec": {"suspend": False}}, kind=MERGE, query=kueue)
        job.wait("it goes on", lambda: job.status()["accepted"]["wanted"] == "Run")
        job.edit(suspend=True)
        job.wait("it is suspended", lambda: job.holds("Suspended"))
        assert job.condition("Suspended")["reason"] == "AsAsked"
        assert job.status()["master"]["restarts"] == 0


def test_a_program_that_is_in_no_pod_says_so(cluster: Cluster) -> None:
    cluster.start("lost", sys.executable, "-m", "elastic.job_master")
    pod = cluster.wait_phase("lost", "Failed")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 2
    assert "runs in the master pod of an ElasticJob\n" in cluster.log("lost")


def test_what_is_wrong_with_a_spec_is_a_condition_and_a_running_job_stays_as_it_was(
    replica: Operator, cluster: Cluster, tmp_path: Path
) -> None:
    """The test server evaluates no CEL: the operator says it."""
    bad = Job(cluster, tmp_path, "bad", elastic={"min": 3, "max": 2})
    bad.wait("it is refused", lambda: bad.condition("Accepted").get("reason") == "InvalidSpec")
    assert "elastic" in bad.condition("Accepted")["message"]
    pod = {
        "containers": [
            {"name": "main", "image": "local", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}
        ]
    }
    shape: dict[str, Any] = {
        "image": None,
        "command": None,
        "env": None,
        "worker": {"replicas": 1, "template": {"spec": pod}},
    }
    odd = Job(cluster, tmp_path, "odd", **shape)
    odd.wait(
        "it is refused", lambda: odd.condition("Accepted").get("reason") == "InvalidPodTemplate"
    )
    assert 'Not found: "x"' in odd.condition("Accepted")["message"]
    assert (bad.pods("master"), odd.pods("master")) == ([], [])
    good = Job(cluster, tmp_path, "good", worker={"replicas": 1})
    good.wait_steps(1)
    good.edit(env=[*good.spec["env"], {"name": "MORE", "value": "1"}])
    good.wait("it is refused", lambda: good.condition("Accepted").get("reason") == "EditRefused")
    assert "while the job is suspended only" in good.condition("Accepted")["message"]
    good.wait_steps(1)
    assert good.names() == ["good-worker-0-r0"]
    good.edit(suspend=True)
    good.wait("it is suspended", lambda: good.holds("Suspended"))
    assert good.names() == []
    good.edit(suspend=False)
    good.wait_steps(1)
    (found,) = good.pods()
    variables = found["spec"]["containers"][0]["env"]
    assert {"name": "MORE", "value": "1"} in variables
    bad.edit(elastic={"min": 1, "max": 2}, suspend=True)
    bad.wait("it is legal now", lambda: bad.holds("Accepted") and bad.holds("Suspended"))
    assert bad.pods("master") == []


@pytest.mark.parametrize(
    "policy", [pytest.param("Background", marks=pytest.mark.soak), "Foreground"]
)
def test_a_deleted_job_saves_first_and_everything_of_it_goes(
    replica: Operator, cluster: Cluster, tmp_path: Path, policy: str
) -> None:
    """In the foreground, the garbage collector ends its pods at once, its master's among them."""
    job = Job(cluster, tmp_path, train=[str(SAVES), str(tmp_path)])
    job.wait("it has done steps", lambda: steps(tmp_path)[-1:] > [5])
    assert list(tmp_path.glob("checkpoint/step-*")) == []
    old = job.raw()["metadata"]["uid"]
    (master,) = job.names("master")
    masters: set[str] = set()

    def is_gone() -> bool:
        masters.update(job.names("master"))
        return not job.raw()

    job.space.client.delete(job.path, propagationPolicy=policy)
    job.wait("it is gone", is_gone)
    assert masters <= {master}, "it needed no other master"
    job.wait("its pods are gone", lambda: not job.names() and not job.names("master"))
    kinds = ("services", "job-master"), ("secrets", "job-token"), ("serviceaccounts", "job-master")
    job.wait("all of it is gone", lambda: all(job.space.find(*one) is None for one in kinds))
    assert "job over: drained: deleted\n" in cluster.log(master, "master")
    (saved,) = tmp_path.glob("checkpoint/step-*")
    assert saved.name == f"step-{steps(tmp_path)[-1]:08}", "its last step is on storage"
    again = Job(cluster, tmp_path / "again", worker={"replicas": 1})
    again.wait_steps(1)
    assert again.raw()["metadata"]["uid"] != old


def test_a_master_whose_pod_is_lost_is_followed_by_another_and_ranks_train_on(
    replica: Operator, cluster: Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path)
    job.wait_steps(2)
    workers = job.names()
    job.space.client.delete(job.space.path("pods", "job-master-r1"), gracePeriodSeconds=0)
    job.wait("another one serves", lambda: (now := job.state()) is not None and now.attempt == 2)
    assert job.names("master") == ["job-master-r2"]
    job.wait_steps(2)
    assert job.names() == workers
    status = job.status()
    assert status["master"]["restarts"] == 1
    assert status["accepted"]["attempt"] == 2
    job.finish()
    job.wait("it is complete", lambda: job.holds("Complete"))


@pytest.mark.soak
def test_an_operator_that_is_killed_twice_changes_no_pod(
    crd: None, cluster: Cluster, tmp_path: Path
) -> None:
    """Each that follows does what was asked for meanwhile, and ranks train on in their round all the while."""
    space = cluster.namespace
    allow_operator(space)
    operator = start_operator(space, tmp_path, "first")
    try:
        job = Job(cluster, tmp_path)
        job.wait_steps(2)
        job.wait("it says so", lambda: job.holds("Ready"))

        def there() -> list[tuple[str, str, str]]:
            """All that pods are: no write of theirs is made without another version."""
            found = [one["metadata"] for one in (*job.pods(), *job.pods("master"))]
            return sorted((one["name"], one["uid"], one["resourceVersion"]) for one in found)

        state, before = job.wait_state(2), there()
        assert len(before) == 3
        budget = "poddisruptionbudgets", "job-worker", "/apis/policy/v1beta1"
        for kept in (False, True):
            operator.kill()
            job.edit(worker={"disruptionBudget": "ProtectMin" if kept else "None"})
            job.wait_steps(2)
            bury(space)
            operator = start_operator(space, tmp_path, f"then-{kept}")
            job.wait("it has looked", lambda: (space.find(*budget) is not None) is kept)  # noqa: B023
            job.wait_steps(2)
            assert there() == before
        now, status = job.state(), job.status()
        assert now is not None
        assert (now.round, now.restarts, now.attempt) == (state.round, state.restarts, 1)
        assert status["master"]["restarts"] == 0
        assert status["observedGeneration"] == job.raw()["metadata"]["generation"]
        job.finish()
        job.wait("it is complete", lambda: job.holds("Complete"))
    finally:
        operator.process.kill()
        operator.process.wait()


def elasticctl(space: Namespace, *words: str) -> str:
    """What it prints; it ends with 0."""
    environ = {**os.environ, "KUBECONFIG": str(space.kubeconfig)}
    done = subprocess.run(
        [sys.executable, "-m", "elastic.ctl", *words],
        env=environ, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


class Submitted(Job):
    """By `elasticctl submit`, which comes back once it trains."""

    def begin(self) -> None:
        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump(self.body()))
        elasticctl(self.space, "submit", "-n", self.space.name, "-f", str(file), "--wait")


def test_a_job_is_led_by_elasticctl_alone(
    replica: Operator, cluster: Cluster, tmp_path: Path
) -> None:
    space = cluster.namespace
    train = [str(SAVES), str(tmp_path)]
    job = Submitted(cluster, tmp_path, train=train, worker={"replicas": 1})
    where = ("-n", space.name)
    assert job.holds("Training")
    told = json.loads(elasticctl(space, "--job", f"{space.name}/job", "-o", "json", "status"))
    assert told["phase"] == "running"
    (listed,) = json.loads(elasticctl(space, "-o", "json", "ls", *where))["items"]
    assert (listed["metadata"]["name"], listed["status"]["phase"]) == ("job", "Running")
    elasticctl(space, "scale", *where, "job", "2", "--wait")
    assert len(job.names()) == 2
    assert job.status()["readyReplicas"] == 2
    elasticctl(space, "suspend", *where, "job", "--wait")
    assert (job.names(), job.status()["phase"]) == ([], "Suspended")
    before = steps(tmp_path)
    elasticctl(space, "resume", *where, "job", "--wait")
    assert job.holds("Training")
    assert steps(tmp_path)[-1] > before[-1], "it does not train yet"
    assert len(job.names()) == 2
    elasticctl(space, "delete", *where, "job", "--wait")
    assert job.raw() == {}
    last = tmp_path / "checkpoint" / f"step-{steps(tmp_path)[-1]:08}"
    assert last.exists(), "its last step is on storage"
    job.wait("its pods are gone", lambda: not job.names() and not job.names("master"))


def wait_failed(job: Job) -> None:
    job.wait("its time is over", lambda: job.holds("Failed"))


def test_deadlines_and_what_is_left_of_a_job(
    replica: Operator, cluster: Cluster, tmp_path: Path
) -> None:
    late = Job(
        cluster, tmp_path, "late", worker={"replicas": 1}, activeDeadlineSeconds=3,
        cleanup={"ttlSecondsAfterFinished": 5},
    )  # fmt: skip
    never = Job(
        cluster, tmp_path, "never", worker={"replicas": 1}, preRunningDeadlineSeconds=3,
        command=["sh", "-c", "trap exit TERM; sleep 1000 & wait"],
    )  # fmt: skip
    for one in (late, never):
        wait_failed(one)
        assert one.condition("Failed")["reason"] == "DeadlineExceeded"
        assert one.status()["phase"] == "Failed"
    assert never.raw()["metadata"]["finalizers"]
    late.wait("it takes itself away", lambda: not late.raw())
    never.wait("its pods end", lambda: not never.names())

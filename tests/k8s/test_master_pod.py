"""A job's master as a pod of its own, under its own service account: it makes the workers, and they train."""

import json
import sys
from pathlib import Path
from typing import Any

from elastic.k8s import belongings, pods
from elastic.k8s.pods import Owner
from elastic.k8s.spec import read
from elastic.proto import elasticjob, schema
from elastic.proto.elasticjob import Accepted, JobState
from scripts.kubernetes import words
from tests.k8s.cluster import RBAC, Cluster
from tests.k8s.test_launcher import DEADLINE, SCRIPT
from tests.waiting import wait_for

GROUP = f"/apis/{elasticjob.GROUP}/{elasticjob.VERSION}"


class Job:
    """An ElasticJob whose operator is played here."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._space = cluster, cluster.namespace
        self._out, self._stop = folder / "out", folder / "stop"
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = ["elastic-run", "--local-addr=$(IP)", f"--log-dir={folder / 'logs'}", str(script)]
        address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        plain = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.spec = {
            "image": "local",
            "command": [*command, str(self._out), str(self._stop)],
            "env": [address, *({"name": name, "value": value} for name, value in plain.items())],
            "nprocPerNode": 1,
            "worker": {"replicas": 2},
            "elastic": {"min": 1, "max": 4, "lastCallSeconds": 0},
            "healthCheck": {"preflight": "Off"},
            "flashCheckpoint": {"drainSeconds": 10},
        }
        body: dict[str, Any] = {"apiVersion": GROUP.removeprefix("/apis/"), "kind": elasticjob.KIND}
        body |= {"metadata": {"name": "job"}, "spec": self.spec}
        made = self._space.client.create(self._space.path(elasticjob.PLURAL, group=GROUP), body)
        self.owner = Owner(namespace=self._space.name, name="job", uid=made["metadata"]["uid"])

    def begin(self) -> None:
        """What the operator makes of it."""
        spec, create = read(self.spec), self._space.client.create
        account, role, binding = belongings.account(self.owner)
        create(self._space.path("serviceaccounts"), account)
        create(self._space.path("roles", group=RBAC), role)
        create(self._space.path("rolebindings", group=RBAC), binding)
        create(self._space.path("secrets"), belongings.token(self.owner, "a-secret"))
        create(self._space.path("services"), belongings.service(self.owner))
        said = Accepted(generation=1, spec=schema.dump(spec))
        path = self._space.path(elasticjob.PLURAL, "job", GROUP)
        self._space.client.merge(f"{path}/status", {"status": {"accepted": schema.dump(said)}})
        self._cluster.create(pods.master(self.owner, spec, 1))

    def worlds(self) -> list[str]:
        """Of each step so far."""
        return self._out.read_text().split() if self._out.exists() else []

    def state(self) -> JobState | None:
        found = self._space.find(elasticjob.PLURAL, "job", GROUP) or {}
        return elasticjob.job_state(found.get("status") or {})

    def wait(self, what: str, true: Any) -> None:
        try:
            wait_for(what, true, DEADLINE)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.state()}\n{self._cluster.logs()}") from error

    def finish(self) -> None:
        self._stop.touch()


def test_a_master_in_its_pod_gives_a_job_its_workers_and_comes_back(
    crd: None, cluster: Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path)
    job.begin()
    job.wait("two train", lambda: job.worlds()[-1:] == ["2"])
    job.wait("it says so", lambda: (now := job.state()) is not None and now.world_size == 2)
    before = job.state()
    assert before is not None
    cluster.ask("job-master-r1", words.EXIT, {"exitCode": 137})
    job.wait(
        "the master is started again",
        lambda: (
            (cluster.pod("job-master-r1") or {})["status"]["containerStatuses"][0]["restartCount"]
            == 1
        ),
    )
    told = len(job.worlds())
    job.wait("they train on", lambda: len(job.worlds()) > told + 20)
    job.finish()
    pod = cluster.wait_phase("job-master-r1", "Succeeded", DEADLINE)
    last = job.state()
    assert last is not None
    assert (last.state, last.outcome) == ("Ended", "Succeeded"), cluster.logs()
    assert (last.round, last.restarts) == (before.round, before.restarts), cluster.logs()
    words_left = pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    assert json.loads(words_left)["class"] == "Finished"
    for slot in (0, 1):
        cluster.wait_phase(f"job-worker-{slot}-r0", "Succeeded")


def test_a_program_that_is_in_no_pod_says_so(cluster: Cluster) -> None:
    cluster.start("lost", sys.executable, "-m", "elastic.job_master")
    pod = cluster.wait_phase("lost", "Failed")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 2
    assert "runs in the master pod of an ElasticJob\n" in cluster.log("lost")

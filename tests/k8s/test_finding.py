"""`elasticctl --job`: the master of an ElasticJob, found through a real API server and asked for real."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.k8s.resources import ELASTICJOBS
from elastic.proto import job_folder
from tests.k8s.cluster import Namespace
from tests.waiting import wait_for

pytestmark = pytest.mark.xdist_group("kubernetes")
GROUP = f"/apis/{ELASTICJOBS.api_version}"
TOKEN = "tell-nobody"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[job_folder.MasterNote]:
    """A job of one rank, whose master stands for the one in a pod."""
    script, base = tmp_path / "script.py", tmp_path / "state"
    script.write_text("import sys\nsys.stdin.read()\n")
    base.mkdir()
    command = [sys.executable, "-m", "elastic.run", "--standalone", "--state-dir", str(base)]
    environ = {**os.environ, "ELASTIC_JOB_TOKEN": TOKEN}
    with subprocess.Popen(
        [*command, str(script)], stdin=subprocess.PIPE, env=environ, stderr=subprocess.DEVNULL
    ) as job:
        try:
            wait_for("the master", lambda: _note(base) is not None)
            note = _note(base)
            assert note is not None
            yield note
        finally:
            job.terminate()
            job.wait(120)


def _note(base: Path) -> job_folder.MasterNote | None:
    folder = job_folder.find_newest(base)
    return job_folder.read_note(folder) if folder else None


def ctl(space: Namespace, *words: str) -> tuple[int, str, str]:
    environ = {**os.environ, "KUBECONFIG": str(space.kubeconfig)}
    command = [sys.executable, "-m", "elastic.ctl", "--job", f"{space.name}/demo", *words]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    return done.returncode, done.stdout, done.stderr


def make(space: Namespace, port: int, *, foreign: bool = False) -> None:
    """What the operator makes: a Service that chooses the master's pod; and its token's Secret."""
    kube = space.client
    container = {"name": "main", "image": "x"}
    template = {"spec": {"containers": [container]}}
    job = {
        "apiVersion": ELASTICJOBS.api_version,
        "kind": ELASTICJOBS.kind,
        "metadata": {"name": "demo"},
        "spec": {"worker": {"replicas": 1, "template": template}},
    }
    uid = kube.create(space.path("elasticjobs", group=GROUP), job)["metadata"]["uid"]
    ports = [{"port": port}]
    service = {
        "metadata": {"name": "demo-master"},
        "spec": {"selector": {"role": "master"}, "ports": ports, "clusterIP": "None"},
    }
    kube.create(space.path("services"), service)
    secret = {"metadata": {"name": "demo-token"}, "stringData": {"token": TOKEN}}
    kube.create(space.path("secrets"), secret)
    chosen = {"secretKeyRef": {"name": "demo-token", "key": "token"}}
    owner = {
        "apiVersion": ELASTICJOBS.api_version,
        "kind": ELASTICJOBS.kind,
        "name": "demo",
        "uid": "another" if foreign else uid,
        "controller": True,
    }
    env = [{"name": "ELASTIC_JOB_TOKEN", "valueFrom": chosen}]
    pod: dict[str, Any] = {
        "metadata": {
            "name": "demo-master-r1",
            "labels": {"role": "master"},
            "ownerReferences": [owner],
        },
        "spec": {
            "containers": [{**container, "env": env}],
            "automountServiceAccountToken": False,
        },
    }
    kube.create(space.path("pods"), pod)
    status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
    kube.merge(space.path("pods", "demo-master-r1/status"), {"status": status})


def test_a_job_is_found_by_its_name(
    crd: None, namespace: Namespace, running: job_folder.MasterNote
) -> None:
    make(namespace, int(running.address.rpartition(":")[2]))
    code, out, err = ctl(namespace, "-o", "json", "status")
    assert (code, err) == (0, "")
    assert json.loads(out)["phase"] in ("forming", "running")
    code, out, err = ctl(namespace, "events")
    assert code == 0, err
    assert "KIND" in out


def test_a_pod_of_anothers_that_carries_our_labels_is_not_asked(
    crd: None, namespace: Namespace, running: job_folder.MasterNote
) -> None:
    make(namespace, int(running.address.rpartition(":")[2]), foreign=True)
    code, _, err = ctl(namespace, "status")
    assert code == 1
    assert "job demo has no master that runs now" in err


def test_a_master_out_of_reach_is_told_with_the_way_there(crd: None, namespace: Namespace) -> None:
    make(namespace, 9)
    code, _, err = ctl(namespace, "status")
    assert code == 1
    assert f"kubectl -n {namespace.name} port-forward pod/demo-master-r1 9" in err


def test_a_job_that_is_not_there_is_named(crd: None, namespace: Namespace) -> None:
    code, _, err = ctl(namespace, "status")
    assert code == 1
    assert f'"demo" not found in namespace {namespace.name}' in err

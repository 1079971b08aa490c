"""Jobs that lack something: the server's own words come into their status, and what is mended is tried again."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from elastic.proto.elasticjob import JOB_LABEL
from scripts.kubernetes.client import Client
from tests.k8s.cluster import Cluster, Namespace
from tests.k8s.operated import Job, operated

HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}


def fail_for(kube: Client, job: str) -> str:
    """A webhook that nobody serves, asked about the pods of one job; its path."""
    client = {"url": "https://127.0.0.1:1/"}
    hook = {
        "name": "hook.example.com", "clientConfig": client, "rules": [PODS], "failurePolicy": "Fail",
        "sideEffects": "None", "admissionReviewVersions": ["v1"],
        "objectSelector": {"matchLabels": {JOB_LABEL: job}},
    }  # fmt: skip
    kube.create(HOOKS, {"metadata": {"name": job}, "webhooks": [hook]})
    return f"{HOOKS}/{job}"


@pytest.mark.usefixtures("crd")
def test_whatever_is_refused_is_told(kube: Client, namespace: Namespace, tmp_path: Path) -> None:
    cluster = Cluster(namespace=namespace, folder=tmp_path)
    hooked = f"hooked-{uuid.uuid4().hex[:8]}"
    hook = fail_for(kube, hooked)
    theirs = namespace.path("services", "taken-master")
    port = {"ports": [{"port": 1}]}
    namespace.client.create(
        namespace.path("services"), {"metadata": {"name": "taken-master"}, "spec": port}
    )
    cluster.start("plain-check")  # has the name of a pod that is asked about
    namespace.limit(pods="0")
    with operated(namespace, tmp_path):
        gang = {"gang": {"provider": "Volcano"}}
        specs: dict[str, dict[str, Any]] = {
            "gang": {"scheduling": gang}, "taken": {}, "plain": {}, hooked: {},
            "odd": {"master": {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}},
        }  # fmt: skip
        jobs = {name: Job(cluster, tmp_path, name, **spec) for name, spec in specs.items()}

        def wait_told(name: str, reason: str, words: str) -> None:
            job = jobs[name]
            job.wait(f"{name} is {reason}", lambda: job.status().get("reason") == reason)
            assert words in job.status()["message"]

        wait_told(
            "gang", "NotCreated", "no PodGroup of scheduling.volcano.sh/v1beta1 is known here"
        )
        wait_told("taken", "NotCreated", 'services "taken-master" already exists')
        wait_told(hooked, "Checking", "failed calling webhook")
        wait_told("odd", "PodRefused", "must be less than or equal to cpu limit")
        wait_told("plain", "QuotaExceeded", "exceeded quota")
        plain = jobs["plain"]
        plain.wait("its events are", lambda: {"Accepted", "QuotaExceeded"} <= set(plain.events()))
        assert [one.status().get("accepted") for one in (jobs["gang"], jobs["taken"])] == [None] * 2
        kube.delete(hook)
        namespace.client.delete(theirs)
        for name in (hooked, "taken"):
            touched = {"metadata": {"annotations": {"touched": "yes"}}}
            namespace.client.merge(jobs[name].path, touched)  # sooner than after its pause
            wait_told(name, "QuotaExceeded", "exceeded quota")
        later = {"status": {"accepted": {"format": 2}}}
        namespace.client.merge(f"{plain.path}/status", later)
        wait_told("plain", "StatusUnreadable", "status.accepted has format 2")
        assert plain.status()["accepted"]["spec"]["worker"]["replicas"] == 2
        assert plain.condition("Accepted")["status"] == "Unknown"
        namespace.client.delete(plain.path)
        plain.wait("it is let go", lambda: not plain.raw())

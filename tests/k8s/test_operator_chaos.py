"""An operator that is killed at any moment, and two of them: what there is in the end is what there should be."""

import random
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import urllib3

from elastic.proto import elasticjob
from scripts.kubernetes.accounts import RBAC
from scripts.kubernetes.client import CORE
from tests.k8s.cluster import Cluster, Namespace
from tests.k8s.operated import GROUP, Operator, allow_operator, bury, start_operator
from tests.waiting import wait_for

LEADS = "this process leads"
SPEC = {
    "image": "simulated", "worker": {"replicas": 2}, "elastic": {"min": 1, "max": 4},
    "flashCheckpoint": {"drainSeconds": 1},
}  # fmt: skip
"""Of jobs whose pods run nowhere: what operators do is what is looked at."""
ACTS = ("create", "scale", "suspend", "resume", "lose", "delete")
KILLS = 12


class Jobs:
    """What people do to jobs, and what should come of it."""

    def __init__(self, space: Namespace, seed: int) -> None:
        self._space, self._random = space, random.Random(seed)
        self.wanted: dict[str, bool] = {}
        """By name: whether it is to run."""
        self._made = 0

    def act(self) -> None:
        live = sorted(self.wanted)
        what = self._random.choice(ACTS if live else ACTS[:1])
        name = self._random.choice(live) if live and what != "create" else f"job-{self._made}"
        path = self._space.path(elasticjob.PLURAL, name, GROUP)
        client = self._space.client
        if what == "create":
            self._made += 1
            version = GROUP.removeprefix("/apis/")
            body = {"apiVersion": version, "kind": elasticjob.KIND, "metadata": {"name": name}}
            client.create(self._space.path(elasticjob.PLURAL, group=GROUP), {**body, "spec": SPEC})
            self.wanted[name] = True
        elif what == "scale":
            client.merge(f"{path}/scale", {"spec": {"replicas": self._random.randint(1, 4)}})
        elif what in ("suspend", "resume"):
            client.merge(path, {"spec": {"suspend": what == "suspend"}})
            self.wanted[name] = what == "resume"
        elif what == "lose":
            for pod in self.masters(name):
                client.delete(self._space.path("pods", pod), gracePeriodSeconds=0)
        else:
            client.delete(path)
            del self.wanted[name]

    def jobs(self) -> dict[str, dict[str, Any]]:
        found = self._space.client.get(self._space.path(elasticjob.PLURAL, group=GROUP))["items"]
        return {one["metadata"]["name"]: one for one in found}

    def masters(self, name: str) -> list[str]:
        return [
            one["metadata"]["name"]
            for one in self._pods()
            if one["metadata"]["labels"].get(elasticjob.JOB_LABEL) == name
            and not one["metadata"].get("deletionTimestamp")
        ]

    def _pods(self) -> list[dict[str, Any]]:
        return list(self._space.client.get(self._space.path("pods"))["items"])

    def wrong(self) -> str:
        """The first thing that is not as it should be; empty: all is."""
        jobs = self.jobs()
        if set(jobs) != set(self.wanted):
            return f"jobs are {sorted(jobs)}, not {sorted(self.wanted)}"
        for name, runs in self.wanted.items():
            status = jobs[name].get("status") or {}
            accepted = status.get("accepted") or {}
            if status.get("observedGeneration") != jobs[name]["metadata"]["generation"]:
                return f"{name}: its spec is not looked at"
            if accepted.get("wanted") != ("Run" if runs else "Suspend"):
                return f"{name} is to be {accepted.get('wanted')}"
            if elasticjob.FINALIZER not in jobs[name]["metadata"].get("finalizers", ()):
                return f"{name} has no finalizer"
            found, pod = self.masters(name), status.get("master", {}).get("pod")
            if runs and found != [pod]:
                return f"{name} has the masters {found}, not {pod}"
            if runs and (lacking := self._lacking(name, jobs[name]["metadata"]["uid"])):
                return f"{name} has no {lacking}"
        owners = Counter(
            one["metadata"]["labels"].get(elasticjob.JOB_LABEL) for one in self._pods()
            if not one["metadata"].get("deletionTimestamp")
        )  # fmt: skip
        return f"pods of nobody: {owners}" if set(owners) - set(self.wanted) else ""

    def _lacking(self, name: str, uid: str) -> str:
        """What a job that runs should have, and has not, or of another."""
        master = f"{name}-master"
        for group, plural, thing in (
            (CORE, "services", master), (CORE, "secrets", f"{name}-token"), (CORE, "serviceaccounts", master),
            (RBAC, "roles", master), (RBAC, "rolebindings", master),
        ):  # fmt: skip
            found = self._space.find(plural, thing, group)
            if found is None or [one["uid"] for one in found["metadata"]["ownerReferences"]] != [
                uid
            ]:
                return f"{plural}/{thing}"
        return ""


def settled(jobs: Jobs) -> None:
    try:
        wait_for("all is as it should be", lambda: not jobs.wrong(), 120)
    except AssertionError as error:
        raise AssertionError(f"{error}: {jobs.wrong()}") from error


def leads(replica: Operator) -> bool:
    return LEADS in replica.log.read_text()


def kill_and_act(space: Namespace, folder: Path, kills: int, seed: int) -> None:
    """Most of the operators die while they work: as soon as one leads, there is something to do, and half a second
    is as long as it takes. Some die before."""
    jobs, chance, pause = Jobs(space, seed), random.Random(seed), threading.Event()
    for life in range(kills):
        for _ in range(chance.randint(0, 2)):
            jobs.act()
        replica = start_operator(space, folder, f"life-{life}")
        if chance.random() < 0.9:
            wait_for("it leads", lambda: leads(replica), 60)  # noqa: B023
            for _ in range(chance.randint(0, 2)):
                jobs.act()
        pause.wait(chance.uniform(0.0, 0.5))
        replica.kill()
        bury(space)
    replica = start_operator(space, folder, "last")
    try:
        settled(jobs)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n{replica.log.read_text()}") from error
    finally:
        replica.kill()


def test_an_operator_is_killed_at_random_moments(
    crd: None, cluster: Cluster, tmp_path: Path
) -> None:
    allow_operator(cluster.namespace)
    kill_and_act(cluster.namespace, tmp_path, KILLS, random.randrange(1 << 30))


@pytest.mark.soak
def test_an_operator_is_killed_a_hundred_times(crd: None, cluster: Cluster, tmp_path: Path) -> None:
    allow_operator(cluster.namespace)
    kill_and_act(cluster.namespace, tmp_path, 100, random.randrange(1 << 30))


def looked(replica: Operator) -> int:
    """How many jobs a replica has looked at, by its own metrics: it writes nowhere else."""
    (port,) = re.findall(r"health on 127\.0\.0\.1:(\d+)", replica.log.read_text())
    text = urllib3.request("GET", f"http://127.0.0.1:{port}/metrics").data.decode()
    (count,) = re.findall(r"reconcile_duration_seconds_count (\d+)", text)
    return int(count)


@pytest.mark.soak
def test_two_operators_at_once_are_one(crd: None, cluster: Cluster, tmp_path: Path) -> None:
    """One works, and the other looks at nothing; it is killed, and the other takes over once its lease is over."""
    space = cluster.namespace
    allow_operator(space)
    both = [start_operator(space, tmp_path, name) for name in ("first", "second")]
    jobs = Jobs(space, 1)
    try:
        wait_for("one leads", lambda: any(leads(one) for one in both))
        for _ in range(8):
            jobs.act()
        settled(jobs)
        (first,), (second,) = (
            [one for one in both if leads(one) is whether] for whether in (True, False)
        )
        wait_for("the other is there", lambda: "health on" in second.log.read_text())
        assert looked(first) > 0
        assert looked(second) == 0
        first.kill()
        for _ in range(4):
            jobs.act()
        settled(jobs)
        assert leads(second)
    finally:
        for one in both:
            one.process.kill()
            one.process.wait()

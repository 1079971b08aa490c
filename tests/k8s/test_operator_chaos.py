"""An operator that is killed at any moment, and two of them: what there is in the end is what there should be."""

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from elastic.proto import elasticjob
from tests.k8s.cluster import Cluster, Namespace
from tests.k8s.operated import GROUP, allow_operator, start_operator
from tests.waiting import wait_for

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
            things = ("services", f"{name}-master"), ("secrets", f"{name}-token")
            for plural, thing in (*things, ("serviceaccounts", f"{name}-master")):
                if runs and self._space.find(plural, thing) is None:
                    return f"{name} has no {thing}"
        owners = Counter(
            one["metadata"]["labels"].get(elasticjob.JOB_LABEL) for one in self._pods()
            if not one["metadata"].get("deletionTimestamp")
        )  # fmt: skip
        return f"pods of nobody: {owners}" if set(owners) - set(self.wanted) else ""


def settled(jobs: Jobs) -> None:
    try:
        wait_for("all is as it should be", lambda: not jobs.wrong(), 120)
    except AssertionError as error:
        raise AssertionError(f"{error}: {jobs.wrong()}") from error


def kill_and_act(space: Namespace, folder: Path, kills: int, seed: int) -> None:
    """Acts go on all the while; each operator lives for up to two seconds, most of them less than it takes to start."""
    jobs, chance, pause = Jobs(space, seed), random.Random(seed), threading.Event()
    for _ in range(kills):
        replica = start_operator(space, folder)
        for _ in range(chance.randint(0, 3)):
            jobs.act()
        pause.wait(chance.uniform(0.5, 4.0))
        replica.kill()
    replica = start_operator(space, folder)
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


def test_two_operators_at_once_are_one(crd: None, cluster: Cluster, tmp_path: Path) -> None:
    """One works; it is killed, and the other takes over once its lease is over."""
    space = cluster.namespace
    allow_operator(space)
    first, second = (start_operator(space, tmp_path, name) for name in ("first", "second"))
    jobs = Jobs(space, 1)
    try:
        for _ in range(4):
            jobs.act()
        settled(jobs)
        leads = [one for one in (first, second) if "this process leads" in one.log.read_text()]
        assert len(leads) == 1, "one of them alone has the lease"
        leads[0].kill()
        for _ in range(3):
            jobs.act()
        settled(jobs)
    finally:
        for one in (first, second):
            one.process.kill()
            one.process.wait()

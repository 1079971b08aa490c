"""The master's program on a real API server: it serves by `status.accepted`, and says what is in `status.job`."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from elastic import job_master
from elastic.job_master import JobMaster, _beside
from elastic.job_place import Place
from elastic.k8s.kernel.api import Api
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.spec import Spec
from elastic.k8s.supply import New
from elastic.proto import elasticjob, ending, env, job_folder, schema
from elastic.proto.elasticjob import Accepted, JobState, Workers
from elastic.proto.ending import Ended
from elastic.proto.errors import ProtocolMismatch
from elastic.proto.security import Security
from tests.k8s.cluster import Cluster, Namespace
from tests.k8s.fake.server import Server, serve
from tests.k8s.operated import DEADLINE, SCRIPT

GROUP = f"/apis/{elasticjob.GROUP}/{elasticjob.VERSION}"


@dataclass
class Running:
    """One ElasticJob; the operator's part is played here."""

    namespace: Namespace
    folder: Path
    api: Api
    command: tuple[str, ...]
    uid: str = ""
    address: str = field(
        default_factory=lambda: (
            "127." + ".".join(str(1 + secrets.randbelow(253)) for _ in range(3)) + ":29500"
        )
    )
    task: "asyncio.Task[JobState | None] | None" = None

    def accept(self, wanted: str, attempt: int = 1, master: str = "") -> None:
        spec = {"image": "local", "worker": {"replicas": 2}, "elastic": {"min": 1, "max": 4, "lastCallSeconds": 0}}  # fmt: skip
        spec["healthCheck"] = {"preflight": "Off"}
        said = Accepted(generation=1, spec=spec, wanted=wanted, attempt=attempt, master=master)  # type: ignore[arg-type]
        path = self.namespace.path(elasticjob.PLURAL, "job", GROUP)
        self.namespace.client.merge(f"{path}/status", {"status": {"accepted": schema.dump(said)}})

    def said(self) -> JobState | None:
        found = self.namespace.find(elasticjob.PLURAL, "job", GROUP) or {}
        return elasticjob.job_state(found.get("status") or {})

    def pods(self) -> list[str]:
        found = self.namespace.client.get(self.namespace.path("pods"))["items"]
        return sorted(p["metadata"]["name"] for p in found)

    def make(self, uid: str, spec: Spec, new: New, avoid: tuple[str, ...]) -> dict[str, Any]:
        name = f"job-worker-{new.slot}-r{new.attempt}"
        variables = {
            env.POD_JOB: "job", env.POD_NAME: name, env.POD_MASTER: self.address,
            env.POD_NODES: f"{spec.least}:{spec.most}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        owner = {
            "apiVersion": f"{elasticjob.GROUP}/{elasticjob.VERSION}", "kind": elasticjob.KIND, "name": "job",
            "uid": uid, "controller": True,
        }  # fmt: skip
        address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        container = {
            "name": "main", "image": spec.image, "command": list(self.command),
            "env": [address, *({"name": k, "value": v} for k, v in variables.items())],
        }  # fmt: skip
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name, "namespace": self.namespace.name, "labels": {elasticjob.UID_LABEL: uid},
                "ownerReferences": [owner],
            },
            "spec": {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": 20,
                "automountServiceAccountToken": False, "containers": [container],
            },
        }  # fmt: skip

    def place(self, pod: str) -> Place:
        return Place(
            namespace=self.namespace.name,
            name="job",
            folder=self.folder / "master",
            address=self.address,
            pod=pod,
        )

    def begin(self, pod: str = "") -> None:
        master = JobMaster(self.api, self.place(pod), Security(), self.make)
        self.task = asyncio.create_task(master.run())

    async def until(self, what: str, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not await asyncio.to_thread(true):
                assert self.task is None or not self.task.done() or true(), f"{what}: {self.task}"
                await asyncio.sleep(0.05)

    async def until_state(self, state: str) -> None:
        await self.until(state, lambda: (said := self.said()) is not None and said.state == state)


@contextlib.asynccontextmanager
async def job(
    namespace: Namespace, folder: Path, command: tuple[str, ...] = ("true",)
) -> AsyncIterator[Running]:
    body = {"apiVersion": f"{elasticjob.GROUP}/{elasticjob.VERSION}", "kind": elasticjob.KIND}
    body |= {"metadata": {"name": "job"}, "spec": {"image": "local"}}  # type: ignore[dict-item]
    made = namespace.client.create(namespace.path(elasticjob.PLURAL, group=GROUP), body)
    async with await Api.connect(kubeconfig=str(namespace.kubeconfig)) as api:
        running = Running(namespace, folder, api, command, uid=made["metadata"]["uid"])
        try:
            yield running
        finally:
            if running.task is not None and not running.task.done():
                await asyncio.to_thread(running.accept, "Stop", 99)
                await asyncio.wait([running.task], timeout=60)
                running.task.cancel()
                await asyncio.wait([running.task])


class Training:
    """Its pods' command, and what their ranks write."""

    def __init__(self, folder: Path) -> None:
        script, self._out, self.stop = (folder / name for name in ("train.py", "out", "stop"))
        script.write_text(SCRIPT)
        self.command = (
            "elastic-run", "--local-addr=$(IP)", "--log-dir", str(folder / "logs"), str(script), str(self._out),
            str(self.stop),
        )  # fmt: skip

    def worlds(self) -> list[str]:
        """Of each step so far."""
        return self._out.read_text().split() if self._out.exists() else []


@pytest.mark.usefixtures("crd")
def test_a_job_is_suspended_goes_on_and_ends(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(tmp_path)
    worlds = training.worlds

    async def body() -> None:
        async with job(cluster.namespace, tmp_path, training.command) as running:
            running.begin()
            await asyncio.to_thread(running.accept, "Run")
            await running.until("two train", lambda: worlds()[-1:] == ["2"])
            await running.until_state("Running")
            await asyncio.to_thread(running.accept, "Suspend")
            await running.until_state("Suspended")
            assert running.pods() == []
            told = len(worlds())
            await asyncio.to_thread(running.accept, "Run", 2)
            await running.until("they train again", lambda: worlds()[told:][-1:] == ["2"])
            said = running.said()
            assert said is not None
            assert said.attempt == 2
            assert running.task is not None
            os.kill(os.getpid(), signal.SIGTERM)  # and its pod is gone, with the journal
            await asyncio.wait_for(running.task, DEADLINE)
            running.folder = tmp_path / "another"
            await asyncio.to_thread(running.accept, "Suspend", 3)
            running.begin()
            await running.until_state("Suspended")
            report = (running.folder / "master" / job_folder.REPORT).read_text()
            assert "drained: suspended" in report, "ranks had a master to save with"
            assert running.pods() == []
            said = running.said()
            assert said is not None
            os.kill(
                os.getpid(), signal.SIGTERM
            )  # and again, with nobody left who knows of its rounds
            await asyncio.wait_for(running.task, DEADLINE)
            running.folder = tmp_path / "a third"
            told = len(worlds())
            await asyncio.to_thread(running.accept, "Run", 4)
            running.begin()
            await running.until("they train at last", lambda: worlds()[told:][-1:] == ["2"])
            training.stop.touch()
            assert running.task is not None
            last = await asyncio.wait_for(running.task, DEADLINE)
            assert last is not None
            assert (last.state, last.outcome, last.reason) == ("Ended", "Succeeded", "Finished")
            assert running.said() == last
            assert last.round > said.round > 0

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_a_master_that_comes_back_to_a_suspend_has_its_ranks_save(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its journal is there: the claim's, or it was started anew in its pod."""
    training = Training(tmp_path)

    async def body() -> None:
        async with job(cluster.namespace, tmp_path, training.command) as running:
            running.begin()
            await asyncio.to_thread(running.accept, "Run")
            await running.until("two train", lambda: training.worlds()[-1:] == ["2"])
            await running.until_state("Running")
            os.kill(os.getpid(), signal.SIGTERM)
            assert running.task is not None
            await asyncio.wait_for(running.task, DEADLINE)
            await asyncio.to_thread(running.accept, "Suspend")
            running.begin()
            await running.until_state("Suspended")
            report = (running.folder / "master" / job_folder.REPORT).read_text()
            assert "drained: suspended" in report, "ranks had a master to save with"
            assert running.pods() == []
            told = len(training.worlds())
            await asyncio.to_thread(running.accept, "Run", 2)
            await running.until_state("Starting")
            await running.until("they train", lambda: training.worlds()[told:][-1:] == ["2"])
            await running.until_state("Running")

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_pods_without_an_agent_hold_no_suspend(cluster: Cluster, tmp_path: Path) -> None:
    async def body() -> None:
        async with job(cluster.namespace, tmp_path, ("sleep", "1000")) as running:
            await asyncio.to_thread(running.accept, "Run")
            running.begin()
            await running.until("2 pods", lambda: len(running.pods()) == 2)
            await asyncio.to_thread(running.accept, "Suspend")
            await running.until_state("Suspended")
            assert running.pods() == []
            assert (said := running.said()) is not None
            assert said.workers == Workers()
            assert running.task is not None
            os.kill(os.getpid(), signal.SIGTERM)  # it served, and rests by now
            assert await asyncio.wait_for(running.task, DEADLINE) is None
            await asyncio.to_thread(running.accept, "Stop")
            running.begin()
            last = await asyncio.wait_for(running.task, DEADLINE)
            assert last is not None
            assert (last.state, last.outcome) == ("Ended", "Stopped")

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_one_that_is_superseded_goes_and_touches_nothing(
    namespace: Namespace, tmp_path: Path
) -> None:
    async def body() -> None:
        async with job(namespace, tmp_path) as running:
            await asyncio.to_thread(running.accept, "Run")
            running.begin()
            await running.until("2 pods", lambda: len(running.pods()) == 2)
            await asyncio.to_thread(running.accept, "Run", 2)
            assert running.task is not None
            assert await asyncio.wait_for(running.task, DEADLINE) is None
            assert len(running.pods()) == 2
            said = running.said()
            assert said is not None
            assert said.attempt == 1

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
@pytest.mark.parametrize("journal", [True, False], ids=["same pod", "another pod"])
def test_a_master_that_starts_anew_between_two_ends_by_want_of_memory_counts_both(
    namespace: Namespace, tmp_path: Path, journal: bool
) -> None:
    """No kubelet here: what it would say of pods is written by hand."""

    def ends(name: str) -> None:
        ended = {"exitCode": 137, "reason": "OOMKilled"}
        main = {
            "name": "main", "image": "local", "imageID": "", "ready": False, "restartCount": 0,
            "state": {"terminated": ended},
        }  # fmt: skip
        status = {"status": {"phase": "Failed", "containerStatuses": [main]}}
        namespace.client.merge(namespace.path("pods", name) + "/status", status)

    async def body() -> None:
        async with job(namespace, tmp_path) as running:
            await asyncio.to_thread(running.accept, "Run")
            running.begin()
            first, second = "job-worker-0-r0", "job-worker-0-r1"
            await running.until("2 pods", lambda: len(running.pods()) == 2)
            await asyncio.to_thread(ends, first)
            await running.until(
                "it is remembered",
                lambda: (
                    second in running.pods()
                    and (said := running.said()) is not None
                    and len(said.remembered.slots) == 1
                ),
            )
            assert running.task is not None
            os.kill(os.getpid(), signal.SIGTERM)  # as its kubelet does
            await asyncio.wait_for(running.task, DEADLINE)
            namespace.client.delete(namespace.path("pods", first), gracePeriodSeconds=0)
            if not journal:
                running.folder = tmp_path / "another"
                await asyncio.to_thread(running.accept, "Run", 2)
            running.begin()
            await asyncio.to_thread(ends, second)
            last = await asyncio.wait_for(running.task, DEADLINE)
            assert last is not None
            assert (last.outcome, last.reason) == ("Failed", "OOMKilled")
            assert "again" in last.message
            assert [one.pod for one in last.last_failures] == [first, second]

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_only_the_master_that_is_named_serves(namespace: Namespace, tmp_path: Path) -> None:
    """One that rests, and one that comes too late, leave their successor its attempt."""

    async def body() -> None:
        async with job(namespace, tmp_path) as running:
            await asyncio.to_thread(running.accept, "Suspend", 1, "job-master-r1")
            running.begin("job-master-r1")
            await running.until_state("Suspended")
            await asyncio.to_thread(running.accept, "Run", 2, "job-master-r2")
            assert running.task is not None
            assert await asyncio.wait_for(running.task, DEADLINE) is None
            running.begin("job-master-r1")
            assert await asyncio.wait_for(running.task, DEADLINE) is None
            said = running.said()
            assert said is not None
            assert (said.attempt, said.state, running.pods()) == (1, "Suspended", [])
            running.begin("job-master-r2")
            await running.until("2 pods", lambda: len(running.pods()) == 2)

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_one_that_rests_goes_when_it_is_told_to(namespace: Namespace, tmp_path: Path) -> None:
    async def body() -> None:
        async with job(namespace, tmp_path) as running:
            await asyncio.to_thread(running.accept, "Suspend")
            running.begin()
            await running.until_state("Suspended")
            os.kill(os.getpid(), signal.SIGTERM)
            assert running.task is not None
            assert await asyncio.wait_for(running.task, DEADLINE) is None

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_one_whose_job_is_deleted_stops_before_its_operator_says_so(
    namespace: Namespace, tmp_path: Path
) -> None:
    async def body() -> None:
        async with job(namespace, tmp_path) as running:
            await asyncio.to_thread(running.accept, "Run")
            running.begin()
            await running.until("2 pods", lambda: len(running.pods()) == 2)
            path = namespace.path(elasticjob.PLURAL, "job", GROUP)
            await asyncio.to_thread(namespace.client.delete, path, propagationPolicy="Foreground")
            assert running.task is not None
            last = await asyncio.wait_for(running.task, DEADLINE)
            assert last is not None
            assert (last.state, last.outcome, running.pods()) == ("Ended", "Stopped", [])
            report = (running.folder / "master" / job_folder.REPORT).read_text()
            assert "drained: deleted" in report

    asyncio.run(body())


@contextlib.asynccontextmanager
async def served(
    folder: Path,
    wanted: Literal["Suspend", "Stop"] = "Stop",
    *,
    refused: int,
    finalizers: tuple[str, ...] = (),
) -> AsyncIterator[tuple[Server, Api, JobMaster]]:
    """A job of which that is wanted, its master, and a server that refuses so many of what that says."""
    accepted = schema.dump(Accepted(generation=1, spec={"image": "local"}, wanted=wanted))
    async with serve() as server, server.api() as api:
        meta = {"namespace": "n", "name": "job", "finalizers": [*finalizers]}
        await api.create(ELASTICJOBS, "n", {"metadata": meta, "status": {"accepted": accepted}})
        server.faults.refuse(403, "PATCH", times=refused)
        here = Place(namespace="n", name="job", folder=folder, address="127.0.0.1:1")
        yield server, api, JobMaster(api, here, Security(), lambda *_: {})


def test_one_that_rests_goes_with_its_job_whose_rights_are_gone_already(tmp_path: Path) -> None:
    """As the garbage collector leaves it where the job is deleted in the foreground."""

    async def body() -> None:
        collected = ("foregroundDeletion",)
        async with served(tmp_path, "Suspend", refused=0, finalizers=collected) as (
            server, api, master,
        ):  # fmt: skip
            running = asyncio.create_task(master.run())
            async with asyncio.timeout(DEADLINE):
                while True:
                    found = await api.get(ELASTICJOBS, "n", "job")
                    said = elasticjob.job_state(found["status"])
                    if said is not None and said.state == "Suspended":
                        break
            server.faults.refuse(403, "GET", "PATCH", "DELETE", times=1000)
            (place,) = server.store.items
            asked = len(server.asked)
            await server.store.delete(place, "")
            async with asyncio.timeout(DEADLINE):
                while len(server.asked) == asked:  # it has seen that, and asks for its pods
                    await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(running, DEADLINE) is None

    asyncio.run(body())


def test_an_end_is_said_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that is put right after a while; who does not hear of an end begins another attempt."""
    monkeypatch.setattr(job_master, "EVERY", 0.02)

    async def body() -> None:
        async with served(tmp_path, refused=5) as (_, api, master):
            last = await asyncio.wait_for(master.run(), DEADLINE)
            assert last is not None
            assert (last.state, last.outcome) == ("Ended", "Stopped")
            found = await api.get(ELASTICJOBS, "n", "job")
            assert elasticjob.job_state(found["status"]) == last

    asyncio.run(body())


@pytest.mark.parametrize("finalizers", [(), ("foregroundDeletion",)])
def test_nobody_is_told_of_the_end_of_a_job_that_is_gone(
    tmp_path: Path, finalizers: tuple[str, ...]
) -> None:
    """Or going, with the master's right to write already gone: it would be told until its pod's time is over."""

    async def body() -> None:
        async with served(tmp_path, refused=1000, finalizers=finalizers) as (server, api, master):
            running = asyncio.create_task(master.run())
            async with asyncio.timeout(DEADLINE):
                while not any(one.startswith("PATCH") for one in server.asked):
                    await asyncio.sleep(0.01)
            assert not running.done()
            await api.delete(ELASTICJOBS, "n", "job")
            assert await asyncio.wait_for(running, DEADLINE) is None

    asyncio.run(body())


def test_a_bug_in_a_watch_ends_what_goes_by_it() -> None:
    async def body() -> None:
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("work")

        async def watch() -> None:
            await asyncio.sleep(0)
            raise KeyError("a bug")

        with pytest.raises(KeyError, match="a bug"):
            await asyncio.wait_for(_beside(work, watch), DEADLINE)
        assert ended == ["work"]

    asyncio.run(body())


def test_one_that_cannot_serve_leaves_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setattr(job_master, "TERMINATION_LOG", log)
    monkeypatch.delenv(env.MASTER_JOB, raising=False)
    assert job_master.main() == 2
    words = ending.from_json(log.read_text())
    assert words is not None
    assert words.kind is Ended.USAGE
    assert "master pod of an ElasticJob" in words.reason


@pytest.mark.usefixtures("crd")
def test_what_an_operator_of_a_version_too_far_accepts_is_refused_in_words(
    namespace: Namespace, tmp_path: Path
) -> None:
    """By a master that begins; one that serves goes on by what it could read."""

    async def body() -> None:
        async with job(namespace, tmp_path) as running:
            await asyncio.to_thread(running.accept, "Run", 1, "job-master-r1")
            running.begin("job-master-r1")
            await running.until("2 pods", lambda: len(running.pods()) == 2)
            newer = {"format": 2, "generation": 1, "attempt": 1, "news": {}}
            path = f"{namespace.path(elasticjob.PLURAL, 'job', GROUP)}/status"
            said = {"status": {"accepted": newer}}
            await asyncio.to_thread(namespace.client.merge, path, said)
            late = JobMaster(running.api, running.place("job-master-r1"), Security(), running.make)
            with pytest.raises(ProtocolMismatch, match=r"has format 2, this release reads 1"):
                await asyncio.wait_for(late.run(), DEADLINE)
            assert running.task is not None
            assert not running.task.done()
            await asyncio.to_thread(namespace.client.merge, path, {"status": {"accepted": None}})

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_one_that_empties_for_a_suspend_leaves_its_successors_pods(
    namespace: Namespace, tmp_path: Path
) -> None:
    """No kubelet ends them: it waits, until it hears that another serves."""

    async def body() -> None:
        async with job(namespace, tmp_path) as running:
            await asyncio.to_thread(running.accept, "Run", 1, "job-master-r1")
            running.begin("job-master-r1")
            await running.until("2 pods", lambda: len(running.pods()) == 2)
            for name in running.pods():  # a node that does not answer
                path = running.namespace.path("pods", name)
                held = {"metadata": {"finalizers": ["example.com/held"]}}
                await asyncio.to_thread(running.namespace.client.merge, path, held)
            await asyncio.to_thread(running.accept, "Suspend", 1, "job-master-r1")
            await running.until_state("Suspending")
            await asyncio.to_thread(running.accept, "Suspend", 2, "job-master-r2")
            assert running.task is not None
            assert await asyncio.wait_for(running.task, DEADLINE) is None

    asyncio.run(body())


@pytest.mark.usefixtures("crd")
def test_a_master_of_a_job_that_has_ended_leaves_it_so(cluster: Cluster, tmp_path: Path) -> None:
    """Its operator had seen the pod's end before the job's, and began another attempt."""

    async def main() -> None:
        async with job(cluster.namespace, tmp_path) as running:
            ended = JobState(
                generation=1, attempt=1, state="Ended", outcome="Succeeded", reason="Finished"
            )
            path = running.namespace.path(elasticjob.PLURAL, "job", GROUP)
            said = {"status": {"job": schema.dump(ended)}}
            await asyncio.to_thread(running.namespace.client.merge, f"{path}/status", said)
            await asyncio.to_thread(running.accept, "Run", 2)
            running.begin()
            assert running.task is not None
            found = await asyncio.wait_for(running.task, DEADLINE)
            assert found is not None
            assert (found.attempt, found.outcome) == (1, "Succeeded")
            assert running.said() == found
            assert running.pods() == []

    asyncio.run(main())

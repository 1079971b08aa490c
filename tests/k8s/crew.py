"""Agents without ranks: a job's pods that train as far as its master can tell, and cost nothing.

Pods are simulated by the kubelet; who runs has an agent, which lives in this process. Operator, master and API server
are real, and told nothing else than what pods and agents tell them.
"""

import asyncio
import contextlib
import itertools
import json
import threading
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc.aio
import pytest

from elastic.proto import elasticjob
from elastic.proto import master_pb2 as pb
from elastic.proto.security import Security
from scripts.kubernetes import words
from scripts.kubernetes.client import CORE
from tests.k8s.cluster import Cluster, Namespace, Object
from tests.k8s.operated import Job, Operator, start_operator
from tests.master.serving import Agent

LOOK = 0.1
"""Seconds between two looks at who runs."""
BEAT = 0.5
RUN, EXIT = pb.Directive.RUN, pb.Directive.EXIT


@dataclass
class Member:
    """A pod's agent, over all of its streams."""

    pod: str
    job: str
    agent: Agent | None = None
    """None: it is not attached."""
    order: pb.Directive = field(default_factory=pb.Directive)
    """The last to run."""
    report: pb.NodeReport = field(default_factory=pb.NodeReport)
    task: "asyncio.Task[None] | None" = None
    leaves: bool = False
    """It has got SIGTERM: its pod is being deleted."""


class Crew:
    """The agents of all jobs in a namespace, on a loop in a thread of its own."""

    def __init__(self, space: Namespace) -> None:
        self.away: set[str] = set()
        """Names of pods whose agent is not there though they run."""
        self.deaf: set[str] = set()
        """Names of those whose agent ends for nobody."""
        self.steps = Counter[str]()
        """By job: the last step that its ranks have finished."""
        self._space = space
        self._members: dict[str, Member] = {}
        self._ports = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.cancel()
        self._do(self._all_away())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- what tests ask and say ------------------------------------------------------------------

    def world(self, job: str) -> list[str]:
        """Names of the pods in the newest round, by rank; empty: none is attached with one."""
        found = [one for one in list(self._members.values()) if one.job == job and one.agent]
        newest = max((one.order.round for one in found), default=0)
        seated = [one for one in found if newest and one.order.round == newest]
        return [one.pod for one in sorted(seated, key=lambda one: one.order.node_rank)]

    def round(self, job: str) -> int:
        found = [one for one in list(self._members.values()) if one.job == job]
        return max((one.order.round for one in found), default=0)

    def attached(self, pod: str) -> bool:
        return (found := self._members.get(pod)) is not None and found.agent is not None

    def fail(self, pod: str, **failure: Any) -> None:
        """Its rank ends so."""
        failures = [pb.RankFailure(**failure, rank=self._members[pod].order.first_rank)]
        self._report(pod, phase=pb.NodeReport.FAILED, failures=failures)

    def finish(self, *pods: str) -> None:
        """All of their ranks end well."""
        for pod in pods:
            self._report(pod, phase=pb.NodeReport.FINISHED)

    def _report(self, pod: str, **what: Any) -> None:
        member = self._members[pod]
        member.report = pb.NodeReport(round=member.order.round, **what)
        assert member.agent is not None
        self._do(member.agent.say(report=member.report))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    # --- who runs has an agent -------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await self._look(
                await asyncio.to_thread(self._space.client.get, self._space.path("pods"))
            )
            await asyncio.sleep(LOOK)

    async def _look(self, listed: Object) -> None:
        pods = [one for one in listed["items"] if elasticjob.UID_LABEL in one["metadata"]["labels"]]
        masters = {_job(one): one for one in pods if _role(one) == "master" and _runs(one)}
        workers = {one["metadata"]["name"]: one for one in pods if _role(one) == "worker"}
        for name, member in self._members.items():
            # One that has ended is heard until its master knows better: what comes first is chance.
            if (name not in workers or name in self.away) and member.task is not None:
                member.task.cancel()
        for name, one in workers.items():
            known = self._members.get(name)
            if known is not None and known.agent is not None and _leaves(one):
                await self._drain(known, known.agent)
            if not _runs(one) or name in self.away or _job(one) not in masters:
                continue
            member = self._members.setdefault(name, Member(name, _job(one)))
            if member.task is None or member.task.done():
                address = masters[_job(one)]["status"]["podIP"]
                member.task = asyncio.create_task(self._attend(member, address))

    async def _drain(self, member: Member, agent: Agent) -> None:
        """As elastic-run does on SIGTERM in a pod."""
        if not member.leaves and member.pod not in self.deaf:
            member.leaves = True
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await agent.say(leaving=pb.Leaving(reason="SIGTERM", drain=True))

    async def _attend(self, member: Member, address: str) -> None:
        """One stream, to its end; the next look begins another."""
        secret = await asyncio.to_thread(self._space.find, "secrets", f"{member.job}-token")
        if secret is None:
            return
        agent = Agent(
            f"{address}:{elasticjob.PORT}", member.pod, run_id=member.job, report=member.report,
            spare_store=f"127.0.0.1:{next(self._ports)}",
            security=Security(token=b64decode(secret["data"]["token"]).decode()),
        )  # fmt: skip
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with agent:
                member.agent = agent
                beats = asyncio.create_task(self._beat(member, agent))
                try:
                    await self._obey(member, agent)
                finally:
                    beats.cancel()
                    member.agent = None

    async def _obey(self, member: Member, agent: Agent) -> None:
        while True:
            message = await agent.hear()
            order = message.directive
            if not message.HasField("directive") or order.round < member.order.round:
                continue
            if order.kind == RUN and order.round > member.report.round:
                member.order = order
                member.report = pb.NodeReport(round=order.round, phase=pb.NodeReport.RUNNING)
                store = pb.SpareStore(address=f"127.0.0.1:{next(self._ports)}")
                await agent.say(spare_store=store)
            elif order.kind == EXIT and member.pod not in self.deaf:
                await agent.say(leaving=pb.Leaving(reason="told to exit"))
                await asyncio.to_thread(self._end, member.pod, order.exit_code)
                return

    def _end(self, pod: str, code: int) -> None:
        ends = {words.EXIT: json.dumps({"exitCode": code})}
        self._space.client.merge(self._space.path("pods", pod), {"metadata": {"annotations": ends}})

    async def _beat(self, member: Member, agent: Agent) -> None:
        while True:
            await asyncio.sleep(BEAT)
            beat = pb.Heartbeat(round=member.report.round, prepared=True)
            if member.report.phase == pb.NodeReport.RUNNING:
                step = self.steps[member.job]
                beat.ranks.append(pb.RankProgress(rank=member.order.first_rank, pid=1, step=step))
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await agent.say(heartbeat=beat)

    async def _all_away(self) -> None:
        tasks = [one.task for one in self._members.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _role(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get(elasticjob.ROLE_LABEL, ""))


def _job(pod: Object) -> str:
    return str(pod["metadata"]["labels"][elasticjob.JOB_LABEL])


def _leaves(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _runs(pod: Object) -> bool:
    status = pod.get("status", {})
    return not _leaves(pod) and status.get("phase") == "Running" and bool(status.get("podIP"))


# --- a stage for many jobs -----------------------------------------------------------------------


@dataclass
class Stage:
    """An operator, a kubelet and agents that jobs share."""

    cluster: Cluster
    folder: Path
    operator: Operator
    crew: Crew

    @contextlib.contextmanager
    def job(self, name: str, *, simulated: bool = True, **spec: Any) -> Iterator["Staged"]:
        """Removed at the end, whatever it does. spec: pod: of the worker's; container: of the main one; both beside
        what an ElasticJob has."""
        made = Staged(self, name, simulated=simulated, **spec)
        try:
            yield made
        finally:
            made.remove()

    def pool(self, name: str, *numbers: int) -> dict[str, Any]:
        """Nodes of that name's own, by their number; what a job says to be on these alone."""
        client, space = self.cluster.namespace.client, self.cluster.namespace.name
        for number in numbers:
            taint = {"key": "pool", "value": name, "effect": "NoSchedule"}
            body = {"metadata": {"labels": {"pool": name}}, "spec": {"taints": [taint]}}
            client.merge(f"{CORE}/nodes/{space}-node-{number}", body)
        bears = {"key": "pool", "operator": "Equal", "value": name, "effect": "NoSchedule"}
        return {"nodeSelector": {"pool": name}, "tolerations": [bears]}

    def restart_operator(self) -> None:
        """By SIGKILL: it says no goodbye. Its lease is let go."""
        self.operator.kill()
        space = self.cluster.namespace
        space.client.delete(space.path("leases", LEASE, LEASES))
        self.operator = start_operator(space, self.folder, "operator-again")


LEASE, LEASES = "elasticjob-operator", "/apis/coordination.k8s.io/v1"


class Staged(Job):
    """A job whose pods are simulated."""

    def __init__(
        self, stage: Stage, name: str, *, simulated: bool, pod: Object | None = None,
        container: Object | None = None, **spec: Any,
    ) -> None:  # fmt: skip
        self.crew = stage.crew
        main = {"name": "main", "image": "local", "command": ["elastic-run"], **(container or {})}
        template = {"spec": {"containers": [main], **(pod or {})}}
        if simulated:
            template["metadata"] = {"annotations": {words.SIMULATE: "true"}}
        worker = {"replicas": 2, **spec.pop("worker", {}), "template": template}
        plain = dict.fromkeys(("image", "command", "env"))
        super().__init__(stage.cluster, stage.folder, name, (), **plain, worker=worker, **spec)

    def remove(self) -> None:
        """At once."""
        if self.raw():
            notes = {elasticjob.FORCE_DELETE: "true"}
            self.space.client.merge(self.path, {"metadata": {"annotations": notes}})
            self.space.client.delete(self.path)

    def worker(self, slot: int, attempt: int = 0) -> str:
        return f"{self.name}-worker-{slot}-r{attempt}"

    def wait_world(self, *pods: str) -> None:
        """Until just these are in a round together."""
        self.wait(f"{pods} train", lambda: sorted(self.crew.world(self.name)) == sorted(pods))

    def wait_failed(self, reason: str) -> str:
        """Until it has, for that reason; the words."""
        self.wait(f"it fails: {reason}", lambda: self.holds("Failed"))
        found = self.condition("Failed")
        assert found["reason"] == reason, found
        assert self.status()["reason"] == reason
        return str(found["message"])

    def wait_size(self, size: int) -> list[str]:
        """Until so many are in a round together; their names, by rank."""
        self.wait(f"{size} train", lambda: len(self.crew.world(self.name)) == size)
        return self.crew.world(self.name)

    def wait_spares(self, count: int) -> None:
        """Until so many hot spares are ready."""
        self.wait(
            f"{count} spares",
            lambda: (s := self.state()) is not None and s.workers.spares == count,
        )

    def pod(self, name: str) -> Object:
        found = self.space.find("pods", name)
        assert found is not None, name
        return found

    def uids(self) -> set[str]:
        """Of its pods, the master's too."""
        return {one["metadata"]["uid"] for one in (*self.pods(), *self.pods("master"))}

    def wait_step(self, step: int) -> None:
        """Until its master knows that it is finished."""
        self.wait(
            f"step {step}", lambda: (s := self.state()) is not None and s.training.step == step
        )

    def end(self, pod: str, code: int, reason: str = "", message: str = "") -> None:
        """Its container ends so."""
        self.cluster.ask(pod, words.EXIT, {"exitCode": code, "reason": reason, "message": message})

    def evict(self, pod: str, message: str) -> None:
        """By its node."""
        self.cluster.ask(pod, words.EVICT, message)

    def preempt(self, pod: str) -> None:
        """By the scheduler."""
        self.cluster.ask(pod, words.PREEMPT, "true")

    def wait_runs(self, pod: str) -> None:
        self.wait(f"{pod} runs", lambda: self.cluster.phase(pod) == "Running")

    def patch_container(self, pod: str, state: Object, phase: str) -> None:
        """The state of its main one, and its own phase."""
        self.patch_status(
            pod, {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]}
        )

    def patch_status(self, pod: str, status: Object) -> None:
        """As a kubelet or controller writes it."""
        path = f"{self.space.path('pods', pod)}/status"
        kind = "application/strategic-merge-patch+json"
        self.space.client.call("PATCH", path, {"status": status}, kind=kind)

    def failures(self) -> list[tuple[str, str, str]]:
        """Pod, cause and action of each that its status tells."""
        state = self.state()
        return [(one.pod, one.cause, one.action) for one in state.last_failures] if state else []

    def wait_failures(self, *told: tuple[str, str, str]) -> None:
        self.wait(f"its failures are {told}", lambda: self.failures() == [*told])

    def counted(self) -> int:
        """Restarts toward failurePolicy.maxRestarts."""
        state = self.state()
        assert state is not None
        return state.restarts_counted


Row = Callable[[Stage], None]
Running = Mapping[Row, "Future[None]"]


class Rows:
    """Decorates the rows of one module, which are jobs side by side, and each a case of its one test."""

    def __init__(self) -> None:
        self.all: list[Row] = []

    def __call__(self, test: Row) -> Row:
        self.all.append(test)
        return test

    def begin(self, stage: Stage, request: pytest.FixtureRequest) -> Iterator[Running]:
        """Those that this run is for."""
        asked = [
            value
            for item in request.session.items
            if item.path == request.path
            for value in item.callspec.params.values()  # type: ignore[attr-defined]
        ]
        with ThreadPoolExecutor(4) as pool:
            yield {one: pool.submit(one, stage) for one in self.all if one in asked}

"""An operator as a process of its own, under its own service account with the chart's rules; and jobs for it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.agent import prctl
from elastic.k8s.operator import LEASE
from elastic.proto import elasticjob
from elastic.proto.elasticjob import JobState
from scripts.kubernetes.accounts import operator_rules
from scripts.kubernetes.server import account_kubeconfig
from tests.k8s.cluster import ROOT, Cluster, Namespace
from tests.waiting import wait_for

GROUP = f"/apis/{elasticjob.GROUP}/{elasticjob.VERSION}"
LEASES = "/apis/coordination.k8s.io/v1"
ACCOUNT = "operator"
DEADLINE = 120.0
Object = dict[str, Any]

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
while True:
    last = torch.tensor(int(Path(sys.argv[2]).exists()))
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "a") as out:
            print(dist.get_world_size(), file=out)
    if last:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""
"""Writes the size of the world at each step, and ends once the file that it is told is there."""


def allow_operator(space: Namespace) -> None:
    """What the chart allows it, in this one namespace."""
    space.allow(ACCOUNT, *operator_rules())


@dataclass
class Operator:
    """A replica that runs."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


def bury(space: Namespace) -> None:
    """The next one leads at once, not after the 15 s for which a dead one's lease is respected."""
    if space.find("leases", LEASE, LEASES) is not None:
        space.client.delete(space.path("leases", LEASE, LEASES))


def start_operator(space: Namespace, folder: Path, name: str = "operator") -> Operator:
    """Of that namespace, with its Lease there."""
    config, log = folder / f"{name}.kubeconfig", folder / f"{name}.log"
    account_kubeconfig(space.kubeconfig, space.name, ACCOUNT, config)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic.ctl", "operator", f"--kubeconfig={config}", "--health-port=0",
             f"--namespace={space.name}", f"--lease-namespace={space.name}"],
            cwd=ROOT, stdout=out, stderr=out, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=prctl.set_pdeathsig,  # noqa: PLW1509  one call of libc's
        )  # fmt: skip
    return Operator(process=process, log=log)


@contextlib.contextmanager
def operated(space: Namespace, folder: Path) -> Iterator[Operator]:
    """A replica for the length of a `with`."""
    allow_operator(space)
    one = start_operator(space, folder)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


class Job:
    """An ElasticJob that writes what it does into a folder."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        name: str = "job",
        train: Sequence[str] | None = None,
        **spec: Any,
    ) -> None:
        """train: arguments of elastic-run; SCRIPT's by default. spec: fields beside, or in place of, the usual ones."""
        self.cluster, self.space, self.name = cluster, cluster.namespace, name
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.out, self._stop = self.folder / "out", self.folder / "stop"
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        arguments = [str(script), str(self.out), str(self._stop)] if train is None else [*train]
        self.spec = usual(arguments, self.folder) | spec
        self.begin()

    def begin(self) -> None:
        self.space.client.create(self.space.path(elasticjob.PLURAL, group=GROUP), self.body())

    def body(self) -> Object:
        version = GROUP.removeprefix("/apis/")
        return {
            "apiVersion": version, "kind": elasticjob.KIND, "metadata": {"name": self.name},
            "spec": self.spec,
        }  # fmt: skip

    @property
    def path(self) -> str:
        return self.space.path(elasticjob.PLURAL, self.name, GROUP)

    def raw(self) -> Object:
        return self.space.find(elasticjob.PLURAL, self.name, GROUP) or {}

    def status(self) -> Object:
        return dict(self.raw().get("status") or {})

    def state(self) -> JobState | None:
        return elasticjob.job_state(self.status())

    def condition(self, kind: str) -> Object:
        found = self.status().get("conditions") or ()
        return next((dict(one) for one in found if one["type"] == kind), {})

    def holds(self, kind: str, status: str = "True") -> bool:
        return self.condition(kind).get("status") == status

    def edit(self, **spec: Any) -> None:
        self.space.client.merge(self.path, {"spec": spec})

    def scale(self, replicas: int) -> None:
        """As `kubectl scale` does it."""
        self.space.client.merge(f"{self.path}/scale", {"spec": {"replicas": replicas}})

    def worlds(self) -> list[str]:
        """Of each step so far."""
        return self.out.read_text().split() if self.out.exists() else []

    def pods(self, role: str = "worker") -> list[Object]:
        found = self.space.client.get(self.space.path("pods"))["items"]
        labels = (elasticjob.JOB_LABEL, self.name), (elasticjob.ROLE_LABEL, role)
        return [one for one in found if set(labels) <= set(one["metadata"]["labels"].items())]

    def names(self, role: str = "worker") -> list[str]:
        return sorted(one["metadata"]["name"] for one in self.pods(role))

    def wait(self, what: str, true: Callable[[], bool], seconds: float = DEADLINE) -> None:
        try:
            wait_for(what, true, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.evidence()}") from error

    def evidence(self) -> str:
        """What to read where it is not as it should be: its status, what its pods and the operator logged."""
        logs = "\n".join(p.read_text() for p in sorted(self.folder.parent.glob("*.log")))
        return f"{self.status()}\n{self.cluster.logs()}\n{logs}"

    def wait_steps(self, world: int, more: int = 10) -> None:
        """Until so many steps more are done by a world of that size."""
        told = len(self.worlds())
        self.wait(
            f"{world} train",
            lambda: (
                self.worlds()[told:].count(str(world)) > more and self.worlds()[-1] == str(world)
            ),
        )

    def wait_state(self, world: int) -> JobState:
        """Until its status tells of a world of that size: the master writes it a while after steps are done."""
        found: list[JobState] = []

        def told() -> bool:
            if (now := self.state()) is not None and now.world_size == world:
                found.append(now)
            return bool(found)

        self.wait(f"its status tells of {world}", told)
        return found[-1]

    def finish(self) -> None:
        self._stop.touch()

    def events(self) -> list[str]:
        """Reasons of its events."""
        found = self.space.client.get(self.space.path("events", group="/apis/events.k8s.io/v1"))
        return [one["reason"] for one in found["items"] if one["regarding"]["name"] == self.name]


def usual(script: list[str], folder: Path) -> Object:
    """The spec of a small job of two pods."""
    address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    plain = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {
        "image": "local",
        "command": ["elastic-run", "--local-addr=$(IP)", f"--log-dir={folder / 'logs'}", *script],
        "env": [address, *({"name": name, "value": value} for name, value in plain.items())],
        "nprocPerNode": 1,
        "worker": {"replicas": 2},
        "elastic": {"min": 1, "max": 4, "lastCallSeconds": 0},
        "healthCheck": {"preflight": "Off"},
        "flashCheckpoint": {"drainSeconds": 10},
    }

"""`make demo-k8s`: an ElasticJob trains a small GPT on three pods that lose one, lose a node, are scaled, suspended,
resumed and deleted, on a real API server; what `kubectl get ej -w` would show is printed all the while.

Pods are processes of this machine (a test kubelet). Exit code 0: every step of the story came true.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic.agent import prctl
from elastic.k8s.crd import manifest
from elastic.proto import elasticjob
from elastic.trainer.data.prepare import MERGES_NAME, PREFIX, VOCAB_NAME, prepare
from scripts.demo_run import MODEL
from scripts.kubernetes import assets, tables, words
from scripts.kubernetes.accounts import allow, operator_rules
from scripts.kubernetes.client import CORE, ApiError, Client, access
from scripts.kubernetes.kubelet import READY
from scripts.kubernetes.server import Server, account_kubeconfig, reach

ROOT = Path(__file__).resolve().parents[1]
SPACE, NAME, ACCOUNT = "demo", "gpt", "elastic-operator"
JOBS = f"/apis/{elasticjob.GROUP}/{elasticjob.VERSION}/namespaces/{SPACE}/{elasticjob.PLURAL}"
LOOK = 0.2
"""Seconds between two looks."""
PATIENCE = 180.0
"""Seconds that a step of the story may take."""
WIDTH = 12
"""Of a column."""
STEPS = 100_000
"""Of the training: more than the story takes."""

Json = dict[str, Any]


class Untrue(Exception):
    """A step of the story did not come true."""


class Story:
    """What is done to the job, and what became of it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._shown: list[list[str]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    # --- what is shown ---------------------------------------------------------------------------

    def act(self, command: str) -> None:
        """A command line that this stands for."""
        with self._lock:
            self._print(f"\n$ {command}")

    def watch(self) -> None:
        """A line each time that the row changes, as with `-w`, in more than its step, goodput and age."""
        while not self._over.wait(LOOK):
            try:
                rows = tables.get(self._client, JOBS)
            except ApiError:
                continue
            shown = [row[:4] + row[6:-1] for row in rows[1:]]  # no step, goodput or age is news
            if shown and shown != self._shown:
                with self._lock:
                    for row in rows[bool(self._shown) :]:
                        self._print("".join(cell.ljust(WIDTH) for cell in row).rstrip())
                self._shown = shown

    def end(self) -> None:
        self._over.set()

    def _print(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    # --- what is seen ----------------------------------------------------------------------------

    def job(self) -> Json:
        try:
            return self._client.get(f"{JOBS}/{NAME}")
        except ApiError as error:
            if error.code != 404:
                raise
            return {}

    def step(self) -> int:
        job = (self.job().get("status") or {}).get("job") or {}
        return int((job.get("training") or {}).get("step") or 0)

    def pods(self, role: str) -> dict[str, str]:
        """Names, and their nodes, of those that are not on their way out."""
        return {
            one["metadata"]["name"]: one["spec"].get("nodeName", "")
            for one in self._listed(role)
            if not one["metadata"].get("deletionTimestamp")
        }

    def left(self, role: str) -> list[str]:
        """Names of those that are there in any way, terminating too."""
        return [one["metadata"]["name"] for one in self._listed(role)]

    def _listed(self, role: str) -> list[Json]:
        chosen = f"{elasticjob.ROLE_LABEL}={role}"
        path = f"{CORE}/namespaces/{SPACE}/pods"
        return list(self._client.get(path, labelSelector=chosen)["items"])

    def node_is(self, name: str, ready: bool) -> bool:
        conditions = self._client.get(f"{CORE}/nodes/{name}")["status"].get("conditions") or ()
        return ready is any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)

    def until(self, what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > deadline:
                raise Untrue(
                    f"{what}: not in {PATIENCE:g} s; the job is {self.job().get('status')}"
                )
            self._over.wait(LOOK)

    def trains(self, ranks: int) -> None:
        """So many, and steps are finished by them."""
        self.until(f"{ranks} train", lambda: self._world() == ranks)
        told = self.step()
        self.until(f"{ranks} finish steps", lambda: self._world() == ranks and self.step() > told)

    def _world(self) -> int:
        return int(((self.job().get("status") or {}).get("job") or {}).get("worldSize") or 0)

    def phase(self, word: str) -> None:
        self.until(f"it is {word}", lambda: (self.job().get("status") or {}).get("phase") == word)

    # --- the story -------------------------------------------------------------------------------

    def tell(self, body: Json) -> None:
        client, job = self._client, f"{JOBS}/{NAME}"
        self.act("kubectl apply -f gpt.yaml; kubectl get ej -w")
        client.create(JOBS, body)
        self.trains(3)
        victim = max(self.pods("worker"))
        self.act(f"kubectl delete pod {victim}")
        client.delete(f"{CORE}/namespaces/{SPACE}/pods/{victim}")
        self.until(f"{victim} is replaced", lambda: self._replaced(victim))
        self.trains(3)
        masters = set(self.pods("master").values())
        others = sorted(set(self.pods("worker").values()) - masters)
        if not others:
            raise Untrue("every worker is on the master's node")
        node = others[0]
        self.act(f"# the node {node} crashes: kubectl get node {node} says NotReady")
        lost = {name for name, on in self.pods("worker").items() if on == node}
        client.merge(f"{CORE}/nodes/{node}", {"metadata": {"annotations": {words.FAULT: "crash"}}})
        self.until(f"{node} is NotReady", lambda: self.node_is(node, ready=False))
        self.until("its pods are replaced", lambda: not lost & set(self.pods("worker")))
        self.trains(3)
        self.act(f"# {node} is back")
        client.merge(f"{CORE}/nodes/{node}", {"metadata": {"annotations": {words.FAULT: None}}})
        self.until(f"{node} is Ready", lambda: self.node_is(node, ready=True))
        for replicas in (2, 4, 3):
            self.act(f"kubectl scale ej/{NAME} --replicas={replicas}")
            client.merge(f"{job}/scale", {"spec": {"replicas": replicas}})
            self.trains(replicas)
        self.act(f'kubectl patch ej {NAME} --type merge -p \'{{"spec":{{"suspend":true}}}}\'')
        client.merge(job, {"spec": {"suspend": True}})
        self.phase("Suspended")
        if left := self.left("worker"):
            raise Untrue(f"suspended it still has {left}")
        before = self.step()
        self.act(f'kubectl patch ej {NAME} --type merge -p \'{{"spec":{{"suspend":false}}}}\'')
        client.merge(job, {"spec": {"suspend": False}})
        self.trains(3)
        if self.step() <= before:
            raise Untrue(f"it went on at step {self.step()}, and was at {before}")
        self.act(f"kubectl delete ej {NAME}")
        client.delete(job)
        self.until("it is gone", lambda: not self.job())
        self.until("its pods are gone", lambda: not self.left("worker") + self.left("master"))

    def _replaced(self, victim: str) -> bool:
        found = self.pods("worker")
        return victim not in found and len(found) == 3


# --- what it needs -------------------------------------------------------------------------------


def body(folder: Path) -> Json:
    """The ElasticJob."""
    data = folder / "data"
    address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    plain = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        "elastic-run", "--local-addr=$(IP)", "-m", "elastic.trainer.pretrain_gpt", *MODEL,
        f"--data-path={data / PREFIX}", f"--vocab-file={data / VOCAB_NAME}",
        f"--merge-file={data / MERGES_NAME}", f"--save={folder / 'checkpoints'}",
        f"--train-iters={STEPS}", f"--lr-decay-iters={STEPS}",
    ]  # fmt: skip
    spec = {
        "image": "local",
        "command": command,
        "env": [address, *({"name": name, "value": value} for name, value in plain.items())],
        "nprocPerNode": 1,
        "worker": {"replicas": 3},
        "elastic": {"min": 1, "max": 4, "lastCallSeconds": 0},
        "healthCheck": {"preflight": "Off"},
        "flashCheckpoint": {"drainSeconds": 20},
    }
    return {
        "apiVersion": f"{elasticjob.GROUP}/{elasticjob.VERSION}",
        "kind": elasticjob.KIND,
        "metadata": {"name": NAME},
        "spec": spec,
    }


def prepare_cluster(client: Client) -> None:
    """The CRD, the namespace, and what the operator may do there."""
    client.make("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", manifest())
    client.make(f"{CORE}/namespaces", {"metadata": {"name": SPACE}})
    default = {"metadata": {"name": "default"}}
    client.make(f"{CORE}/namespaces/{SPACE}/serviceaccounts", default)
    allow(client, SPACE, ACCOUNT, *operator_rules())


@contextlib.contextmanager
def program(log: Path, *arguments: str, says: str = "") -> Iterator[None]:
    """A process of this project for the length of a `with`; says: the line that it prints once it is ready."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE if says else out,
            stderr=out, text=True, start_new_session=True,
            preexec_fn=prctl.set_pdeathsig,  # noqa: PLW1509  one call of libc's
        )  # fmt: skip
    try:
        if process.stdout is not None and process.stdout.readline().strip() != says:
            raise Untrue(f"{arguments[0]} does not start: {log.read_text()[-500:]}")
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def play(folder: Path, server: Server) -> None:
    client = Client(access(server.kubeconfig))
    prepare_cluster(client)
    config = folder / "operator.kubeconfig"
    account_kubeconfig(server.kubeconfig, SPACE, ACCOUNT, config)
    kubelet = [
        "scripts.kubernetes.kubelet",
        f"--kubeconfig={server.kubeconfig}",
        f"--namespace={SPACE}",
    ]
    operator = ["elastic.ctl", "operator", f"--kubeconfig={config}", "--health-port=0"]
    with (
        program(folder / "kubelet.log", *kubelet, f"--folder={folder / 'pods'}", says=READY),
        program(folder / "operator.log", *operator),
    ):
        story = Story(client)
        watching = threading.Thread(target=story.watch, daemon=True)
        watching.start()
        try:
            story.tell(body(folder))
        finally:
            story.end()
            watching.join()
    client.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo-k8s", description=__doc__, allow_abbrev=False)
    parser.parse_args()
    if os.geteuid():
        sys.stderr.write(
            "the pods of this demo are processes in mounts of their own: run it as root\n"
        )
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elastic-demo-") as name:
        folder = Path(name)
        try:
            prepare(folder / "data", vocab_size=2048, max_bytes=1_000_000)
            with reach(folder / "server") as server:
                play(folder, server)
        except (Untrue, ApiError, assets.Unavailable, subprocess.TimeoutExpired) as error:
            logs = folder / "pods" / "logs"
            ends = "\n".join(
                f"{p.name}: {p.read_text()[-300:]}" for p in sorted(logs.glob("*.log"))
            )
            sys.stderr.write(f"{error}\n{ends}\n")
            return 1
        except KeyboardInterrupt:
            return 130
    sys.stdout.write(f"\nAll of it came true, in {time.monotonic() - began:.0f} s.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

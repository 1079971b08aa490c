"""Pods run as local processes, and end as the real kubelet has them end."""

import base64
import json
import sys
from collections.abc import Iterator

import pytest

from scripts.kubernetes import words
from scripts.kubernetes.client import Client
from scripts.kubernetes.containers import can_limit_memory
from scripts.kubernetes.server import Server
from tests.k8s.cluster import Cluster, Object, make_namespace, run_kubelet
from tests.waiting import wait_for

SLEEPS = ("sleep", "1000")


@pytest.fixture(scope="module")
def shared(
    kube_server: Server, kube: Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """For tests that need no node's fault: one kubelet, a pod's name a test."""
    namespace = make_namespace(kube_server, kube)
    with run_kubelet(namespace, tmp_path_factory.mktemp("shared") / "kubelet") as cluster:
        yield cluster


def test_how_a_container_ended_is_told(shared: Cluster) -> None:
    shared.start("told", "sh", "-c", "echo out; echo why > /dev/termination-log; exit 3")
    pod = shared.wait_phase("told", "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "why\n")
    assert shared.log("told") == "out\n"


def test_a_signal_is_told_as_runtimes_do(shared: Cluster) -> None:
    shared.start("signal", "sh", "-c", "sh -c 'kill -SEGV $$$$'; exit $?")
    pod = shared.wait_phase("signal", "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 139


def test_the_environment_has_what_the_manifest_says(shared: Cluster) -> None:
    kube, within = shared.namespace.client, shared.namespace
    data = {"password": base64.b64encode(b"open").decode()}
    kube.create(within.path("secrets"), {"metadata": {"name": "env"}, "data": data})
    kube.create(within.path("configmaps"), {"metadata": {"name": "env"}, "data": {"C": "map"}})
    env: list[Object] = [
        {"name": "PLAIN", "value": "a"},
        {"name": "EXPANDED", "value": "$(PLAIN)-$$(PLAIN)-$(NOBODY)"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "env", "key": "password"}}},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a/b']"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}},
    ]
    names = [*(each["name"] for each in env), "C"]
    program = f"import os, json; print(json.dumps([os.environ[n] for n in {names}]))"
    container = {
        "env": env,
        "envFrom": [{"configMapRef": {"name": "env"}}],
        "resources": {"limits": {"memory": "100Mi"}},
        "args": [program],
    }
    shared.start("env", sys.executable, "-c", container=container, labels={"a/b": "label"})
    pod = shared.wait_phase("env", "Succeeded")
    wanted = ["a", "a-$(PLAIN)-$(NOBODY)", "open", "env", "label", pod["status"]["podIP"]]
    assert json.loads(shared.log("env")) == [*wanted, str(100 * 2**20), "map"]


def test_a_missing_secret_is_waited_for(shared: Cluster) -> None:
    source = {"secretKeyRef": {"name": "late", "key": "k"}}
    shared.start("late", "sh", "-c", "echo $K",
                 container={"env": [{"name": "K", "valueFrom": source}]})  # fmt: skip
    reason = "CreateContainerConfigError"
    wait_for(reason, lambda: shared.state("late").get("waiting", {}).get("reason") == reason)
    assert shared.state("late")["waiting"]["message"] == 'secret "late" not found'
    data = {"k": base64.b64encode(b"here").decode()}
    shared.namespace.client.create(
        shared.namespace.path("secrets"), {"metadata": {"name": "late"}, "data": data}
    )
    shared.wait_phase("late", "Succeeded")
    assert shared.log("late") == "here\n"


def test_volumes_are_folders(shared: Cluster) -> None:
    data = {"f": base64.b64encode(b"secret").decode()}
    shared.namespace.client.create(
        shared.namespace.path("secrets"), {"metadata": {"name": "files"}, "data": data}
    )
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}},
        {"name": "files", "secret": {"secretName": "files"}},
    ]
    mounts = [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "memory", "mountPath": "/dev/shm"},
        {"name": "files", "mountPath": "/etc/files"},
    ]
    program = (
        "echo x > /scratch/x; df --output=size /dev/shm | tail -1; cat /etc/files/f; pwd;"
        " touch /etc/files/f || exit 9"
    )
    container = {"volumeMounts": mounts, "workingDir": "/scratch"}
    shared.start("volumes", "sh", "-c", program, container=container, volumes=volumes)
    pod = shared.wait_phase("volumes", "Failed")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 9
    size, secret, *_ = shared.log("volumes").split()
    assert (int(size), secret) == (32 * 1024, "secret/scratch")


def test_shared_memory_is_small_where_no_volume_says_more(shared: Cluster) -> None:
    shared.start("shm", "sh", "-c", "df --output=size /dev/shm | tail -1; echo $$$$; hostname")
    shared.wait_phase("shm", "Succeeded")
    assert shared.log("shm").split() == [str(64 * 1024), "1", "shm"]


def test_an_account_is_mounted_unless_the_pod_wants_none(shared: Cluster) -> None:
    program = "ls /var/run/secrets/kubernetes.io/serviceaccount"
    shared.start("with", "sh", "-c", program, automountServiceAccountToken=True)
    shared.start("without", "sh", "-c", program)
    shared.wait_phase("with", "Succeeded")
    assert shared.log("with").split() == ["ca.crt", "namespace", "token"]
    shared.wait_phase("without", "Failed")


def test_a_program_in_a_pod_finds_the_server_under_its_account(shared: Cluster) -> None:
    shared.namespace.allow("lists", {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]})
    program = (
        "import asyncio\n"
        "from elastic.k8s.kernel.api import Api\n"
        "from elastic.k8s.kernel.resources import PODS\n"
        "async def main():\n"
        "  async with await Api.connect() as api:\n"
        "    found = await api.all(PODS, api.namespace)\n"
        "    print([pod['metadata']['name'] for pod in found].count('inside'))\n"
        "asyncio.run(main())\n"
    )
    shared.start("inside", sys.executable, "-c", program, serviceAccountName="lists",
                 automountServiceAccountToken=True)  # fmt: skip
    shared.wait_phase("inside", "Succeeded")
    assert shared.log("inside") == "1\n"


@pytest.mark.skipif(not can_limit_memory(), reason="no memory cgroup that we may use")
def test_more_memory_than_the_limit_is_an_oom_kill(shared: Cluster) -> None:
    program = "b = []\nwhile True: b.append(bytearray(2**20))"
    container = {"resources": {"limits": {"memory": "64Mi"}}}
    shared.start("oom", sys.executable, "-c", program, container=container)
    pod = shared.wait_phase("oom", "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")


def test_a_container_restarts_in_place(shared: Cluster) -> None:
    volumes = [{"name": "kept", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "kept", "mountPath": "/kept"}]
    program = "echo run; test -e /kept/second && exit 0; test -e /kept/first && touch /kept/second"
    shared.start("again", "sh", "-c", f"{program}; touch /kept/first; exit 7",
                 container={"volumeMounts": mounts}, volumes=volumes,
                 restartPolicy="OnFailure")  # fmt: skip
    pod = shared.wait_phase("again", "Succeeded")
    (container,) = pod["status"]["containerStatuses"]
    assert container["restartCount"] == 2
    assert container["lastState"]["terminated"]["exitCode"] == 7
    assert shared.log("again") == "run\n" * 3


def test_temporary_files_are_of_one_run_alone(shared: Cluster) -> None:
    program = "ls -A $(TMPDIR); touch $(TMPDIR)/left; echo $(TMPDIR); test -e /v/x || { touch /v/x; exit 1; }"
    shared.start("tmp", "sh", "-c", program, restartPolicy="OnFailure",
                 container={"volumeMounts": [{"name": "v", "mountPath": "/v"}]},
                 volumes=[{"name": "v", "emptyDir": {}}])  # fmt: skip
    pod = shared.wait_phase("tmp", "Succeeded")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1
    assert shared.log("tmp").split() == ["/run/tmp"] * 2


def test_deletion_is_a_sigterm_and_takes_the_object(shared: Cluster) -> None:
    shared.start(
        "polite", "sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    )
    wait_for("it runs", lambda: shared.log("polite") == "up\n")
    shared.namespace.client.delete(shared.namespace.path("pods", "polite"))
    shared.wait_gone("polite")
    assert shared.log("polite") == "up\nbye\n"


def test_deletion_kills_what_outlives_its_grace(shared: Cluster) -> None:
    shared.start("stubborn", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done",
                 terminationGracePeriodSeconds=1)  # fmt: skip
    wait_for("it runs", lambda: shared.log("stubborn") == "up\n")
    shared.namespace.client.delete(shared.namespace.path("pods", "stubborn"))
    shared.wait_gone("stubborn")


@pytest.mark.parametrize(
    ("name", "image", "then"),
    [
        ("image-missing", "bad.invalid/x:1", "ImagePullBackOff"),
        ("image-bad", "Not An Image", "InvalidImageName"),
    ],
)
def test_image_errors_last_until_the_image_is_another(
    shared: Cluster, name: str, image: str, then: str
) -> None:
    shared.start(name, *SLEEPS, container={"image": image})
    wait_for(then, lambda: shared.state(name).get("waiting", {}).get("reason") == then)
    spec = {"spec": {"containers": [{"name": "main", "image": "local"}]}}
    shared.namespace.client.call(
        "PATCH", shared.namespace.path("pods", name), spec,
        kind="application/strategic-merge-patch+json",
    )  # fmt: skip
    shared.wait_phase(name, "Running")


def test_a_program_that_is_not_there(shared: Cluster) -> None:
    shared.start("nothing", "/no/such/program")
    pod = shared.wait_phase("nothing", "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert "/no/such/program" in ended["message"]


def test_a_test_says_how_a_container_ends(shared: Cluster) -> None:
    shared.start("asked", *SLEEPS)
    shared.start("simulated", container={"image": words.SIMULATED})
    for name in ("asked", "simulated"):
        shared.wait_phase(name, "Running")
        shared.ask(name, words.EXIT, {"exitCode": 211, "message": "{}"})
        pod = shared.wait_phase(name, "Failed")
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (211, "{}")


def test_an_eviction_leaves_the_pod_failed(shared: Cluster) -> None:
    shared.start("evicted", *SLEEPS, terminationGracePeriodSeconds=1)
    shared.wait_phase("evicted", "Running")
    shared.ask("evicted", words.EVICT, "The node was low on resource: memory.")
    pod = shared.wait_phase("evicted", "Failed")
    assert pod["status"]["reason"] == "Evicted"
    assert shared.wait_condition("evicted", "DisruptionTarget", "True")


def test_a_preemption_deletes_the_pod(shared: Cluster) -> None:
    shared.start(
        "preempted",
        "sh",
        "-c",
        "trap 'sleep 1; exit 0' TERM; echo up; while :; do sleep 0.05; done",
    )
    wait_for("it runs", lambda: shared.log("preempted") == "up\n")
    shared.ask("preempted", words.PREEMPT, "true")
    condition = shared.wait_condition("preempted", "DisruptionTarget", "True")
    assert condition["reason"] == "PreemptionByScheduler"
    shared.wait_gone("preempted")


def test_a_pod_that_fits_nowhere_says_why(shared: Cluster) -> None:
    shared.start("big", *SLEEPS, container={"resources": {"requests": {"cpu": "1000"}}})
    condition = shared.wait_condition("big", "PodScheduled", "False")
    assert condition["reason"] == "Unschedulable"
    assert condition["message"] == "0/3 nodes are available: 3 Insufficient cpu."


def test_a_service_leads_to_its_pod_by_name(shared: Cluster) -> None:
    kube = shared.namespace.client
    for name, address in (("web", None), ("bare", "None")):
        port = {"port": 8080}
        spec = {"selector": {"app": "web"}, "ports": [port], "clusterIP": address}
        kube.create(shared.namespace.path("services"), {"metadata": {"name": name}, "spec": spec})
    bind = "import http.server as h, os; h.test(h.SimpleHTTPRequestHandler, port=8080, bind=os.environ['IP'])"
    ip = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    shared.start("web", sys.executable, "-c", bind, container={"env": [ip]}, labels={"app": "web"})
    fetch = (
        "import sys, time, urllib.request as r\n"
        "for url in sys.argv[1:]:\n"
        "  for _ in range(300):\n"
        "    try: print(r.urlopen(url, timeout=5).status); break\n"
        "    except OSError as e: time.sleep(0.1)\n"
    )
    full = f"web.{shared.namespace.name}.svc.cluster.local"
    urls = [f"http://{host}:8080/" for host in ("web", full, "bare")]
    shared.start("fetch", sys.executable, "-c", fetch, *urls)
    shared.wait_phase("fetch", "Succeeded")
    assert shared.log("fetch").split() == ["200"] * 3

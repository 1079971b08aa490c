"""`elasticctl`'s verbs for ElasticJobs, on a real API server; a test plays the operator, by status."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import yaml

from elastic import ctl
from elastic.k8s.resources import ELASTICJOBS
from tests.k8s.cluster import Namespace
from tests.waiting import wait_for

pytestmark = pytest.mark.xdist_group("kubernetes")
GROUP = f"/apis/{ELASTICJOBS.api_version}"
JOB = "apiVersion: elastic-runtime.dev/v1alpha1\nkind: ElasticJob\nmetadata: {name: a}\nspec:\n  image: i\n"
TORCHRUN = ("--image", "team/image", "--", "torchrun", "--nproc-per-node", "8", "train.py")


class Ctl:
    """A namespace, and elasticctl in it."""

    def __init__(self, space: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
        self.space, self.capsys = space, capsys
        self.where = ["--kubeconfig", str(space.kubeconfig), "-n", space.name]

    def ctl(self, verb: str, *words: str) -> tuple[int, str, str]:
        """Exit code, output, notes."""
        self.capsys.readouterr()
        code = ctl.main([verb, *self.where, *words])
        told = self.capsys.readouterr()
        return code, told.out, told.err

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.space.client.get(
            self.space.path("elasticjobs", name, group=GROUP)
        )
        return found

    def names(self) -> list[str]:
        found = self.space.client.get(self.space.path("elasticjobs", group=GROUP))
        return [item["metadata"]["name"] for item in found["items"]]

    def say(self, name: str, *true: str, **status: Any) -> None:
        """What the operator would write."""
        generation = self.get(name)["metadata"]["generation"]
        types = ("Accepted", "Training", "Suspended", "Complete", "Failed")
        conditions = [
            {
                "type": one,
                "status": "True" if one in ("Accepted", *true) else "False",
                "reason": "Test",
                "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for one in types
        ]
        told = {"observedGeneration": generation, "conditions": conditions, **status}
        path = self.space.path("elasticjobs", f"{name}/status", group=GROUP)
        self.space.client.merge(path, {"status": told})


@pytest.fixture
def ctl_in(crd: None, namespace: Namespace, capsys: pytest.CaptureFixture[str]) -> Ctl:
    return Ctl(namespace, capsys)


def later(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_torchrun_command_becomes_a_job_and_stays_as_it_was(ctl_in: Ctl) -> None:
    code, out, _ = ctl_in.ctl(
        "submit", "--name", "demo", "--nodes", "2:4", "--gpus", "8", *TORCHRUN
    )
    assert (code, out) == (0, "elasticjob.elastic-runtime.dev/demo created\n")
    (container,) = ctl_in.get("demo")["spec"]["worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["elastic-run", "--nproc-per-node", "8", "train.py"]
    code, _, err = ctl_in.ctl("submit", "--name", "demo", *TORCHRUN)
    assert code == 1
    assert 'elasticjobs.elastic-runtime.dev "demo" already exists' in err


def test_a_dry_run_writes_nothing(ctl_in: Ctl) -> None:
    code, out, _ = ctl_in.ctl("submit", "--name", "demo", "--dry-run", *TORCHRUN)
    assert (code, out) == (0, "elasticjob.elastic-runtime.dev/demo created (dry run)\n")
    code, out, _ = ctl_in.ctl("submit", "--name", "demo", "--dry-run", "-o", "yaml", *TORCHRUN)
    assert yaml.safe_load(out)["spec"]["worker"]["replicas"] == 1
    assert ctl_in.names() == []
    ctl_in.ctl("submit", "--name", "demo", *TORCHRUN)
    assert ctl_in.ctl("delete", "demo", "--dry-run")[0] == 0
    assert ctl_in.ctl("suspend", "demo", "--dry-run")[0] == 0
    assert ctl_in.names() == ["demo"]
    job = ctl_in.get("demo")
    assert not job["spec"].get("suspend")
    assert "deletionTimestamp" not in job["metadata"]


def test_a_file_of_jobs_is_submitted_whole_or_a_line_says_why_not(
    ctl_in: Ctl, tmp_path: Path
) -> None:
    ctl_in.ctl("submit", "--name", "a", "--dry-run", "-o", "yaml", *TORCHRUN)
    _, text, _ = ctl_in.ctl("submit", "--name", "a", "--dry-run", "-o", "yaml", *TORCHRUN)
    body = yaml.safe_load(text)
    body["metadata"] = {"name": "a"}
    second = {**body, "metadata": {"name": "b"}}
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump_all([body, second]))
    code, out, _ = ctl_in.ctl("submit", "-f", str(file), "-o", "name")
    assert code == 0
    assert out.split() == [f"elasticjob.elastic-runtime.dev/{name}" for name in "ab"]

    body["spec"]["elastik"] = {"min": 1}
    body["metadata"]["name"] = "c"
    file.write_text(yaml.safe_dump(body))
    code, _, err = ctl_in.ctl("submit", "-f", str(file))
    assert (code, err) == (1, "elasticctl: an ElasticJob has no field spec.elastik\n")
    file.write_text("kind: Pod\napiVersion: v1\n")
    code, _, err = ctl_in.ctl("submit", "-f", str(file))
    assert code == 1
    assert "no ElasticJob" in err
    code, _, err = ctl_in.ctl("submit", "-f", str(tmp_path / "none"))
    assert code == 1
    assert "No such file" in err
    assert ctl_in.names() == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (JOB + "  active: 2026-01-01\n", "an ElasticJob has no field spec.active"),
        (JOB + "  notify: [2026-01-01, !!binary aGk=]\n", "holds what JSON has not"),
        (JOB + "  notify: &a [*a]\n", "holds what JSON has not"),
        (JOB + "  notify: " + "[" * 5000, "nested too deep"),
        (
            JOB + "  nprocPerNode: 1\n  nprocPerNode: 2\n",
            "nprocPerNode is there 2 times: write it once",
        ),
        (JOB.replace("name: a", "name: 5"), "needs metadata.name"),
        (JOB.replace("name: a", "name: a, namespace: ''"), "metadata.namespace is no name"),
        (
            JOB.replace("name: a", "name: a, namespace: b"),
            "a is of namespace b: give --namespace b",
        ),
        (JOB.partition("spec:")[0], "needs a spec"),
        (JOB.replace("image: i", "nprocPerNode: 1"), "there is no image"),
        (JOB + "---\n" + JOB + "  nprocPerNode: x\n", "write auto, gpu, cpu or a number"),
    ],
)
def test_a_file_that_is_refused_makes_nothing_and_is_told_in_a_line(
    ctl_in: Ctl, tmp_path: Path, text: str, words: str
) -> None:
    """Also by a server that evaluates no rules, such as this one; of two jobs not the first, either."""
    (tmp_path / "job.yaml").write_text(text)
    code, out, err = ctl_in.ctl("submit", "-f", str(tmp_path / "job.yaml"))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert words in err
    assert ctl_in.names() == []


def test_a_null_is_nothing_said_and_a_merged_key_is_none_of_two(
    ctl_in: Ctl, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB + "  notify: null\n  elastic: &e {min: 1}\n  hotSpares: {count: null}\n")
    assert ctl_in.ctl("submit", "--dry-run", "-f", str(file)) == (0, ANY, "")
    file.write_text(JOB + "  env:\n  - &e {name: A, value: a}\n  - {<<: *e, name: B}\n")
    assert ctl_in.ctl("submit", "--dry-run", "-f", str(file)) == (0, ANY, "")


@pytest.mark.parametrize("verb", [("ls",), ("suspend",), ("resume",), ("delete",)])
def test_a_step_in_a_path_is_no_job(ctl_in: Ctl, verb: tuple[str, ...]) -> None:
    ctl_in.ctl("submit", "--name", "a", *TORCHRUN)
    code, out, err = ctl_in.ctl(*verb, ".")
    assert (code, out) == (1, "")
    assert "'.' is no name" in err
    assert ctl_in.names() == ["a"]


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("delete", ("",)), ("delete", ("a", "")), ("delete", ("a", "-n", "")), ("suspend", ("a", "-n", "")),
        ("scale", ("", "2")), ("resume", ("",)), ("ls", ("",)), ("ls", ("--context", "")),
        ("ls", ("--kubeconfig", "")), ("operator", ("-n", "")), ("operator", ("--lease-namespace", "")),
        ("operator", ("--health-port", "99999")), ("submit", ("--gpu-resource", "", *TORCHRUN)),
        ("submit", ("--name", "", *TORCHRUN)), ("submit", ("--queue", "q", *TORCHRUN)),
        ("submit", ("--suspended", "--wait", *TORCHRUN)), ("submit", ("--env", "A=1", "--env", "A=2", *TORCHRUN)),
    ],
)  # fmt: skip
def test_what_an_unset_variable_leaves_is_refused(
    verb: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ctl.main([verb, *words])
    assert ended.value.code == 2
    assert ": error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["team/", "/a", "a/b/c"])
def test_a_job_with_half_a_name_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["--job", name, "status"]) != 0
    assert f"--job {name}: write NAME, or NAMESPACE/NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        (), ("--image", "x"), ("--", "torchrun"), ("-f", "x", "--", "torchrun"),
        ("--nodes", "0", *TORCHRUN), ("--env", "X", *TORCHRUN), ("--wait", "--follow", *TORCHRUN),
        ("--timeout", "-1", *TORCHRUN), ("--nonsense", *TORCHRUN), ("-o", "xml", *TORCHRUN),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_a_usage_error(ctl_in: Ctl, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        ctl_in.ctl("submit", *words)
    assert ended.value.code == 2
    assert ctl_in.names() == []


def test_jobs_are_listed_as_kubectl_does(ctl_in: Ctl) -> None:
    code, out, err = ctl_in.ctl("ls")
    assert (code, out) == (0, "")
    assert f"no ElasticJobs in namespace {ctl_in.space.name}" in err
    for name in ("one", "two"):
        ctl_in.ctl("submit", "--name", name, *TORCHRUN)
    ctl_in.say("one", "Training", phase="Running")
    code, out, _ = ctl_in.ctl("ls")
    head, *rows = out.splitlines()
    assert head.split()[:2] == ["NAME", "PHASE"]
    assert [row.split()[0] for row in rows] == ["one", "two"]
    assert rows[0].split()[1] == "Running"
    assert len(ctl_in.ctl("ls", "-o", "wide")[1].splitlines()[0]) >= len(head)
    assert len(ctl_in.ctl("ls", "two")[1].splitlines()) == 2
    assert ctl_in.ctl("ls", "-A")[1].split()[0] == "NAMESPACE"
    assert ctl_in.ctl("ls", "-l", "none=such")[1] == ""
    assert ctl_in.ctl("ls", "-o", "name")[1].split()[1].endswith("/two")
    listed = json.loads(ctl_in.ctl("ls", "-o", "json")[1])
    assert [item["kind"] for item in listed["items"]] == ["ElasticJob"] * 2
    found = yaml.safe_load(ctl_in.ctl("ls", "one", "-o", "yaml")[1])
    assert found["status"]["phase"] == "Running"
    assert "managedFields" not in found["metadata"]


@pytest.mark.parametrize("verb", ["ls", "suspend", "resume", "delete", "scale"])
def test_a_job_that_is_not_there_is_exit_code_3(ctl_in: Ctl, verb: str) -> None:
    code, _, err = ctl_in.ctl(verb, "none", *(("4",) if verb == "scale" else ()))
    assert (code, err) == (3, 'elasticctl: elasticjobs.elastic-runtime.dev "none" not found\n')


def test_edits_are_made_and_waited_for(ctl_in: Ctl) -> None:
    ctl_in.ctl("submit", "--name", "demo", "--nodes", "1:4", *TORCHRUN)
    assert ctl_in.ctl("scale", "demo", "3")[1] == (
        "elasticjob.elastic-runtime.dev/demo scaled to 3\n"
    )
    assert ctl_in.get("demo")["spec"]["worker"]["replicas"] == 3
    assert ctl_in.ctl("suspend", "demo")[0] == 0
    assert ctl_in.get("demo")["spec"]["suspend"] is True
    code, _, err = ctl_in.ctl("scale", "demo", "2", "--wait")
    assert (code, err) == (1, "elasticctl: demo is suspended and has no pods: leave --wait out\n")
    code, _, err = ctl_in.ctl("suspend", "demo", "--wait", "--timeout", "0.5")
    assert code == 4
    assert "after 0.5 s" in err
    operator = later(lambda: ctl_in.say("demo", "Suspended"))
    assert ctl_in.ctl("suspend", "demo", "--wait", "--timeout", "60")[0] == 0
    operator.join()

    def begin() -> None:
        wait_for("resume", lambda: not ctl_in.get("demo")["spec"]["suspend"])
        ctl_in.say("demo", "Training")

    operator = later(begin)
    assert ctl_in.ctl("resume", "demo", "--wait", "--timeout", "60")[0] == 0
    operator.join()


def test_an_edit_that_the_operator_refuses_is_told_in_its_words(ctl_in: Ctl) -> None:
    ctl_in.ctl("submit", "--name", "demo", "--nodes", "1:4", *TORCHRUN)

    def refuse() -> None:
        wait_for("the edit", lambda: ctl_in.get("demo")["spec"]["worker"]["replicas"] == 3)
        generation = ctl_in.get("demo")["metadata"]["generation"]
        condition = {
            "type": "Accepted", "status": "False", "reason": "InvalidSpec", "message": "3 is odd",
            "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z",
        }  # fmt: skip
        ctl_in.say("demo", conditions=[condition])

    operator = later(refuse)
    code, _, err = ctl_in.ctl("scale", "demo", "3", "--wait", "--timeout", "60")
    operator.join()
    assert (code, err) == (1, "elasticctl: 3 is odd\n")


@pytest.mark.parametrize(("condition", "code"), [("Complete", 0), ("Failed", 1)])
def test_following_ends_with_the_job(ctl_in: Ctl, condition: str, code: int) -> None:
    def play() -> None:
        wait_for("the job", lambda: ctl_in.names() == ["demo"])
        ctl_in.say("demo", "Training", phase="Running", readyReplicas=1, desiredReplicas=1)
        ctl_in.say("demo", condition, phase=condition, reason="UserError", message="at step 3")

    operator = later(play)
    words = ("--name", "demo", "--follow", "--timeout", "60", *TORCHRUN)
    found, out, err = ctl_in.ctl("submit", *words)
    operator.join()
    assert found == code
    assert out.splitlines()[-1].split()[1] == condition
    assert ("demo failed: UserError: at step 3" in err) == (condition == "Failed")


def test_deleting_waits_until_they_are_gone(ctl_in: Ctl) -> None:
    for name in ("a", "b"):
        ctl_in.ctl("submit", "--name", name, *TORCHRUN)
    path = ctl_in.space.path("elasticjobs", "a", group=GROUP)
    ctl_in.space.client.merge(path, {"metadata": {"finalizers": ["test.example/wait"]}})
    code, _, _ = ctl_in.ctl("delete", "a", "--wait", "--timeout", "0.5")
    assert code == 4

    def let_go() -> None:
        ctl_in.space.client.merge(path, {"metadata": {"finalizers": None}})

    operator = later(let_go)
    code, out, _ = ctl_in.ctl("delete", "b", "-o", "name")
    assert (code, out) == (0, "elasticjob.elastic-runtime.dev/b\n")
    operator.join()
    wait_for("a is gone", lambda: "a" not in ctl_in.names())


def test_an_interrupt_leaves_the_job_and_says_how_to_look_again(ctl_in: Ctl) -> None:
    command = [sys.executable, "-m", "elastic.ctl", "submit", *ctl_in.where]
    command += ["--name", "demo", "--follow", *TORCHRUN]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as running:
        watchdog = threading.Timer(120, running.kill)
        watchdog.start()
        assert running.stdout is not None
        assert "created" in running.stdout.readline()
        assert "Pending" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, err = running.communicate()
        watchdog.cancel()
    assert running.returncode == 130
    assert "detached: demo goes on" in err
    assert "elasticctl ls demo --follow" in err
    assert "Traceback" not in err
    assert ctl_in.names() == ["demo"]


def test_who_may_not_is_told_and_ends_with_5(ctl_in: Ctl, tmp_path: Path) -> None:
    from scripts.kubernetes.server import account_kubeconfig

    path = tmp_path / "config"
    account_kubeconfig(ctl_in.space.kubeconfig, ctl_in.space.name, "default", path)
    code = ctl.main(["ls", "--kubeconfig", str(path), "-n", ctl_in.space.name])
    assert code == 5
    assert "cannot list resource" in ctl_in.capsys.readouterr().err


def test_no_cluster_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = ctl.main(["ls", "--kubeconfig", str(tmp_path / "none")])
    assert code == 1
    assert "there is no kubeconfig" in capsys.readouterr().err

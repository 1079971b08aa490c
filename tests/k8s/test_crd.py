"""The CRD is what the code makes of the dataclasses, and a real API server takes it and keeps to it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.k8s import crd as maker
from elastic.k8s.spec import Spec, read
from elastic.proto.elasticjob import Accepted, JobState, PodFailure
from elastic.proto.schema import dump
from scripts.kubernetes.client import ApiError, Client
from tests.k8s.cluster import Namespace

ROOT = Path(__file__).parents[2]
PATH = "/apis/elastic-runtime.dev/v1alpha1/namespaces/{}/elasticjobs"


@pytest.mark.parametrize("path", maker.FILES, ids=lambda path: path.parent.name)
def test_the_file_is_current(path: Path) -> None:
    assert path.read_text() == maker.text(), "make crd"


def test_the_reference_is_current() -> None:
    assert maker.DOCS.read_text() == maker.reference(), "make crd"


def test_it_is_small_enough_for_a_plain_apply() -> None:
    assert len(maker.text()) < 60_000


def test_every_field_has_words_or_a_name_that_says_all() -> None:
    """What a pod has, too, and names."""
    plain = {
        "command", "args", "workingDir", "env[].name", "env[].value", "failurePolicy.rules[].name",
        "failurePolicy.rules[].match.exitCodes.operator", "failurePolicy.rules[].match.exitCodes.values",
        "scheduling.schedulerName",
    }  # fmt: skip
    rows = [line.split(" | ") for line in maker.reference().splitlines() if line.startswith("| `")]
    silent = {row[0].strip("| `") for row in rows if not row[3].strip("| ")}
    assert silent == plain


def job(name: str = "job", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "elastic-runtime.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"image": "i", **spec},
    }


def test_the_server_fills_in_what_the_operator_does(
    crd: None, kube: Client, namespace: Namespace
) -> None:
    made = kube.create(PATH.format(namespace.name), job(worker={"replicas": 3}, unknown=1))
    assert "unknown" not in made["spec"]
    assert read(made["spec"]) == read({"image": "i", "worker": {"replicas": 3}})
    assert made["spec"]["elastic"]["nodeUnit"] == 1
    assert made["spec"]["failurePolicy"]["maxRestarts"] == 100


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"worker": {"replicas": 0}}, "spec.worker.replicas"),
        ({"cleanup": {"podPolicy": "Some"}}, "spec.cleanup.podPolicy"),
        ({"flashCheckpoint": {"memory": "lots"}}, "spec.flashCheckpoint.memory"),
        ({"nprocPerNode": {}}, "spec.nprocPerNode"),
        ({"master": {"resources": {"limits": {"memory": "1GB"}}}}, "resources.limits.memory"),
        (
            {"worker": {"template": {"spec": {"containers": [{"volumeMounts": [None]}]}}}},
            "volumeMounts",
        ),
        (
            {"worker": {"template": {"spec": {"terminationGracePeriodSeconds": "60"}}}},
            "terminationGrace",
        ),
        ({"failurePolicy": {"rules": [{"name": "r"}]}}, "spec.failurePolicy.rules"),
    ],
)
def test_the_server_refuses_a_field_that_holds_what_it_may_not(
    crd: None, kube: Client, namespace: Namespace, spec: dict[str, Any], words: str
) -> None:
    with pytest.raises(ApiError, match=words):
        kube.create(PATH.format(namespace.name), job(**spec))


def test_the_server_takes_nulls_and_whatever_else_a_template_has(
    crd: None, kube: Client, namespace: Namespace
) -> None:
    resources = {"limits": {"cpu": 0.5, "memory": "1e9", "nvidia.com/gpu": 8}}
    container = {"name": "main", "image": "i", "volumeMounts": None, "resources": resources, "x": 1}
    template = {"metadata": {"labels": None}, "spec": {"containers": [container], "y": {"z": None}}}
    body = job(worker={"template": template})
    del body["spec"]["image"]
    made = kube.create(PATH.format(namespace.name), body)["spec"]
    assert read(made) == read(body["spec"])
    (found,) = made["worker"]["template"]["spec"]["containers"]
    assert (found["x"], found["resources"]) == (1, resources)


def test_both_parts_of_a_status_come_back_as_they_were_written(
    crd: None, kube: Client, namespace: Namespace
) -> None:
    path = PATH.format(namespace.name)
    made = kube.create(path, job())
    told = Accepted(generation=1, spec=dump(read(made["spec"])))
    failure = PodFailure(time=1.5, cause="Killed", action="ReplacePod", reason="why", rank=3)
    state = JobState(generation=1, attempt=1, state="Running", last_failures=(failure,))
    status = {"accepted": dump(told), "job": dump(state), "phase": "Running"}
    kube.merge(f"{path}/job/status", {"status": status})
    found = kube.get(f"{path}/job")["status"]
    assert found["accepted"] == status["accepted"]
    assert found["job"] == status["job"]


def test_kubectl_scale(crd: None, kube: Client, namespace: Namespace) -> None:
    path = PATH.format(namespace.name)
    kube.create(path, job(worker={"replicas": 2}))
    kube.merge(f"{path}/job/scale", {"spec": {"replicas": 5}})
    assert kube.get(f"{path}/job")["spec"]["worker"]["replicas"] == 5


def schema() -> dict[str, Any]:
    found: dict[str, Any] = maker.manifest()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.parametrize("column", maker.COLUMNS, ids=lambda column: column[0])
def test_a_column_shows_what_is_there(column: tuple[str, str, str, int]) -> None:
    """A server takes any path, and shows nothing where it leads nowhere."""
    _, kind, path, _ = column
    if path == ".metadata.creationTimestamp":  # every object's
        return
    node = schema()
    for key in path.lstrip(".").split("."):
        node = node["properties"][key]
    assert node["type"] == kind


def test_the_whole_spec_is_in_the_schema() -> None:
    found = schema()["properties"]["spec"]["properties"]
    assert len(found) == len(Spec.__dataclass_fields__)
    names = yaml.safe_load(maker.text())["spec"]["names"]
    assert names["shortNames"] == ["ej", "ejob"]

"""examples/k8s: legal specs whose worlds and trainer arguments are what their names say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.k8s import pods, rules
from elastic.k8s.kernel.resources import CLAIMS, Resource
from elastic.k8s.pods import Owner
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.spec import read as read_spec
from elastic.k8s.submission import lost
from elastic.k8s.supply import New
from elastic.trainer.arguments.parse import parse
from tests.k8s.cluster import Namespace

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "k8s").glob("*.yaml"))
JOBS = [file for file in FILES if file.stem != "volume"]
GPTS = [file for file in FILES if file.stem.startswith("gpt-")]
IMAGE_ROOT = "/opt/elastic"
"""Where the image has this repository's examples: docker/."""
WORLDS = {
    "gpt-125m": [(1, 1, 1), (2, 1, 1), (4, 1, 1)],
    "gpt-1.3b": [(4, 1, 1), (8, 1, 1), (4, 4, 1)],
    "gpt-13b": [(4, 4, 1), (4, 8, 1), (4, 4, 4)],
}
"""Replicas, stages, GPUs of a layer: the rows that there are."""


def name(file: Path) -> str:
    return file.stem


def read(file: Path) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(file.read_text())
    return body


def container(body: dict[str, Any]) -> dict[str, Any]:
    (one,) = body["spec"]["worker"]["template"]["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def world(stem: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"gpt-[0-9.]+[mb]-dp(\d+)(?:-pp(\d+))?(?:-tp(\d+))?", stem)
    assert found, stem
    replicas, stages, shares = (int(text or 1) for text in found.groups())
    return replicas, stages, shares


def test_every_row_is_there() -> None:
    found = {
        model: sorted(world(file.stem) for file in GPTS if file.stem.startswith(f"{model}-"))
        for model in WORLDS
    }
    assert found == {model: sorted(rows) for model, rows in WORLDS.items()}


@pytest.mark.parametrize("file", GPTS, ids=name)
def test_the_trainer_takes_the_arguments_and_has_that_world(file: Path) -> None:
    body = read(file)
    command = container(body)["command"]
    assert command[:3] == ["elastic-run", "-m", "elastic.trainer.pretrain_gpt"]
    settings = parse([word.replace(IMAGE_ROOT, str(ROOT)) for word in command[3:]])
    replicas, stages, shares = world(file.stem)
    parallel = settings.parallel()
    assert (parallel.pp, parallel.tp) == (stages, shares)
    gpus = int(container(body)["resources"]["limits"]["nvidia.com/gpu"])
    spec = body["spec"]
    assert spec["worker"]["replicas"] * gpus == replicas * stages * shares
    unit = spec["elastic"].get("nodeUnit", 1)
    assert unit * gpus % (stages * shares) == 0 or (stages * shares) % (unit * gpus) == 0
    assert spec["elastic"]["min"] * gpus % (stages * shares) == 0


@pytest.mark.parametrize("file", JOBS, ids=name)
def test_no_rule_is_broken(file: Path) -> None:
    """The server of the tests has no CEL."""
    body = read(file)
    assert rules.violations(body["metadata"]["name"], body["spec"]) == ()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_the_server_takes_all_of_it(crd: None, namespace: Namespace, file: Path) -> None:
    body = read(file)
    kinds: dict[str, Resource] = {"ElasticJob": ELASTICJOBS, "PersistentVolumeClaim": CLAIMS}
    assert lost(body, tried(namespace, kinds[body["kind"]].path(namespace.name), body)) == []


@pytest.mark.parametrize("file", JOBS, ids=name)
def test_the_server_takes_all_of_the_pods_that_are_made_of_it(
    namespace: Namespace, file: Path
) -> None:
    """What the template has, too, whose schema the resource's own leaves open."""
    body = read(file)
    owner = Owner(namespace=namespace.name, name=body["metadata"]["name"], uid="the-uid")
    spec = read_spec(body["spec"])
    worker = pods.worker(owner, spec, New(slot=0, attempt=0), ("a-node",))
    for pod in (worker, pods.master(owner, spec, 0)):
        assert lost(pod, tried(namespace, namespace.path("pods"), pod)) == []


def tried(namespace: Namespace, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """As the server would keep it: without the fields that it does not know."""
    answered: dict[str, Any] = namespace.client.call("POST", path, body, query={"dryRun": "All"})
    return answered

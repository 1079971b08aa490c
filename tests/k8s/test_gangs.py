"""Gangs: a real API server that knows the PodGroups of Volcano and of the coscheduling plugin, their fields as those have
them; no scheduler of theirs runs here.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.k8s.belongings import POD_GROUPS
from elastic.k8s.kernel.resources import Resource
from elastic.k8s.spec import Provider
from scripts.kubernetes.client import ApiError, Client
from tests.k8s.cluster import Object
from tests.k8s.conftest import CRDS
from tests.k8s.crew import Stage
from tests.waiting import wait_for

pytestmark = pytest.mark.xdist_group("gangs")  # no other test sees these kinds

FIELDS = {
    "Volcano": {
        "minMember": "integer", "queue": "string", "priorityClassName": "string",
    },
    "Coscheduling": {"minMember": "integer", "scheduleTimeoutSeconds": "integer"},
}  # fmt: skip
"""Of `spec`: what is no field of it would be pruned, and missed below."""
SAID: dict[str, Object] = {
    "Volcano": {"minMember": 2, "queue": "team", "priorityClassName": "urgent"},
    "Coscheduling": {"minMember": 2, "scheduleTimeoutSeconds": 120},
}
JOINS: dict[str, tuple[str, str]] = {
    "Volcano": ("annotations", "scheduling.k8s.io/group-name"),
    "Coscheduling": ("labels", "scheduling.x-k8s.io/pod-group"),
}


def definition(kind: Resource, fields: dict[str, str]) -> Object:
    spec = {"type": "object", "properties": {name: {"type": of} for name, of in fields.items()}}
    schema = {"type": "object", "properties": {"spec": spec}}
    names = {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()}
    version = {"name": kind.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            # The server asks for a word of its project's for each kind of such a group.
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
        },
        "spec": {"group": kind.group, "scope": "Namespaced", "names": names, "versions": [version]},
    }  # fmt: skip


def is_served(kube: Client, kind: Resource) -> bool:
    try:
        kube.get(kind.path())
    except ApiError as error:
        if error.code not in (404, 429):
            raise
        return False
    return True


@pytest.fixture(scope="module", params=[*POD_GROUPS])
def provider(kube: Client, request: pytest.FixtureRequest) -> Iterator[Provider]:
    """Its kind is known, and forgotten at the end: other tests are about servers that do not know it."""
    kind = POD_GROUPS[request.param]
    made = definition(kind, FIELDS[request.param])
    kube.create(CRDS, made)
    wait_for("the kind is served", lambda: is_served(kube, kind))
    yield request.param
    kube.delete(f"{CRDS}/{made['metadata']['name']}")
    wait_for("the kind is gone", lambda: not is_served(kube, kind))


def test_a_gang_is_made_follows_the_spec_and_goes_on_a_suspend(
    stage: Stage, provider: Provider
) -> None:
    name = provider.lower()
    kind = POD_GROUPS[provider]
    gang = {"provider": provider, "scheduleTimeoutSeconds": 120}
    scheduling: Object = {"gang": gang, "schedulerName": "default-scheduler"}
    if provider == "Volcano":
        scheduling |= {"queue": "team", "priorityClassName": "urgent"}
        urgent = {"metadata": {"name": "urgent"}, "value": 7}
        stage.cluster.namespace.client.make("/apis/scheduling.k8s.io/v1/priorityclasses", urgent)
    sizes = {"min": 2, "max": 4, "lastCallSeconds": 0}
    with stage.job(name, scheduling=scheduling, worker={"replicas": 3}, elastic=sizes) as job:

        def group() -> dict[str, Any]:
            found = job.space.find(kind.plural, name, f"/apis/{kind.api_version}")
            return dict(found["spec"]) if found else {}

        job.wait_size(3)
        assert group() == SAID[provider]
        where, word = JOINS[provider]
        assert [one["metadata"][where][word] for one in job.pods()] == [name] * 3
        job.edit(elastic={"min": 3})
        job.wait("it follows", lambda: group().get("minMember") == 3)
        job.edit(suspend=True)
        job.wait("it is suspended", lambda: job.holds("Suspended"))
        assert (group(), job.names()) == ({}, [])
        job.edit(suspend=False)
        job.wait("pods come", lambda: bool(job.names()))
        assert group() == {**SAID[provider], "minMember": 3}, "it was there before them"
        job.wait_size(3)

"""A server that evaluates CEL refuses the specs and edits that the operator does, in the same words, and takes the others.

`KUBECONFIG` names such a server: the one that `make kubernetes` builds has no CEL.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s import rules
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.rules import RULES
from elastic.k8s.spec import read
from scripts.kubernetes.client import ApiError, Client
from tests.k8s.test_edges import EDGES, edged
from tests.k8s.test_rules import BESIDE_MAIN, BROKEN, GOOD, TEMPLATE, failing, specs, with_env

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("cel")]
PATH = ELASTICJOBS.path("default")
WORDS = {rule["message"] for rule in (*rules.of_spec(), *rules.of_name())}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def cel(kube: Client, crd: None) -> None:
    """Of 1.25 and newer."""
    version = kube.get("/version")
    minor = re.match("[0-9]+", version["minor"])
    if minor is None or int(minor[0]) < 25:
        pytest.skip(f"Kubernetes {version['major']}.{version['minor']} has no CEL")


def body(name: str, spec: Json) -> Json:
    kind = {"apiVersion": "elastic-runtime.dev/v1alpha1", "kind": "ElasticJob"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def refusal(kube: Client, made: Json) -> str | None:
    """Of a new job, or where it has a version of one as it is to be; nothing is kept."""
    edit, name = "resourceVersion" in made["metadata"], made["metadata"]["name"]
    method, path = ("PUT", f"{PATH}/{name}") if edit else ("POST", PATH)
    try:
        kube.call(method, path, made, query={"dryRun": "All"})
    except ApiError as error:
        return error.message
    return None


def told(kube: Client, made: Json) -> set[str]:
    """The words of the rules that it breaks."""
    said = refusal(kube, made)
    found = {words for words in WORDS if words in (said or "")}
    assert found or said is None, said
    return found


def expected(spec: Json) -> set[str]:
    """What the operator says of the same, as far as CEL can."""
    return {rule.message for rule in RULES if rule.cel and not rule.holds(read(spec))}


def edit_words(old: Json, new: Json) -> set[str]:
    """And of such an edit."""
    return set(rules.edit_violations(read(old), read(new)))


@contextmanager
def job(kube: Client, spec: Json) -> Iterator[Json]:
    """One that is there."""
    made = kube.create(PATH, body(f"job-{uuid.uuid4().hex[:8]}", spec))
    try:
        yield made
    finally:
        kube.delete(f"{PATH}/{made['metadata']['name']}")


QUEUED: Json = {"queue": "q", "gang": {"provider": "Kueue"}}
containers: list[Json] = [
    {**GOOD}, {"image": "j", "args": ["a"]}, {**GOOD, "command": []}, {**GOOD, "env": [{"name": "A"}]},
    *({"worker": {"template": template}} for template in (TEMPLATE, BESIDE_MAIN, with_env("A"))),
]  # fmt: skip
others: st.SearchStrategy[Json] = st.fixed_dictionaries(
    {},
    optional={
        "suspend": st.booleans(),
        "nprocPerNode": st.sampled_from(["gpu", "8", 8]),
        "scheduling": st.sampled_from([QUEUED, {"queue": ""}, {"nodeSelector": {"a": "b"}}]),
        "failurePolicy": st.sampled_from(
            [{"rules": []}, {"rules": [failing(), failing(name="q")]}, {"maxRestarts": 3}]
        ),
        "hotSpares": st.sampled_from([{}, {"count": 1}]),
        "managedBy": st.just("kueue.x-k8s.io/multikueue"),
    },
)


@st.composite
def legal(draw: st.DrawFn) -> Json:
    """A spec that breaks no rule, whether it says how many nodes, in which units or sizes, or nothing of it."""
    found: Json = {**draw(st.sampled_from(containers)), **draw(others)}
    unit = draw(st.integers(1, 3))
    least, wanted, most = sorted(unit * draw(st.integers(1, 6)) for _ in range(3))
    steps: list[Json] = [{"nodeUnit": unit}, *([{"discreteSizes": [wanted]}] * (unit == 1))]
    if draw(st.booleans()):
        found["worker"] = {**found.get("worker", {}), "replicas": wanted}
        found["elastic"] = {"min": least, "max": most, **draw(st.sampled_from(steps))}
    return found


@pytest.mark.parametrize("name", BROKEN)
def test_a_spec_that_breaks_one_rule_is_told_its_words(kube: Client, name: str) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    spec, _ = BROKEN[name]
    assert told(kube, body("job", spec)) == ({rule.message} if rule.cel else set())


@pytest.mark.parametrize("path", EDGES)
def test_a_field_takes_its_edge_and_nothing_beyond_it(kube: Client, path: str) -> None:
    """Save for regular expressions, which are the operator's alone."""
    taken, refused = EDGES[path]
    for value in taken:
        assert refusal(kube, body("job", edged(path, value))) is None, value
    for value in refused:
        assert refusal(kube, body("job", edged(path, value))) or value == ["("], value


@pytest.mark.parametrize("path", EDGES)
def test_an_edit_of_one_field_is_taken_or_told_as_the_operator_does(
    kube: Client, path: str
) -> None:
    nothing = edged(path, None)
    known = [nothing, *(edged(path, value) for value in EDGES[path][0])]
    legals = [spec for spec in known if not rules.violations("job", spec)]
    for old, new in permutations(legals, 2):
        with job(kube, old) as made:
            assert told(kube, {**made, "spec": new}) == edit_words(old, new), (old, new)


@pytest.mark.parametrize("name", ["1a", "a-", "A", "a.b", "a" * 41, "a" * 40, "a--1"])
def test_a_name_that_pods_cannot_have(kube: Client, name: str) -> None:
    assert told(kube, body(name, GOOD)) == set(rules.violations(name, GOOD))


@settings(max_examples=200, deadline=None)
@given(specs)
def test_any_spec_is_taken_or_told_as_the_operator_does(kube: Client, spec: Json) -> None:
    assert told(kube, body("job", spec)) == expected(spec)


@settings(max_examples=200, deadline=None)
@given(legal())
def test_a_legal_one_is_taken(kube: Client, spec: Json) -> None:
    assert rules.violations("job", spec) == ()
    assert refusal(kube, body("job", spec)) is None


@settings(max_examples=200, deadline=None)
@given(legal(), legal() | specs)
def test_any_edit_is_taken_or_told_as_the_operator_does(kube: Client, old: Json, new: Json) -> None:
    with job(kube, old) as made:
        words = expected(new) | edit_words(old, new)
        assert told(kube, {**made, "spec": new}) == words


def test_kubectl_scale_keeps_within_the_range(kube: Client) -> None:
    with job(kube, {**GOOD, "elastic": {"min": 1, "max": 4}}) as made:
        scale = f"{PATH}/{made['metadata']['name']}/scale"
        kube.merge(scale, {"spec": {"replicas": 2}})
        with pytest.raises(ApiError, match=r"worker\.replicas must be within elastic\.min"):
            kube.merge(scale, {"spec": {"replicas": 5}})

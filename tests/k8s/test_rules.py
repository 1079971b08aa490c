"""Each rule of a spec and of an edit: its words, and that its CEL says the same as its predicate."""

import re
from functools import cache
from typing import Any

import celpy
import celpy.adapter
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.k8s import rules
from elastic.k8s.rules import COUNTED, FIXED, FROZEN, RULES
from elastic.k8s.spec import Spec, read
from elastic.proto.schema import dump, load, openapi

TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
GOOD: dict[str, Any] = {"image": "i"}


def with_env(*names: str) -> dict[str, Any]:
    env = [{"name": name, "value": "x"} for name in names]
    return {"spec": {"containers": [{"name": "main", "image": "i", "env": env}]}}


def failing(**more: Any) -> dict[str, Any]:
    return {"name": "r", "match": {}, "action": "Ignore", **more}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "elastic.min is not above elastic.max": (
        {**GOOD, "elastic": {"min": 5, "max": 4}},
        "elastic.min must not be above elastic.max: 5 is above 4, write 4 or less",
    ),
    "worker.replicas is within elastic.min and elastic.max": (
        {**GOOD, "worker": {"replicas": 9}, "elastic": {"min": 2, "max": 8}},
        "worker.replicas must be within elastic.min and elastic.max: 9 is not within 2 and 8, write 8",
    ),
    "worker.replicas is a multiple of elastic.nodeUnit": (
        {
            **GOOD,
            "worker": {"replicas": 6},
            "elastic": {"min": 4, "max": 8, "nodeUnit": 4},
        },
        "worker.replicas must be a multiple of elastic.nodeUnit: 6 is no multiple of 4, write 4 or 8",
    ),
    "elastic.min is a multiple of elastic.nodeUnit": (
        {**GOOD, "worker": {"replicas": 8}, "elastic": {"min": 3, "max": 8, "nodeUnit": 4}},
        "elastic.min must be a multiple of elastic.nodeUnit: 3 is no multiple of 4, write 4",
    ),
    "elastic.max is a multiple of elastic.nodeUnit": (
        {**GOOD, "worker": {"replicas": 8}, "elastic": {"min": 4, "max": 9, "nodeUnit": 4}},
        "elastic.max must be a multiple of elastic.nodeUnit: 9 is no multiple of 4, write 8 or 12",
    ),
    "discreteSizes stand in place of nodeUnit": (
        {**GOOD, "elastic": {"max": 4, "nodeUnit": 2, "discreteSizes": [4]}},
        "elastic.discreteSizes and elastic.nodeUnit exclude each other: leave one of them out",
    ),
    "discreteSizes are within elastic.min and elastic.max": (
        {**GOOD, "elastic": {"min": 2, "max": 4, "discreteSizes": [1, 4]}},
        "elastic.discreteSizes must each be within elastic.min and elastic.max",
    ),
    "worker.replicas is one of discreteSizes": (
        {
            **GOOD,
            "worker": {"replicas": 3},
            "elastic": {"min": 2, "max": 4, "discreteSizes": [2, 4]},
        },
        "worker.replicas must be one of elastic.discreteSizes: 3 is none of them, write 2 or 4",
    ),
    "there is an image or a template": (
        {},
        "there is no image: write spec.image, or spec.worker.template",
    ),
    "there is an image or a template, not both": (
        {"image": "i", "worker": {"template": TEMPLATE}},
        "spec.image and spec.worker.template exclude each other: leave one of them out",
    ),
    "what belongs to spec.image is not beside a template": (
        {"args": ["a"], "worker": {"template": TEMPLATE}},
        "command, args, env and workingDir belong to spec.image: write them into a container of the template",
    ),
    "a template has a container": (
        {"worker": {"template": {"spec": {}}}},
        "spec.worker.template.spec.containers: write at least one",
    ),
    "containers have an image": (
        {"worker": {"template": {"spec": {"containers": [{"name": "main"}]}}}},
        "spec.worker.template.spec.containers: each needs an image",
    ),
    "variables of ours are left to us": (
        {"worker": {"template": with_env("A", "PET_NNODES")}},
        (
            "env: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PET_* and ELASTIC_* "
            "are set by the operator: leave them out"
        ),
    ),
    "failure rules have names of their own": (
        {**GOOD, "failurePolicy": {"rules": [failing(), failing()]}},
        "failurePolicy.rules: each needs a name of its own",
    ),
    "patterns are regular expressions": (
        {**GOOD, "failurePolicy": {"rules": [failing(match={"logPatterns": ["("]})]}},
        "failurePolicy.rules: a pattern that is not taken: '(' of rule r: missing ), unterminated subpattern at position 0",
    ),
    "hotSpares.count is not above elastic.max": (
        {**GOOD, "elastic": {"max": 2}, "hotSpares": {"count": 3}},
        "hotSpares.count must not be above elastic.max: 3 is above 2, write 2 or less",
    ),
    "the deadline is the job's": (
        {"worker": {"template": {"spec": {**TEMPLATE["spec"], "activeDeadlineSeconds": 9}}}},
        (
            "spec.worker.template.spec.activeDeadlineSeconds would end each pod, which is then replaced: write "
            "spec.activeDeadlineSeconds"
        ),
    ),
    "nprocPerNode is a number of processes, or auto, gpu or cpu": (
        {**GOOD, "nprocPerNode": "banana"},
        "spec.nprocPerNode: write auto, gpu, cpu or a number of processes",
    ),
    "a queue is Kueue's or Volcano's": (
        {**GOOD, "scheduling": {"queue": "q", "gang": {"provider": "Coscheduling"}}},
        "scheduling.queue needs scheduling.gang.provider Kueue or Volcano: write it, too",
    ),
    "Kueue has a queue": (
        {**GOOD, "scheduling": {"gang": {"provider": "Kueue"}}},
        "scheduling.gang.provider is Kueue: write scheduling.queue, too",
    ),
    "a spec is below 512 KiB": (
        {**GOOD, "args": ["é" * (1 << 17)] * 2},
        (
            "the spec must be below 512 KiB of JSON, so that it fits into a status, too: it is 513, write what is large "
            "into ConfigMaps (envFrom, volumes)"
        ),
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_spec_that_breaks_one_rule_is_told_its_words(rule: rules.Rule) -> None:
    raw, words = BROKEN[rule.name]
    assert rules.violations("job", raw) == (words,)
    assert len(BROKEN) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_servers_words_say_what_to_do_and_the_operators_begin_with_them(
    rule: rules.Rule,
) -> None:
    """A rule's name says what is so of a good spec: who is told it of a bad one reads the contrary of what is so."""
    words = rule.words(read(BROKEN[rule.name][0]))
    assert words == rule.message or words.startswith(f"{rule.message}: ")
    assert rule.message != rule.name
    assert not rule.cel or re.search(r"\b(must|write|leave|needs)\b", rule.message)


SIDE = {"name": "side", "image": "s", "env": [{"name": "RANK", "value": "x"}]}
SIDECAR = {"spec": {"containers": [SIDE]}}
BESIDE_MAIN = {"spec": {"containers": [SIDE, *TEMPLATE["spec"]["containers"]]}}


def test_a_lone_container_is_what_trains_whatever_its_name() -> None:
    assert rules.violations("job", {"worker": {"template": SIDECAR}})


@pytest.mark.parametrize(
    "raw",
    [
        GOOD,
        {"worker": {"template": with_env("RANKS", "MY_PET_A")}},
        {"worker": {"template": BESIDE_MAIN}},
        {**GOOD, "nprocPerNode": "8"},
    ],
)
def test_a_good_one_breaks_none(raw: dict[str, Any]) -> None:
    assert rules.violations("a-job-1", raw) == ()


@pytest.mark.parametrize("name", ["", "1a", "a-", "A", "a.b", "a" * 41])
def test_a_name_that_pods_cannot_have(name: str) -> None:
    assert rules.violations(name, GOOD) == (rules.NAME_WORDS,)
    (rule,) = rules.of_name()
    assert not evaluate(rule["rule"], {"self": {"metadata": {"name": name}}})
    assert evaluate(rule["rule"], {"self": {"metadata": {"name": "a" * 40}}})


def test_a_field_that_holds_what_it_may_not_is_the_one_violation() -> None:
    found = rules.violations("job", {"worker": {"replicas": "x"}})
    assert found == ("spec.worker.replicas: write a number, not 'x'",)


# --- CEL ---


ENVIRONMENT = celpy.Environment()
"""Made here, since it raises the interpreter's recursion limit, which must not change while hypothesis runs."""


@cache
def program(text: str) -> Any:
    return ENVIRONMENT.program(ENVIRONMENT.compile(text))


def evaluate(text: str, given: dict[str, Any]) -> Any:
    return program(text).evaluate(
        {name: celpy.adapter.json_to_cel(value) for name, value in given.items()}
    )


nodes = st.none() | st.integers(1, 9)
templates = st.sampled_from(
    [
        None, {}, {"spec": {}}, {"spec": {"containers": []}}, TEMPLATE, with_env("A"), with_env("RANK"),
        with_env("ELASTIC_X"), SIDECAR, BESIDE_MAIN, TEMPLATE | {"spec": {**TEMPLATE["spec"], "activeDeadlineSeconds": 5}},
        {"spec": {"containers": [{"name": "a"}]}}, {"spec": {"containers": [{"image": ""}]}},
    ]
)  # fmt: skip


def said(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


specs = st.builds(
    said,
    suspend=st.booleans(),
    image=st.sampled_from([None, "", "i", "j"]),
    command=st.sampled_from([None, [], ["a"]]),
    env=st.sampled_from([None, [], [{"name": "A"}], [{"name": "PET_A", "value": "x"}]]),
    nprocPerNode=st.sampled_from([None, "gpu", "8", "banana", 8, 0, 10000]),
    worker=st.builds(said, replicas=nodes, template=templates),
    elastic=st.builds(
        said,
        min=nodes,
        max=nodes,
        nodeUnit=st.none() | st.integers(1, 4),
        discreteSizes=st.none() | st.lists(st.integers(1, 9), max_size=3),
    ),
    scheduling=st.builds(
        said,
        queue=st.sampled_from([None, "", "q"]),
        gang=st.sampled_from([None, {"provider": "Kueue"}, {"provider": "Volcano"}]),
        nodeSelector=st.sampled_from([None, {"a": "b"}]),
    ),
    failurePolicy=st.builds(
        said,
        rules=st.none() | st.lists(st.sampled_from([failing(), failing(name="q")]), max_size=3),
    ),
    hotSpares=st.sampled_from([{}, {"count": 3}]),
    master=st.sampled_from(
        [None, {"storageClaim": ""}, {"storageClaim": "disk"}, {"resources": {}}]
    ),
    managedBy=st.sampled_from([None, "kueue.x-k8s.io/multikueue"]),
)


def defaulted(raw: dict[str, Any]) -> Any:
    """As an API server has it: with the schema's defaults, and an empty text or list only where it was written."""

    def strip(value: Any, written: Any) -> Any:
        if not isinstance(value, dict):
            return value
        inner = written if isinstance(written, dict) else {}
        kept = {k: v for k, v in value.items() if v not in ("", []) or k in inner}
        return {k: strip(v, inner.get(k)) for k, v in kept.items()}

    return strip(dump(load(Spec, raw, "spec")), raw)


@settings(max_examples=150, deadline=None)
@given(specs)
def test_the_servers_rules_and_the_operators_agree(raw: dict[str, Any]) -> None:
    spec, seen = read(raw), {"self": defaulted(raw)}
    for rule in RULES:
        if not rule.cel:
            continue
        holds = bool(evaluate(rule.cel, seen))
        assert holds == rule.holds(spec), rule.name


@settings(max_examples=100, deadline=None)
@given(specs, specs)
@example(GOOD, {**GOOD, "master": {"storageClaim": "", "serviceAccountName": ""}})
def test_they_agree_on_edits(old: dict[str, Any], new: dict[str, Any]) -> None:
    seen = {"oldSelf": defaulted(old), "self": defaulted(new)}
    words = [one for one in rules.of_spec() if "oldSelf" in one["rule"]]
    assert len(words) == len(FROZEN) + len(FIXED) + len(COUNTED)
    told = {one["message"] for one in words if not evaluate(one["rule"], seen)}
    assert told == set(rules.edit_violations(read(old), read(new)))


def test_the_rules_cost_is_bounded_for_a_server_that_counts_it_beforehand() -> None:
    """It takes no text of unknown length, and no list without an end; an index or a choice hides a list's."""
    spec = openapi(Spec)
    for rule in rules.of_spec():
        assert set(rule) == {"rule", "message"}
        assert "string(" not in rule["rule"]
        assert "]." not in rule["rule"]
        for path in re.findall(r"([a-zA-Z.]+)\.(?:all|exists|exists_one)\(", rule["rule"]):
            assert "maxItems" in _at(spec, path), path


def _at(spec: dict[str, Any], path: str) -> dict[str, Any]:
    first, *rest = path.split(".")
    node = spec
    if first == "c":
        node = _at(spec, "self.worker.template.spec.containers")["items"]
    for key in rest:
        node = node["properties"][key]
    return node


# --- edits ---


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"image": "j"}, ("image",)),
        ({}, {"nprocPerNode": 4}, ("nprocPerNode",)),
        ({"suspend": True}, {"image": "j", "suspend": True}, ()),
        ({"suspend": True}, {"image": "j"}, ()),
        ({}, {"suspend": True}, ()),
        ({"elastic": {"min": 1, "max": 4}}, {"elastic": {"min": 2, "max": 3}}, ()),
        ({}, {"flashCheckpoint": {"drainSeconds": 60}}, ("flashCheckpoint",)),
        ({}, {"scheduling": {"gang": {"provider": "Volcano"}}}, ("scheduling.gang",)),
        ({}, {"master": {"serviceAccountName": "x"}}, ("master",)),
        ({}, {"master": {"serviceAccountName": ""}}, ()),
        ({}, {"cleanup": {"podPolicy": "All"}, "activeDeadlineSeconds": 5}, ()),
        ({}, {"args": []}, ()),
    ],
)
def test_what_an_edit_may_change(
    before: dict[str, Any], after: dict[str, Any], words: tuple[str, ...]
) -> None:
    found = rules.edit_violations(read(GOOD | before), read(GOOD | after))
    only = "can be changed while the job is suspended only: set spec.suspend first"
    assert found == tuple(f"spec.{path} {only}" for path in words)


@pytest.mark.parametrize(
    ("edit", "paths"),
    [
        ({"worker": {"replicas": 3}}, ["worker.replicas"]),
        ({"worker": {"replicas": 4}, "elastic": {"min": 1, "max": 4}}, []),
        ({"elastic": {"min": 2, "max": 3}}, ["worker.replicas"]),
        ({"hotSpares": {"count": 1}}, ["hotSpares.count"]),
    ],
)
def test_kueue_knows_a_jobs_pods_by_their_number(edit: dict[str, Any], paths: list[str]) -> None:
    kueue = {"scheduling": {"queue": "q", "gang": {"provider": "Kueue"}}}
    raw = {**GOOD, "elastic": {"min": 2, "max": 4}}
    old = raw | kueue
    words = "is part of the number that Kueue knows the job's pods by: set spec.suspend first"
    found = rules.edit_violations(read(old), read(old | edit))
    assert found == tuple(f"spec.{path} {words}" for path in paths)
    assert rules.edit_violations(read(raw), read(raw | edit)) == ()
    assert rules.edit_violations(read(old | {"suspend": True}), read(old | edit)) == ()


def test_who_manages_a_job_never_changes() -> None:
    old = read({**GOOD, "suspend": True})
    new = read({**GOOD, "managedBy": "kueue.x-k8s.io/multikueue"})
    assert rules.edit_violations(old, new) == (
        "spec.managedBy cannot be changed: make another job",
    )

"""What a spec leaves open is filled in; its short form is a template."""

from typing import Any

import pytest

from elastic.k8s.causes import Action
from elastic.k8s.spec import main_container, read
from elastic.proto.schema import FieldError, dump


@pytest.mark.parametrize(
    ("raw", "numbers"),
    [
        ({}, (1, 1, 1)),
        ({"worker": {"replicas": 4}}, (4, 4, 4)),
        ({"elastic": {"max": 8}}, (8, 8, 8)),
        ({"elastic": {"min": 2, "max": 8}}, (8, 2, 8)),
        ({"worker": {"replicas": 4}, "elastic": {"min": 2, "max": 8}}, (4, 2, 8)),
    ],
)
def test_how_many_nodes(raw: dict[str, Any], numbers: tuple[int, int, int]) -> None:
    spec = read(raw)
    assert (spec.replicas, spec.least, spec.most) == numbers
    assert (spec.worker.replicas, spec.elastic.min, spec.elastic.max) == numbers
    assert read(dump(spec)) == spec


def test_the_short_form_is_a_template() -> None:
    short = {"image": "i", "command": ["a"], "env": [{"name": "A", "value": "b"}]}
    assert read(short).pod == {"spec": {"containers": [{"name": "main", **short}]}}
    template = {"spec": {"containers": [{"name": "side"}, {"name": "main", "image": "x"}]}}
    assert read({"worker": {"template": template}}).pod == template
    assert main_container(template) == {"name": "main", "image": "x"}
    assert main_container({"spec": {"containers": [{"name": "only"}]}}) == {"name": "only"}
    assert main_container({}) == {}


def test_each_action_of_a_rule_is_one_that_can_be_done_to_a_pod_that_has_ended() -> None:
    for action in Action:
        rule = {"name": "r", "match": {}, "action": str(action)}
        (found,) = read({"failurePolicy": {"rules": [rule]}}).failure_policy.rules
        assert found.action == action
    rule = {"name": "r", "match": {}, "action": "RestartProcesses"}
    with pytest.raises(FieldError, match=r"write one of ReplacePod, .*, not 'RestartProcesses'"):
        read({"failurePolicy": {"rules": [rule]}})


def test_a_field_that_holds_what_it_may_not_is_named() -> None:
    with pytest.raises(FieldError, match=r"spec\.elastic\.nodeUnit: write 1 to 10000, not 0"):
        read({"elastic": {"nodeUnit": 0}})

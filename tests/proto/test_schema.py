"""Objects read by dataclasses, and the schema that says the same to an API server."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.schema import (
    FieldError,
    IntOrString,
    Json,
    Most,
    Pattern,
    Range,
    dump,
    load,
    openapi,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: Annotated[str, Most(5)]
    share: Annotated[str, Pattern(r"[0-9]+%", "write a share such as 10%")] = "10%"


@dataclass(frozen=True, kw_only=True)
class Outer:
    node_count: Annotated[int, Range(1, 9)] = 3
    """How many
    nodes."""
    rate: float = 0.5
    on: bool | None = None
    kind: Literal["A", "B"] = "A"
    size: IntOrString = 8
    free: Json | None = None
    inners: Annotated[tuple[Inner, ...], Most(2)] = ()
    nested: Inner = field(default_factory=lambda: Inner(name="x"))


def test_what_is_not_said_has_its_default_and_what_is_not_known_is_left_out() -> None:
    assert load(Outer, {"unknown": 1, "on": None}, "spec") == Outer()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "spec: write an object, not []"),
        ({"nodeCount": 0}, "spec.nodeCount: write 1 to 9, not 0"),
        ({"nodeCount": 10}, "spec.nodeCount: write 1 to 9, not 10"),
        ({"nodeCount": True}, "spec.nodeCount: write a number, not True"),
        ({"nodeCount": 2.5}, "spec.nodeCount: write a number, not 2.5"),
        ({"rate": "x"}, "spec.rate: write a number, not 'x'"),
        ({"on": 1}, "spec.on: write true or false, not 1"),
        ({"kind": "C"}, "spec.kind: write one of A, B, not 'C'"),
        ({"kind": []}, "spec.kind: write one of A, B, not []"),
        ({"size": []}, "spec.size: write a number or a text, not []"),
        ({"free": 1}, "spec.free: write an object, not 1"),
        ({"inners": {}}, "spec.inners: write a list, not {}"),
        ({"inners": [{}]}, "spec.inners[0].name is missing"),
        ({"inners": [{"name": "a"}] * 3}, "spec.inners: at most 2, not 3"),
        ({"nested": {"name": "abcdef"}}, "spec.nested.name: at most 5, not 6"),
        (
            {"nested": {"name": "a", "share": "10"}},
            "spec.nested.share: write a share such as 10%, not '10'",
        ),
    ],
)
def test_the_field_is_named(raw: Any, words: str) -> None:
    with pytest.raises(FieldError) as caught:
        load(Outer, raw, "spec")
    assert str(caught.value) == words


@given(
    st.builds(
        Outer,
        node_count=st.integers(1, 9),
        rate=st.floats(allow_nan=False),
        on=st.none() | st.booleans(),
        kind=st.sampled_from(["A", "B"]),
        size=st.integers() | st.text(),
        free=st.none() | st.dictionaries(st.text(), st.integers()),
        inners=st.lists(st.builds(Inner, name=st.text(max_size=5)), max_size=2).map(tuple),
    )
)
def test_what_is_written_is_read(value: Outer) -> None:
    assert load(Outer, dump(value), "spec") == value


def test_the_schema() -> None:
    inner = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "share": {"type": "string", "pattern": "^([0-9]+%)$", "default": "10%"},
        },
        "required": ["name"],
    }
    assert openapi(Outer) == {
        "type": "object",
        "properties": {
            "nodeCount": {
                "description": "How many nodes.",
                "type": "integer",
                "minimum": 1,
                "maximum": 9,
                "default": 3,
            },
            "rate": {"type": "number", "default": 0.5},
            "on": {"type": "boolean"},
            "kind": {"type": "string", "enum": ["A", "B"], "default": "A"},
            "size": {"x-kubernetes-int-or-string": True, "default": 8},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "inners": {"type": "array", "items": inner, "maxItems": 2},
            "nested": {**inner, "default": {"name": "x"}},
        },
    }

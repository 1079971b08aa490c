"""States and events as text and back."""

import contextlib
import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.master.events import Event, Tick
from elastic.master.job import Job
from elastic.master.policy import Policy
from elastic.proto import codec
from elastic.proto.errors import CodecError

st.register_type_strategy(
    Policy,
    st.builds(
        Policy,
        min_nodes=st.integers(1, 3),
        max_nodes=st.integers(3, 9),
        lease=st.floats(0.0, 99.0),
        join_timeout=st.none() | st.floats(0.0, 99.0),
    ),
)  # any other field by chance would mostly be refused


@pytest.mark.parametrize("kind", get_args(Event))
def test_every_event_survives(kind: type) -> None:
    @settings(max_examples=30)
    @given(st.from_type(kind))
    def survives(event: Event) -> None:
        text = codec.dumps(event)
        assert codec.loads(Event, text) == event

    survives()


@settings(max_examples=50)
@given(st.from_type(Job))
def test_a_job_survives(job: Job) -> None:
    text = codec.dumps(job)
    again = codec.loads(Job, text)
    assert again == job
    assert codec.dumps(again) == text
    assert text.isascii()


def test_what_is_not_said_has_its_default() -> None:
    assert codec.dumps(Job()) == '{"":"Job"}'
    assert codec.loads(Job, '{"":"Job","from a newer release":1}') == Job()
    assert codec.loads(Event, '{"":"Tick","from a newer release":1}') == Tick()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "5",
        "null",
        "[]",
        "{}",
        '{"":"Zap"}',
        '{"":"Detached"}',
        '{"":"Detached","node_id":5,"incarnation":1}',
        '{"":"Detached","node_id":"a","incarnation":true}',
        '{"":"Detached","node_id":"a","incarnation":1.5}',
        '{"":"Knocked","node_id":"a","incarnation":1,"answer":"maybe"}',
        '{"":"Attached","nodes":"abc"}',
        '{"":"Attached","nodes":{"a":1}}',
        '{"":"Job"}',
        "[" * 100_000,
        '"\\ud800"',
    ],
)
def test_anything_else_is_an_error_in_one_short_line(text: str) -> None:
    with pytest.raises(CodecError) as caught:
        codec.loads(Event, text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.from_type(Event), st.data())  # type: ignore[arg-type]
def test_damage_is_an_error_or_another_event(event: Event, data: st.DataObject) -> None:
    text = codec.dumps(event)
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + data.draw(st.characters()) + text[at + 1 :]
    with contextlib.suppress(CodecError):
        assert isinstance(codec.loads(Event, broken), get_args(Event))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=9))
def test_no_json_is_executed_or_crashes(value: object) -> None:
    with pytest.raises(CodecError):
        codec.loads(Job, json.dumps(value))

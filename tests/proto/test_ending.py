"""What goes to the termination log: always readable, never more than Kubernetes keeps."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.proto.ending import DETAILED, MOST, Ended, Ending, from_json, leave, to_json


@settings(max_examples=60)
@given(
    kind=st.sampled_from(Ended),
    rank=st.none() | st.integers(0, 10**6),
    exception=st.text(max_size=3000),
    fingerprint=st.text(max_size=3000),
    reason=st.text(max_size=6000),
    step=st.integers(0, 10**12),
)
def test_it_fits_and_is_read_back(
    kind: Ended, rank: int | None, exception: str, fingerprint: str, reason: str, step: int
) -> None:
    said = Ending(
        kind=kind, rank=rank, exception=exception, fingerprint=fingerprint, reason=reason, step=step
    )
    text = to_json(said)
    assert len(text.encode()) <= MOST
    found = from_json(text)
    assert found is not None
    assert (found.kind, found.rank, found.step) == (kind, rank, step)
    assert reason.startswith(found.reason)
    if len(json.dumps([exception, fingerprint, reason])) < 3000:
        assert found == said


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"class": "Other"}', "killed", "[" * 9999]
)
def test_what_is_not_ours(text: str) -> None:
    assert from_json(text) is None


def test_a_field_of_another_type_is_passed_over() -> None:
    found = from_json('{"class": "HangDetected", "rank": "x", "step": null, "reason": 3, "new": 1}')
    assert found == Ending(kind=Ended.HANG)


def test_codes() -> None:
    codes = {kind: Ending(kind=kind).code(1, detailed=True) for kind in Ended}
    assert {codes[kind] for kind in DETAILED} == {0, 1, 2, *range(210, 217)}
    assert codes[Ended.STOPPED] == codes[Ended.REFUSED] == 1
    assert Ending(kind=Ended.STOPPED).code(143, detailed=True) == 143
    assert {Ending(kind=kind).code(1, detailed=False) for kind in Ended} == {1}


def test_it_is_written_only_where_a_container_has_it(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    leave(log, Ending(kind=Ended.HANG))
    assert not log.exists()
    log.touch()
    leave(log, Ending(kind=Ended.HANG, reason="rank 3 waits"))
    assert from_json(log.read_text()) == Ending(kind=Ended.HANG, reason="rank 3 waits")


def test_one_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    leave(tmp_path, Ending(kind=Ended.HANG))  # a folder

"""The link: messages survive any cut into pieces, and no byte string does more than a LinkError."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto import link
from elastic.proto.errors import LinkError

names = st.text(st.characters(codec="utf-8"))
messages = st.one_of(
    st.builds(
        link.TorchNote,
        environ=st.dictionaries(names, names, max_size=4),
        argv=st.lists(names, max_size=3).map(tuple),
        path=st.lists(names, max_size=3).map(tuple),
    ),
    st.builds(
        link.ModulesNote,
        modules=st.lists(names, max_size=3).map(tuple),
        environ=st.dictionaries(names, names, max_size=3),
    ),
    st.builds(link.FirstStep, step=st.integers(1, 9)),
    st.builds(link.ErrorNote, type=names, message=names, frame=names, traceback=names),
    st.builds(link.UnitAsked, ranks=st.integers(1, 2**31 - 1)),
    st.builds(link.UnitAnswered, reason=names.filter(lambda text: text != "ok")),
)


@given(st.lists(messages, max_size=5), st.data())
def test_round_trip_in_pieces(sent: list[link.Message], data: st.DataObject) -> None:
    stream = b"".join(link.encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = link.Parser()
    received: list[object] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += parser.feed(stream[start:end])
    assert received == sent


def test_bytes_that_are_no_utf8_survive() -> None:
    note = link.TorchNote(environ={"A": "\udcff"}, argv=(), path=())
    assert link.parse(link.encode(note).strip()) == note


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes(pieces: list[bytes]) -> None:
    parser = link.Parser()
    for piece in pieces:
        for found in parser.feed(piece):
            assert isinstance(found, LinkError | link.Message)
    parser.feed(b"\n")
    good = link.FirstStep(step=1)
    assert parser.feed(link.encode(good)) == [good]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from(["note", "step", "error", "unit", "environ", "modules", "v"]),
    json_values,
    json_values,
)
def test_any_values(key: str, value: object, other: object) -> None:
    fields = {"v": "1.0", "note": other, "environ": other, "argv": value, key: value}
    try:
        found = link.parse(json.dumps(fields).encode())
    except LinkError:
        return
    assert found is None or isinstance(found, link.Message)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"v":"1.0","unit":' + b"9" * 10_000 + b"}",
        b'{"v":"1.0","unit":true}',
        b'{"v":"1.0","unit":0}',
        b'{"v":"1.0","error":{}}',
        b'{"unit":1}',
        b'{"v":"2.0","unit":1}',
        b'{"v":"1.2","unit":1}',
        b'{"v":"' + b"1" * 5000 + b'.0","unit":1}',
        b"x" * link.LINE_LIMIT,
    ],
)
def test_refused(line: bytes) -> None:
    with pytest.raises(LinkError):
        link.parse(line)


def test_unknown_is_ignored() -> None:
    assert link.parse(b'{"v":"1.1","later":1}') is None
    assert link.parse(b'{"v":"1.0","note":"later"}') is None
    assert link.parse(b'{"v":"1.0","unit":2,"later":1}') == link.UnitAsked(ranks=2)


def test_line_without_end_is_bounded() -> None:
    parser = link.Parser()
    found = [error for _ in range(40) for error in parser.feed(b"x" * (1 << 16))]
    assert len(found) == 1
    assert isinstance(found[0], LinkError)
    good = link.FirstStep(step=1)
    assert parser.feed(b"\n" + link.encode(good)) == [good]


def test_long_texts_are_shortened_and_too_long_refused() -> None:
    note = link.ErrorNote(
        type="E", message="m" * 9999, frame="f", traceback="a" + "t" * 99_999 + "z"
    )
    found = link.parse(link.encode(note).strip())
    assert isinstance(found, link.ErrorNote)
    assert len(found.message) == link.MESSAGE_LIMIT
    assert len(found.traceback) == link.TRACEBACK_LIMIT
    assert (found.traceback[0], found.traceback[-1]) == ("a", "z")
    with pytest.raises(LinkError, match="too long"):
        link.encode(link.ModulesNote(modules=("m" * link.LINE_LIMIT,), environ={}))

"""What ranks believe to hold in common: who is wrong is found, and what about is said."""

import json

from elastic.agent.snapshots.uneven import Shared, reason, shared, uneven
from elastic.checkpoint.state.image import Layout, Piece
from elastic.proto.slot import Belief


def test_beliefs_that_all_share_are_even() -> None:
    one, other = Belief(1, 2), Belief(2, 2)
    assert not uneven({0: [], 1: []})
    assert not uneven({0: [one], 1: [one]})
    assert not uneven({0: [one], 1: [other], 2: [one], 3: [other]})
    assert not uneven(
        {0: [one, Belief(3, 4)], 1: [one, Belief(3, 4)], 2: [Belief(3, 4)], 3: [Belief(3, 4)]}
    )


def test_beliefs_that_somebody_does_not_share_are_uneven() -> None:
    one = Belief(1, 2)
    assert uneven({0: [one], 1: [Belief(2, 2)]})
    assert uneven({0: [one], 1: []})
    assert uneven({0: [one], 1: [one], 2: [one]})
    assert uneven({0: [Belief(1, 3)], 1: [Belief(1, 3)], 2: [one]})


def test_what_differs_is_said_with_its_ranks() -> None:
    group, others = (4, 5), (6, 7)
    said: dict[int, Shared] = {
        4: {group: {"a": "1", "b": "1", "c": "1"}},
        5: {group: {"a": "1", "b": "2", "d": "1"}},
        6: {others: {"a": "3"}},
        7: {others: {"a": "3"}},
    }
    assert reason(said) == "ranks 4, 5 do not hold the same of b, c, d"
    said[7] = {others: {"e": "1", "f": "1"}}
    assert reason(said) == "ranks 4, 5, 6, 7 do not hold the same of a, b, c and 3 more"
    assert reason({0: {}, 1: {}}) == "ranks 0, 1 do not hold the same of what they keep equal"


def test_what_an_image_says_is_found_in_its_header() -> None:
    piece = Piece(name="w", dtype="int8", shape=(2,), offset=(0,), extent=(2,))
    told = {(0, 1): {"w": "12", "elsewhere": "34"}, (0, 1, 2): {"x": "56"}}
    header = Layout([piece], {}, told).image(2).header
    assert shared(memoryview(header)) == told
    assert shared(memoryview(Layout([piece], {}).image(2).header)) == {}


def test_bytes_that_are_no_image_say_nothing() -> None:
    for data in (b"", b"\xff" * 100, b"\2\0\0\0\0\0\0\0{}", b"\4\0\0\0\0\0\0\0[[[["):
        assert shared(memoryview(data)) == {}
    odd: list[object] = [{"shared": [[5, {}]]}, {"shared": [[[0], 7]]}, {"shared": 1}, []]
    for fields in odd:
        text = json.dumps({"__metadata__": {"elastic": json.dumps(fields)}}).encode()
        assert shared(memoryview(len(text).to_bytes(8, "little") + text)) == {}

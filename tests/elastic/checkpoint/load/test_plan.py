"""Planning reads: whatever cut a tensor, every element that is wanted is read once, from where it is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.load.plan import Box, Read, flat, index, plan
from elastic.checkpoint.state.image import Piece
from elastic.proto.errors import CheckpointError


def piece(shape: tuple[int, ...], box: Box, name: str = "w", dtype: str = "float32") -> Piece:
    return Piece(name=name, dtype=dtype, shape=shape, offset=box.offset, extent=box.extent)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))


def cut(draw: st.DrawFn, box: Box, times: int) -> list[Box]:
    """A box, cut in two again and again: what FSDP, TP and uneven shards look like."""
    boxes = [box]
    for _ in range(times if box.extent else 0):
        one = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(one.extent) - 1))
        size = draw(st.integers(0, one.extent[dim]))
        for at, length in (
            (one.offset[dim], size),
            (one.offset[dim] + size, one.extent[dim] - size),
        ):
            offset, extent = list(one.offset), list(one.extent)
            offset[dim], extent[dim] = at, length
            boxes.append(Box(tuple(offset), tuple(extent)))
    return boxes


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = draw(shapes)
    whole = Box((0,) * len(shape), shape)
    return (
        shape,
        cut(draw, whole, draw(st.integers(0, 5))),
        cut(draw, whole, draw(st.integers(0, 5))),
    )


def fill(wanted: Piece, reads: list[Read[Any]], data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Do the reads; raises where an element is written twice."""
    result = np.zeros(wanted.extent)
    times = np.zeros(wanted.extent, dtype=int)
    for read in reads:
        source = data[region(Box(read.piece.offset, read.piece.extent))]
        inner = Box(tuple(map(int.__sub__, read.box.offset, read.piece.offset)), read.box.extent)
        here = region(Box(tuple(map(int.__sub__, read.box.offset, wanted.offset)), read.box.extent))
        result[here] = source[region(inner)]
        times[here] += 1
    assert (times == 1).all()
    return result


@given(sharded(), st.randoms())
def test_any_sharding_is_read_into_any_other(
    case: tuple[tuple[int, ...], list[Box], list[Box]], chance: Any
) -> None:
    shape, written, wanted = case
    data = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)
    shards = [(rank, [piece(shape, box)]) for rank, box in enumerate(written)]
    shards += [(rank + 100, pieces) for rank, pieces in shards if chance.random() < 0.5]  # replicas
    chance.shuffle(shards)
    for box in wanted:
        target = piece(shape, box)
        reads, missing = plan([target], index(shards))
        assert missing == []
        assert (fill(target, reads, data) == data[region(box)]).all()


@given(shapes.filter(lambda s: 0 not in s and s), st.data())
def test_pieces_that_overlap_are_read_once(shape: tuple[int, ...], draw: st.DataObject) -> None:
    data = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)
    boxes = []
    for _ in range(draw.draw(st.integers(0, 4))):
        ends = [sorted(draw.draw(st.tuples(st.integers(0, s), st.integers(0, s)))) for s in shape]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    target = piece(shape, Box((0,) * len(shape), shape))
    held = np.zeros(shape, dtype=bool)
    for box in boxes:
        held[region(box)] = True
    reads, missing = plan([target], index((n, [piece(shape, box)]) for n, box in enumerate(boxes)))
    if held.all():
        assert (fill(target, reads, data) == data).all()
    else:
        assert (missing, reads) == (["w"], [])


def test_the_nearest_is_read() -> None:
    whole = Box((0,), (4,))
    mine = [("near", [piece((4,), Box((0,), (2,)))]), ("far", [piece((4,), whole)])]
    reads, _ = plan([piece((4,), whole)], index(mine))
    assert [(read.shard, read.box) for read in reads] == [
        ("near", Box((0,), (2,))),
        ("far", Box((2,), (2,))),
    ]


def test_one_that_has_all_is_enough() -> None:
    whole = piece((4,), Box((0,), (4,)))
    reads, _ = plan([whole], index((n, [whole]) for n in range(5)))
    assert [read.shard for read in reads] == [0]


def test_what_nobody_holds_is_missing() -> None:
    empty, scalar = piece((0,), Box((0,), (0,)), "e"), piece((), Box((), ()), "s")
    assert plan([empty, scalar], {}) == ([], ["e", "s"])
    assert plan([empty], index([(0, [empty])])) == ([], [])
    reads, missing = plan([scalar], index([(0, [scalar])]))
    assert len(reads) == 1
    assert missing == []


def test_another_shape_or_dtype_is_refused() -> None:
    whole = Box((0,), (4,))
    for other, what in (
        (piece((5,), whole), r"^w has the shape \[4\] here and \[5\] in the checkpoint$"),
        (
            piece((4,), whole, dtype="bfloat16"),
            "^w is of float32 here and of bfloat16 in the checkpoint$",
        ),
    ):
        with pytest.raises(CheckpointError, match=what):
            plan([piece((4,), whole)], index([(0, [other])]))


@given(shapes, st.data())
def test_any_run_of_elements_is_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    numbers = np.arange(count).reshape(shape)
    boxes = list(flat(shape, start, end))
    found = [n for box in boxes for n in numbers[region(box)].flatten().tolist()]
    assert found == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)

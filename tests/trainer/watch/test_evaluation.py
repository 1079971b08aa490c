import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data import Leaves
from elastic.proto.errors import UsageError
from elastic.trainer.watch import evaluation
from elastic.trainer.watch.evaluation import Reading


def counted(reading: Reading, size: int, batch: int = 12, leaf: int = 2) -> list[list[int]]:
    """Ids that count in each batch, whoever reads them, in order of the leaves."""
    leaves = Leaves(batch_size=batch, leaf_size=leaf)
    of_ranks = [list(evaluation.pieces(reading, leaves, rank, size)) for rank in range(size)]
    return [
        [
            int(number)
            for piece in sorted(itertools.chain(*parts), key=lambda piece: piece.number)
            for number, counts in zip(piece.ids, piece.counts, strict=True)
            if counts
        ]
        for parts in zip(*of_ranks, strict=True)
    ]


@given(
    first=st.integers(0, 300),
    samples=st.integers(1, 60),
    length=st.integers(1, 40),
    size=st.integers(1, 8),
)
def test_any_world_reads_the_same(first: int, samples: int, length: int, size: int) -> None:
    reading = Reading(first=first, samples=samples, length=length)
    alone, shared = counted(reading, 1), counted(reading, size)
    assert shared == alone
    wanted = [(first + place) % length for place in range(samples)]
    assert sorted(itertools.chain(*alone)) == sorted(wanted)


@given(length=st.integers(1, 60), size=st.integers(1, 8))
def test_a_leaf_that_only_fills_a_batch_up_is_none(length: int, size: int) -> None:
    """A script's mean of nothing would be the set's."""
    leaves = Leaves(batch_size=12, leaf_size=2)
    for rank in range(size):
        for batch in evaluation.pieces(evaluation.whole(length), leaves, rank, size):
            for piece in batch:
                assert (piece.number < leaves.count) == bool(piece.counts.any())


def test_each_evaluation_reads_on_as_megatrons() -> None:
    """Of 35 steps, evaluated every 10, four times 3 batches of 4 are read: as many as it asks for."""
    looks = [
        evaluation.validation(iteration, interval=10, iters=3, batch_size=4, length=48, final=final)
        for iteration, final in ((10, False), (20, False), (30, False), (35, True))
    ]
    assert [(look.first, look.samples) for look in looks] == [(0, 12), (12, 12), (24, 12), (36, 12)]
    ends = evaluation.validation(30, interval=10, iters=3, batch_size=4, length=48, final=True)
    assert ends.first == 36
    assert evaluation.test(iters=3, batch_size=4, length=99) == Reading(
        first=0, samples=12, length=99
    )


def test_all_of_a_set_is_read_once() -> None:
    assert sorted(itertools.chain(*counted(evaluation.whole(31), 3))) == list(range(31))


def test_sets_have_names() -> None:
    assert evaluation.suffixes(1) == [""]
    assert evaluation.suffixes(2) == ["-0", "-1"]
    assert evaluation.suffixes(2, ["wiki", "code"]) == ["-wiki", "-code"]
    with pytest.raises(UsageError, match="--validation-set-names has 1 names for 2"):
        evaluation.suffixes(2, ["wiki"])


def test_tags_are_megatrons() -> None:
    losses = {"lm loss": math.log(8)}
    assert evaluation.scalars(losses, suffix="-wiki") == {
        "lm loss validation-wiki": math.log(8),
        "lm loss validation-wiki ppl": pytest.approx(8.0),
    }
    assert evaluation.scalars(losses, "test", ppl=False) == {"lm loss test": math.log(8)}


def test_a_set_without_samples_is_refused() -> None:
    empty = Reading(first=0, samples=4, length=0)
    with pytest.raises(UsageError, match="has no samples"):
        list(evaluation.pieces(empty, Leaves(batch_size=4, leaf_size=2), 0, 1))
    piece = next(evaluation.pieces(evaluation.whole(3), Leaves(batch_size=4, leaf_size=4), 0, 1))[0]
    assert piece.counts.dtype == np.float32
    assert piece.counts.tolist() == [1, 1, 1, 0]

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.data.indexed import Indexed, token_dtype, write
from elastic.trainer.data.samples import (
    Indices,
    Request,
    Samples,
    build,
    index_types,
    memory,
    plan,
)
from tests.trainer.data.peak import peak

SMALL = 1 << 15
"""Bytes that are made whatever the size."""


def put(prefix: Path, lengths: list[int]) -> Indexed:
    """Sequences of these lengths, each token another."""
    ends = np.cumsum(lengths).tolist()
    with write(prefix, token_dtype(50257)) as writer:
        for end, length in zip(ends, lengths, strict=True):
            writer.add_document([list(range(end - length, end))])
    return Indexed(prefix)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    first=st.integers(0, 3),
    asked=st.integers(0, 60),
    s=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_cover_each_epoch_exactly(
    lengths: list[int], first: int, asked: int, s: int, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    lengths = [4] * first + lengths + [5]
    data = put(tmp_path_factory.mktemp("data") / "x", lengths)
    request = Request(sequences=range(first, len(lengths)), samples=asked, seq_length=s, seed=seed)
    tokens = sum(lengths[first:])
    course = plan(request, tokens)
    indices = build(data.lengths, request)
    samples = Samples(data, indices, s)

    own = len(request.sequences)
    epochs = indices.documents.reshape(-1, own)
    together = epochs[:-1] if course.separate else epochs
    assert np.bincount(together.ravel())[first:].tolist() == [len(together)] * own
    if course.separate:
        assert sorted(epochs[-1].tolist()) == list(request.sequences)

    order = indices.shuffle.tolist()
    assert sorted(order) == list(range(len(samples)))
    if course.separate:
        assert sorted(order[: course.before_last]) == list(range(course.before_last))
    assert len(samples) >= asked
    assert course.epochs == 1 or (course.epochs - 1) * tokens < asked * s + 1

    laid = np.concatenate([data.tokens(i) for i in indices.documents.tolist()])
    assert len(samples) == (len(laid) - 1) // s
    for k, row in enumerate(order):
        assert samples[k].tolist() == laid[row * s : row * s + s + 1].tolist()
        assert samples[k].dtype == np.int64


@pytest.mark.parametrize(("asked", "tokens"), [(1, 0), (None, 0), (None, 6)])
def test_too_few_tokens_are_refused(asked: int | None, tokens: int) -> None:
    request = Request(sequences=range(2), samples=asked, seq_length=6)
    with pytest.raises(UsageError, match=f"2 sequences with {tokens} tokens give no sample of 6"):
        plan(request, tokens)


def test_epochs_that_no_index_counts_are_refused() -> None:
    request = Request(sequences=range(2), samples=10**12, seq_length=1024)
    with pytest.raises(UsageError, match="epochs of 2 sequences with 9 tokens, more than an index"):
        plan(request, 9)


def test_large_indices_have_wider_types() -> None:
    assert [dtype.name for dtype in index_types(2**31 - 1, 2**32 - 3)] == ["int32", "uint32"]
    assert [dtype.name for dtype in index_types(2**31, 2**32 - 2)] == ["int64", "int64"]


def test_a_seed_that_numpy_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="below 2\\^32, not -1"):
        Request(sequences=range(2), samples=1, seq_length=6, seed=-1)


def test_a_sample_beyond_is_no_sample(tmp_path: Path) -> None:
    data = put(tmp_path / "x", [9, 9])
    samples = Samples(data, build(data.lengths, REQUEST), 3)
    for k in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"sample {k} of 5"):
            samples[k]


REQUEST = Request(sequences=range(2), samples=5, seq_length=3)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    return put(tmp_path_factory.mktemp("two") / "x", [9, 9])


@given(
    name=st.sampled_from(["documents", "samples", "shuffle"]),
    place=st.integers(0, 11),
    value=st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 12),
)
def test_a_damaged_index_gives_whole_samples_or_is_refused(
    two: Indexed, name: str, place: int, value: int
) -> None:
    indices = build(two.lengths, REQUEST)
    arrays = {
        key: getattr(indices, key).astype(np.int64) for key in ("documents", "samples", "shuffle")
    }
    arrays[name].ravel()[place % arrays[name].size] = value
    samples = Samples(two, Indices(**arrays), 3)
    for k in range(5):
        with suppress(UsageError):
            assert samples[k].shape == (4,)


def test_an_index_of_other_data_is_refused(two: Indexed) -> None:
    samples = Samples(two, build(np.array([4, 14], np.int32), REQUEST), 3)
    with pytest.raises(UsageError, match="is not where its index says: the index is damaged or of"):
        [samples[k] for k in range(5)]


@pytest.mark.parametrize(
    ("sequences", "s"), [(1000, 10), (100_000, 10), (100_000, 40), (100_000, 4096)]
)
@pytest.mark.parametrize("epochs", [None, 1.0, 2.3, 2.9])
def test_it_takes_the_memory_that_is_reckoned(sequences: int, s: int, epochs: float | None) -> None:
    tokens = 2_000_000
    lengths = np.full(sequences, tokens // sequences, np.int32)
    samples = None if epochs is None else int(epochs * tokens / s)
    request = Request(sequences=range(sequences), samples=samples, seq_length=s)
    made, most = peak(lambda: build(lengths, request))
    reckoned = memory(len(made.documents), len(made.shuffle))
    assert reckoned / 1.6 < most - SMALL < reckoned

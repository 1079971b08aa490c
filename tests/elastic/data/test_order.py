"""Places to sample ids: every epoch has every sample once, whoever trains and whatever interrupts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data import Order, places
from elastic.proto.errors import UsageError

LIVES = st.lists(st.tuples(st.integers(1, 9), st.integers(9, 40), st.integers(0, 30)), max_size=6)
"""World size, global batch and steps of each life of a job."""


@given(length=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**9))
def test_an_epoch_has_every_sample_once(length: int, seed: int, epoch: int) -> None:
    ids = Order(length=length, seed=seed).ids(places(epoch * length, length))
    assert sorted(ids) == list(range(length))


@given(length=st.integers(1, 200), seed=st.integers(0, 2**32), lives=LIVES)
def test_no_sample_is_lost_or_repeated_over_lives_of_any_world(
    length: int, seed: int, lives: list[tuple[int, int, int]]
) -> None:
    consumed, dealt = 0, []
    for world, batch, steps in lives:
        for _ in range(steps):
            shares = [places(consumed, batch, rank, world) for rank in range(world)]
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            dealt += [share[i] for i in range(len(shares[0])) for share in shares if i < len(share)]
            consumed += batch
    order = Order(length=length, seed=seed)
    seen = order.ids(np.array(dealt, np.int64)).tolist()
    assert seen == order.ids(places(0, consumed)).tolist()
    for epoch in range(consumed // length):
        assert sorted(seen[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(length=st.integers(10**9, 10**12), place=st.integers(0, 2**60))
def test_a_huge_dataset_costs_nothing(length: int, place: int) -> None:
    ids = Order(length=length, seed=5).ids(places(place, 1000))
    assert ((ids >= 0) & (ids < length)).all()
    assert len(set(ids.tolist())) == 1000 or place // length != (place + 999) // length


def test_epochs_and_seeds_differ_as_chance_would_have_it() -> None:
    """What stays in its place, and what follows its neighbour, is about one of a thousand."""
    count = 1000
    orders = [
        Order(length=count, seed=seed).ids(places(epoch * count, count))
        for seed in range(10)
        for epoch in range(10)
    ]
    for number, ids in enumerate(orders[1:]):
        assert (ids == orders[number]).sum() < 12
        assert (np.diff(ids) == 1).sum() < 12
    kept = sum((ids == np.arange(count)).sum() for ids in orders)
    assert 60 < kept < 140  # a hundred permutations keep a hundred


def test_each_sample_comes_to_each_part_of_an_epoch_alike() -> None:
    count, runs = 50, 400
    counts = np.zeros((count, 5))
    for seed in range(runs):
        ids = Order(length=count, seed=seed).ids(places(0, count))
        counts[ids, np.arange(count) // 10] += 1
    expected = runs / 5
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert 130 < chi_squared < 270  # 196 degrees of freedom: four deviations of 20


def test_without_shuffling_it_is_by_id() -> None:
    assert Order(length=4, shuffle=False).ids(places(2, 6)).tolist() == [2, 3, 0, 1, 2, 3]


def test_the_order_is_fixed_for_all_time() -> None:
    # A run that resumes on another machine, or after an upgrade, counts on these.
    assert Order(length=10, seed=3).ids(places(5, 10)).tolist() == [1, 0, 8, 9, 4, 3, 7, 5, 9, 4]
    assert Order(length=10**10, seed=2**64 - 1).ids(places(10**17, 3)).tolist() == [
        1897776728,
        8186114798,
        988446452,
    ]


@pytest.mark.parametrize(
    ("length", "seed", "why"),
    [
        (0, 0, "without samples"), (1, -1, "seed"), (1, 2**64, "seed"), (2.5, 0, "length is a whole number"),
        (1, 0.5, "seed is a whole number"), (1, None, "seed is a whole number"),
    ],
)  # fmt: skip
def test_what_has_no_order_is_said(length: Any, seed: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Order(length=length, seed=seed)

"""Any number of ranks runs the same leaves, each once, with no more padding than must be."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from elastic.data import ElasticSampler, Leaves, Order, exact, places
from elastic.proto.errors import UsageError

CUTS = st.builds(
    lambda count, leaf, multiple, at_least: Leaves(
        batch_size=count * leaf, leaf_size=leaf, multiple=multiple, at_least=at_least
    ),
    *[st.integers(1, most) for most in (40, 4, 5, 7)],
)


@given(cut=CUTS, consumed=st.integers(0, 2**60), size=st.integers(1, 45))
def test_every_world_runs_each_leaf_once(cut: Leaves, consumed: int, size: int) -> None:
    ranks = [cut.of(consumed, rank, size) for rank in range(size)]
    for rank, mine in enumerate(ranks):
        assert [leaf.number for leaf in mine] == list(range(rank, size * len(mine), size))
    leaves = [leaf for mine in ranks for leaf in mine]
    real = [leaf for leaf in leaves if leaf.weight]
    assert sorted(leaf.number for leaf in real) == list(range(cut.count))
    samples = Counter(np.concatenate([leaf.places for leaf in real]).tolist())
    assert samples == Counter(range(consumed, consumed + cut.batch_size))
    assert {leaf.weight for leaf in real} == {1 / cut.batch_size}
    alone = {leaf.number: leaf.places.tolist() for leaf in cut.of(consumed, 0, 1)}
    for leaf in leaves:  # a padding leaf's samples are those of a real one
        assert leaf.places.tolist() == alone[leaf.number % cut.count]
        assert len(leaf.places) == cut.leaf_size


@given(cut=CUTS, size=st.integers(1, 45))
def test_padding_is_as_little_as_must_be(cut: Leaves, size: int) -> None:
    legal = (n for n in range(cut.at_least, 200) if n % cut.multiple == 0 and n * size >= cut.count)
    assert {len(cut.of(0, rank, size)) for rank in (0, size - 1)} == {next(legal)}
    run = size * cut.per_rank(size)
    assert cut.waste(size) == pytest.approx((run - cut.count) / run)
    if cut.multiple == cut.at_least == 1:
        formula = 1 - cut.count / (size * math.ceil(cut.count / size))
        assert cut.waste(size) == pytest.approx(formula)


def test_64_leaves_on_7_ranks_waste_what_the_docs_say() -> None:
    leaves = Leaves(batch_size=64, leaf_size=1)
    assert (leaves.per_rank(7), round(leaves.waste(7), 3)) == (10, 0.086)
    assert leaves.waste(16) == 0


@given(
    share=st.integers(1, 6),
    size=st.integers(1, 6),
    leaf=st.integers(1, 5),
    consumed=st.integers(0, 99),
)
def test_where_all_divides_a_rank_has_the_samples_that_it_has_without_leaves(
    share: int, size: int, leaf: int, consumed: int
) -> None:
    batch = share * size * leaf
    cut = Leaves(batch_size=batch, leaf_size=leaf)
    for rank in range(size):
        mine = np.concatenate([leaf.places for leaf in cut.of(consumed, rank, size)])
        assert sorted(mine) == places(consumed, batch, rank, size).tolist()


def test_leaves_are_fixed_for_all_time() -> None:
    leaves = Leaves(batch_size=12, leaf_size=3).of(100, rank=1, size=3)
    found = [(leaf.number, leaf.places.tolist(), leaf.weight) for leaf in leaves]
    assert found == [(1, [101, 105, 109], 1 / 12), (4, [100, 104, 108], 0.0)]


@pytest.mark.parametrize(
    ("batch", "leaf", "rank", "why"),
    [
        (12, 5, 0, "12 samples is no whole number of micro-batches of 5"),
        (12, 0, 0, "at least 1"),
        (12, 4, 3, "no rank 3 of 3"),
    ],
)
def test_what_cannot_be_cut_is_said(batch: int, leaf: int, rank: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Leaves(batch_size=batch, leaf_size=leaf).of(0, rank, 3)


@pytest.mark.parametrize("name", ["batch_size", "leaf_size", "multiple", "at_least"])
@pytest.mark.parametrize("number", [0, -1, 8.0, 2.5, True, "2", None])
def test_leaves_are_counted_in_whole_numbers(name: str, number: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} is (a whole number|at least 1), not "):
        Leaves(**{"batch_size": 8, "leaf_size": 2, name: number})


@pytest.mark.parametrize("size", [0, -1, 1.0, None])
def test_and_so_are_ranks_and_samples(size: Any) -> None:
    leaves = Leaves(batch_size=np.int64(8), leaf_size=2)  # type: ignore[arg-type]
    for call in (leaves.per_rank, leaves.waste):
        with pytest.raises(UsageError, match=r"^a number of ranks is "):
            call(size)
    with pytest.raises(UsageError, match=r"no rank 0 of|number of ranks is"):
        leaves.of(0, 0, size)
    for consumed in (-1, 0.5, True):
        with pytest.raises(UsageError, match=r"^consumed is "):
            leaves.of(consumed, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^a rank is a whole number"):
        leaves.of(0, 0.5, 1)  # type: ignore[arg-type]


LENGTH, BATCH, LEAF = 50, 12, 2
"""Samples of the dataset, of a step, of a leaf."""


def step_of(
    rank: int, world: int, place: dict[str, object]
) -> tuple[torch.Tensor, dict[str, object]]:
    """A team's own loop, for one step: this rank's fp64 gradient on the grid, and the sampler's state."""
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((LENGTH, 8))).float()
    model = torch.nn.Linear(7, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    sampler = ElasticSampler(LENGTH, BATCH, leaf_size=LEAF, rank=rank, num_replicas=world)
    sampler.load_state_dict(place)
    loader = DataLoader(TensorDataset(rows), batch_sampler=sampler)
    offset = exact.offsets(torch.tensor([10]), BATCH // LEAF)
    total = torch.zeros(model.weight.shape, dtype=torch.float64)
    for (batch,), weight, last in sampler.leaves(loader):
        losses = (model(batch[:, :7]) - batch[:, 7:]).square()
        model.zero_grad()
        (losses.sum() * weight).backward()
        assert model.weight.grad is not None
        total += exact.rounded(model.weight.grad, offset[0])
        if last:
            return total, sampler.state_dict()
    raise AssertionError("an epoch without a step")


def test_a_loop_over_leaves_takes_the_same_step_in_any_world() -> None:
    place = ElasticSampler(LENGTH, 1, rank=0, num_replicas=1).state_dict() | {"consumed": 36}
    truth, after = step_of(0, 1, place)
    assert after["consumed"] == 48
    rows = np.random.default_rng(0).standard_normal((LENGTH, 8)).astype(np.float32)
    rows = rows[Order(length=LENGTH).ids(places(36, BATCH))].astype(np.float64)
    error = rows[:, :7].sum(1) - rows[:, 7]
    assert truth[0].tolist() == pytest.approx(2 * (error[:, None] * rows[:, :7]).mean(0), rel=1e-5)
    for world in (2, 3, 4, 5, 7, 13):  # more ranks than leaves, and than samples
        steps = [step_of(rank, world, place) for rank in range(world)]
        assert torch.equal(sum((part for part, _ in steps), torch.zeros_like(truth)), truth), world
        assert all(state == after for _, state in steps)


def test_a_batch_is_consumed_with_its_last_leaf() -> None:
    sampler = ElasticSampler(LENGTH, BATCH, leaf_size=LEAF, rank=3, num_replicas=4)
    loader = DataLoader(TensorDataset(torch.arange(LENGTH)), batch_sampler=sampler)
    assert len(sampler) == len(loader) == 5 * 2
    found = []
    for (ids,), weight, last in sampler.leaves(loader):
        found.append((ids.tolist(), weight > 0, last, sampler.consumed))
        if len(found) == 3:
            break  # within the second step, which is then taken from its start
    found += [
        (ids.tolist(), weight > 0, last, sampler.consumed)
        for (ids,), weight, last in sampler.leaves(loader)
    ]
    order = Order(length=LENGTH)
    cut = Leaves(batch_size=BATCH, leaf_size=LEAF)
    wanted = []
    for consumed in (0, 12, 12, 24, 36, 48):
        for number, leaf in enumerate(cut.of(consumed, 3, 4)):
            last = number == 1
            wanted.append(
                (order.ids(leaf.places).tolist(), number == 0, last, consumed + 12 * last)
            )
    del wanted[3]  # where the first loop was left
    assert found == wanted


def test_leaves_and_batches_are_not_mistaken_for_one_another() -> None:
    with_leaves = ElasticSampler(9, 3, leaf_size=1, rank=0, num_replicas=1)
    without = ElasticSampler(9, 3, rank=0, num_replicas=1)
    with pytest.raises(UsageError, match=r"loop over sampler.leaves\(loader\)"):
        next(with_leaves.batches([]))
    with pytest.raises(UsageError, match="leaf_size="):
        next(without.leaves([]))
    with pytest.raises(UsageError, match="no whole number"):
        ElasticSampler(9, 3, leaf_size=2, rank=0, num_replicas=1)

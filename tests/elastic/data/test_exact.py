"""The exact grid against exact arithmetic: any order, any ranks, any tree of partial sums, the same bits."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastic.data import exact

LARGEST = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF, torch.float32: 0x7F7FFFFF}
"""The bits of each dtype's largest finite number."""


@st.composite
def finite(draw: st.DrawFn, leaves: int, elements: int) -> Tensor:
    """[leaves, elements] of any dtype, of any bits: zeros, subnormals, every magnitude."""
    dtype = draw(st.sampled_from(list(LARGEST)))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    low = draw(st.integers(0, LARGEST[dtype]))
    high = draw(st.integers(low, LARGEST[dtype]))
    bits = chance.integers(low, high, (leaves, elements), endpoint=True)
    bits[chance.random(bits.shape) < 0.1] = draw(st.sampled_from([0, 1, high]))
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    values = torch.from_numpy(bits).to(kind).view(dtype)
    return torch.where(torch.from_numpy(chance.random(bits.shape)) < 0.5, values, -values)


def on_tops(leaves: Tensor, headroom: int = exact.HEADROOM) -> tuple[Tensor, int]:
    """The leaves on the grid of their own magnitudes, and its exponent e."""
    tops = exact.next_tops(exact.largest(leaves)[None], exact.unknown_tops(1), headroom)
    offset = exact.offsets(tops, len(leaves))
    return exact.rounded(leaves, offset[0]), int(math.log2(offset.item() / 1.5)) - 52


def sums(leaves: Tensor, chance: random.Random) -> Tensor:
    """In a random order, over random ranks, by a random tree: fp64 [elements]."""
    order = chance.sample(range(len(leaves)), len(leaves))
    ranks = chance.randint(1, len(leaves) + 2)
    totals = [torch.zeros(leaves.shape[1], dtype=torch.float64) for _ in range(ranks)]
    for place, leaf in enumerate(order):
        totals[place % ranks] += leaves[leaf]
    while len(totals) > 1:
        totals.append(totals.pop(chance.randrange(len(totals))) + totals.pop(0))
    return totals[0]


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int64).tolist()


@given(st.integers(1, 40).flatmap(lambda leaves: finite(leaves, 8)), st.randoms())
def test_any_order_any_ranks_and_any_tree_give_the_same_bits(
    leaves: Tensor, chance: random.Random
) -> None:
    on_grid, exponent = on_tops(leaves)
    first = sums(on_grid, chance)
    for _ in range(4):
        assert bits(sums(on_grid, chance)) == bits(first)
    bound = Fraction(2) ** (exponent - 1) * len(leaves)
    for column in range(leaves.shape[1]):
        true = sum(map(Fraction, leaves[:, column].double().tolist()), Fraction())
        held = sum(map(Fraction, on_grid[:, column].double().tolist()), Fraction())
        assert Fraction(first[column].item()) == held
        assert abs(held - true) <= bound
    if not leaves.any():
        return
    tightest = 2.0 ** (2 * max(2, (len(leaves) - 1).bit_length()) + exact.HEADROOM - 53)
    assert bound <= Fraction(tightest) * Fraction(exact.largest(leaves).item())


@pytest.mark.parametrize("count", [3, 4, 5, 31, 32, 33, 1024])
def test_it_holds_with_no_bit_to_spare(count: int) -> None:
    """All leaves but one as large as can be, and one that is of the last bit."""
    leaves = torch.full((count, 1), 2 - 2.0**-23)
    _, exponent = on_tops(leaves, headroom=0)
    leaves[0] = 2.0**exponent
    on_grid, same = on_tops(leaves, headroom=0)
    assert (same, on_grid.tolist()) == (exponent, leaves.tolist())
    true = sum(map(Fraction, leaves.flatten().tolist()), Fraction())
    assert Fraction(sums(on_grid, random.Random(count)).item()) == true
    assert true / Fraction(2) ** exponent > 2**51, "there were bits to spare"


@given(finite(6, 8))
def test_a_value_goes_to_the_nearest_multiple_and_ties_to_even(leaves: Tensor) -> None:
    on_grid, exponent = on_tops(leaves)
    step = Fraction(2) ** exponent
    assert on_grid.dtype == leaves.dtype
    for before, after in zip(leaves.flatten().tolist(), on_grid.flatten().tolist(), strict=True):
        assert Fraction(after) == round(Fraction(before) / step) * step
        assert math.copysign(1, after) == 1 or after < 0, "a negative zero"


def heavy(count: int, elements: int) -> Tensor:
    """fp32 leaves whose magnitudes spread over 2^150."""
    chance = np.random.default_rng(0)
    return torch.from_numpy(chance.standard_cauchy((count, elements)) ** 7).float()


def test_off_the_grid_the_order_shows_and_on_it_the_error_is_small() -> None:
    leaves, chance = heavy(24, 4000), random.Random(0)
    assert (sums(leaves, chance) != sums(leaves, chance)).double().mean() > 0.2
    on_grid, _ = on_tops(leaves, headroom=3)
    first = sums(on_grid, chance)
    for _ in range(10):
        assert bits(sums(on_grid, chance)) == bits(first)
    truth = np.array([math.fsum(column) for column in leaves.double().T.tolist()])
    assert np.abs(first.numpy() - truth).max() <= 1.2e-12 * exact.largest(leaves).item()


def reduced(
    leaves: list[list[Tensor]], tops: Tensor, ranks: int
) -> tuple[list[Tensor], Tensor, int]:
    """A step of gradients [leaf][tensor] over `ranks`: their sums, the next tops, and its tries."""
    tries = 0
    while True:
        tries += 1
        offsets = exact.offsets(tops, len(leaves))
        totals = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in leaves[0]]
        seen = []
        for rank in range(ranks):
            mine = [torch.zeros_like(total) for total in totals]
            for leaf in leaves[rank::ranks]:
                seen.append(torch.stack([exact.largest(tensor) for tensor in leaf]))
                for number, tensor in enumerate(leaf):
                    mine[number] += exact.rounded(tensor, offsets[number])
            for total, part in zip(totals, mine, strict=True):
                total += part
        magnitudes = torch.stack(seen).amax(0)
        fitting = bool(exact.fits(magnitudes, tops).all())
        tops = exact.next_tops(magnitudes, tops)
        if fitting:
            return totals, tops, tries


def test_steps_are_the_same_in_every_world_and_only_great_jumps_are_done_again() -> None:
    """The second tensor is all zeros at first, as that of an unused layer."""
    scales = [1.0, 3.0, 2.0**9, 2.0**-20, 2.0**-20, 1.0]
    steps = [
        [[tensor * scale, tensor[:50] * (step > 1)] for tensor in heavy(6, 200)]
        for step, scale in enumerate(scales)
    ]
    runs = []
    for ranks in (1, 2, 4, 5, 7):
        tops, done, tries = exact.unknown_tops(2), [], []
        for leaves in steps:
            totals, tops, tried = reduced(leaves, tops, ranks)
            done += [bits(total) for total in totals]
            tries.append(tried)
        runs.append((done, tops.tolist()))
        assert tries == [2, 1, 2, 1, 1, 2], "the first, the first of the second tensor, the jump"
    assert all(run == runs[0] for run in runs)


def test_a_jump_by_the_headroom_is_exact_and_one_bit_more_is_said() -> None:
    tops = exact.next_tops(torch.tensor([1.0]), exact.unknown_tops(1))
    assert exact.fits(torch.tensor([2.0**exact.HEADROOM]), tops)
    assert not exact.fits(torch.tensor([2.0 ** (exact.HEADROOM + 1) * 1.01]), tops)


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_what_is_no_number_is_seen_and_stays(dtype: torch.dtype) -> None:
    gradient = torch.tensor([1.0, math.inf, -math.inf, math.nan, -0.0], dtype=dtype)
    tops = torch.tensor([7, exact.UNKNOWN])
    magnitudes = exact.largest(gradient).expand(2)
    assert exact.largest(gradient[1:3]) == exact.largest(gradient[3:]) == math.inf
    assert exact.fits(magnitudes, tops).all(), "there is nothing to be done again"
    assert exact.next_tops(magnitudes, tops).tolist() == tops.tolist()
    on_grid = exact.rounded(gradient, exact.offsets(tops, 4)[0]).tolist()
    assert on_grid[:3] == [1.0, math.inf, -math.inf]
    assert math.isnan(on_grid[3])
    assert math.copysign(1, on_grid[4]) == 1
    assert exact.norm(
        exact.squares(gradient, exact.square_exponents(tops[:1], torch.tensor([5]))[0])[None]
    ).isnan()


def test_a_part_without_elements_is_a_part() -> None:
    empty = torch.empty(0)
    assert exact.largest(empty) == 0
    assert (
        exact.squares(
            empty, exact.square_exponents(torch.tensor([3]), torch.tensor([10]))[0]
        ).tolist()
        == [0.0] * exact.LIMBS
    )


def test_many_tensors_at_once_are_as_each_by_itself() -> None:
    parts = heavy(5, 300).nan_to_num(posinf=1.0, neginf=1.0)
    parts[3] = 0
    tops = exact.next_tops(exact.largest_of_each(list(parts)), torch.zeros(5).long(), headroom=0)
    exponents = exact.square_exponents(tops, torch.tensor([300] * 5))
    for number, part in enumerate(parts):
        assert exact.largest_of_each([part]) == exact.largest(part)
        alone = exact.squares(part, exponents[number])
        assert bits(exact.squares(parts, exponents)[number]) == bits(alone)
    strange = [torch.tensor([1, bad, 2]) for bad in (math.nan, math.inf, -math.inf)]
    assert exact.largest_of_each(strange).tolist() == [math.inf] * 3


def limbs(tensor: Tensor, chance: random.Random) -> Tensor:
    """Of a tensor that lies, permuted, in random parts: fp64 [LIMBS]."""
    top = exact.next_tops(exact.largest(tensor)[None], exact.unknown_tops(1), headroom=0)[0]
    order = torch.tensor(chance.sample(range(len(tensor)), len(tensor)))
    cuts = sorted(chance.choices(range(len(tensor) + 1), k=chance.randint(0, 5)))
    total = torch.zeros(exact.LIMBS, dtype=torch.float64)
    for part in torch.tensor_split(tensor[order], cuts):
        total += exact.squares(
            part, exact.square_exponents(top[None], torch.tensor([len(tensor)]))[0]
        )
    return total


@given(finite(1, 60), st.randoms())
def test_a_norm_is_the_same_however_its_tensor_lies(leaves: Tensor, chance: random.Random) -> None:
    tensor = leaves[0]
    found = [limbs(tensor, chance) for _ in range(3)]
    assert all(bits(one) == bits(found[0]) for one in found)
    true = sum((Fraction(value) ** 2 for value in tensor.tolist()), Fraction())
    held = sum(map(Fraction, found[0].tolist()), Fraction())
    assert abs(held - true) <= true * 60**4 / Fraction(2) ** 160


def test_a_norm_is_of_all_tensors_and_rounded_once() -> None:
    chance = np.random.default_rng(0)
    spread = torch.from_numpy(np.exp(chance.standard_normal((2, 2**14)))).float()
    tensors = [spread[0], spread[1].bfloat16(), torch.zeros(4)]
    found = exact.norm(torch.stack([limbs(tensor, random.Random(0)) for tensor in tensors]))
    true = math.sqrt(math.fsum(value**2 for tensor in tensors for value in tensor.tolist()))
    assert found.dtype == torch.float32
    assert found.item() == torch.tensor(true).item()
    plain = [sorted(spread[0].tolist(), reverse=falls) for falls in (False, True)]
    assert sum(x * x for x in plain[0]) != sum(x * x for x in plain[1]), "this shows an order"

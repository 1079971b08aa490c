"""The comparisons behind the product's verdict, with a bit flipped."""

import math

import pytest
import torch

from elastic.agent.probes.matmul import (
    SIZES,
    TILE,
    Size,
    bits,
    check,
    checksum,
    difference,
    elements,
    largest,
    matrix,
    wrong,
)
from elastic.agent.probes.program import Fault

CPU = torch.device("cpu")
N = 256


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def product(request: pytest.FixtureRequest) -> torch.Tensor:
    """[256, 256], right in every bit."""
    exact = matrix(N, 0, CPU).double() @ matrix(N, 1, CPU).double()
    return exact.to(request.param)


def looked_at() -> torch.Tensor:
    """A row that `check` looks at in the second tile, by its rule."""
    at = TILE
    return torch.tensor(at + at // TILE * 37 % TILE)


def flip(product: torch.Tensor, row: int, column: int, bit: int) -> None:
    bits(product)[row, column] ^= 1 << bit


@pytest.mark.parametrize("size", SIZES.values(), ids=lambda size: str(size.n))
def test_fp32_adds_up_the_products_without_rounding(size: Size) -> None:
    most = largest(size.n)
    assert size.n * most**2 < 1 << 24
    assert most <= 256, "bf16 has no odd number beyond"
    assert most > 1


def test_the_numbers_are_spread_over_their_range() -> None:
    numbers = matrix(N, 0, CPU)
    most = largest(N)
    assert numbers.min() == -most
    assert numbers.max() == most
    assert abs(numbers.double().mean()) < most / math.sqrt(N)
    assert not torch.equal(numbers, matrix(N, 1, CPU))


def test_a_part_of_a_matrix_is_what_the_whole_has_there() -> None:
    rows, columns = torch.tensor([3, 200]), torch.tensor([0, 77, 255])
    whole = matrix(N, 1, CPU)
    assert torch.equal(elements(rows, columns, N, 1), whole[rows][:, columns])


def test_a_right_product_passes(product: torch.Tensor) -> None:
    check(product)
    assert not difference(product, product.clone())


@pytest.mark.parametrize("bit", range(16))
def test_one_flipped_bit_between_two_results_is_seen(product: torch.Tensor, bit: int) -> None:
    again = product.clone()
    flip(again, 100, 200, bit)
    assert difference(product, again).startswith("1 elements differ: row 100, column 200 was ")
    assert checksum(product) != checksum(again)


@pytest.mark.parametrize("bit", range(15))
def test_one_flipped_bit_of_an_element_looked_at_is_seen(product: torch.Tensor, bit: int) -> None:
    """Half a unit in the last place is what rounding may do, and a bit is a whole one."""
    place = int(looked_at())
    flip(product, place, place, bit)
    with pytest.raises(Fault, match=f"1 of 4 elements of a product are wrong: row {place}, "):
        check(product)


def test_no_number_is_in_no_bound() -> None:
    true = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    for bad in (math.nan, math.inf, -math.inf):
        got = torch.tensor([[1.0, bad]])
        assert wrong(got, true, torch.tensor([5, 6])).startswith("1 of 2 elements")


def test_rounding_to_the_dtype_is_no_error() -> None:
    true = torch.linspace(-3e5, 3e5, 10_000, dtype=torch.float64)[None, :]
    places = torch.arange(10_000)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = true.to(dtype)
        assert not wrong(rounded, true, places)
        flipped = rounded.clone()
        bits(flipped)[:] ^= 1
        assert wrong(flipped, true, places).startswith("10000 of 10000"), "a bit is more than half"

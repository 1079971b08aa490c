"""Sums of bits, and what is said of those that differ; the ranks are in tests/trainer/run/test_replicas.py."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic import replicas
from elastic.proto.errors import UsageError
from elastic.replicas import checksum, judge

KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
SIZES = [1, 2, 3, 7, 8, 9, 1000, (1 << 18) + 5, (1 << 20) + 3]


def made(size: int, kind: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=generator).to(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_any_bit_that_turns_over_changes_the_sum(size: int, kind: torch.dtype) -> None:
    tensor = made(size, kind)
    before = int(checksum(tensor))
    data = tensor.view(torch.uint8)
    for at in {0, len(data) // 2, len(data) - 1}:
        for bit in (0, 7) if kind != torch.bool else (0,):
            data[at] ^= 1 << bit
            assert int(checksum(tensor)) != before, (at, bit)
            data[at] ^= 1 << bit
    assert int(checksum(tensor)) == before


@given(st.integers(2, 600), st.data())
def test_elements_that_change_places_change_the_sum(size: int, data: st.DataObject) -> None:
    tensor = torch.arange(size, dtype=torch.float32)
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    assert int(checksum(swapped)) != int(checksum(tensor))


@given(st.integers(0, 63), st.data())
def test_two_bits_that_turn_over_do_not_cancel_out(bit: int, data: st.DataObject) -> None:
    """The same one of two words, so that a plain sum would not see it."""
    tensor = made(500, torch.int64) * 12345
    places = data.draw(st.lists(st.integers(0, 499), min_size=2, max_size=2, unique=True))
    spoiled = tensor.clone()
    for place in places:
        spoiled[place] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
    assert int(checksum(spoiled)) != int(checksum(tensor))


def test_the_sum_is_of_bits_not_of_how_they_lie() -> None:
    tensor = torch.randn(33, 70, generator=torch.Generator().manual_seed(1))
    whole = int(checksum(tensor))
    assert int(checksum(tensor.t().contiguous().t())) == whole
    assert int(checksum(torch.cat((torch.ones(1), tensor.view(-1)))[1:].view(33, 70))) == whole
    assert int(checksum(torch.tensor(0.0))) != int(checksum(torch.tensor(-0.0)))


def test_several_rows_at_once_add_up_to_what_they_do_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU; there is none here."""
    tensor = torch.arange(3 * replicas._ROW + 5)
    one_by_one = int(checksum(tensor))
    *whole, rest = list(replicas._words(tensor.view(torch.uint8)))
    monkeypatch.setattr(replicas, "_words", lambda flat: iter([torch.cat(whole), rest]))
    assert len(whole) == 3
    assert int(checksum(tensor)) == one_by_one


def test_an_empty_part_has_a_sum() -> None:
    assert int(checksum(torch.zeros(0))) == int(checksum(torch.zeros(0)))


# --- who ---------------------------------------------------------------------------------------


def said(table: list[list[int]]) -> str:
    names = [f"t{number}" for number in range(len(table[0]))]
    return str(judge(names, {rank: f"n{rank // 2}" for rank in range(len(table))}, table))


def test_nobody_differs() -> None:
    assert judge(["a", "b"], {0: "n0", 1: "n0"}, [[1, 2], [1, 2]]) is None


def test_the_odd_one_of_three_is_named_with_its_node_and_tensors() -> None:
    assert said([[1, 2], [1, 2], [1, 3]]) == (
        "rank 2 on n1 does not hold what 2 of 3 replicas hold of t1"
    )


def test_many_tensors_are_counted() -> None:
    assert said([[1] * 5, [1] * 5, [2] * 5]).endswith("hold of t0, t1, t2 and 2 more")


def test_of_two_nobody_is_named() -> None:
    assert said([[1], [2]]) == (
        "rank 0 on n0 and rank 1 on n0 differ in t0: of two that differ nobody can say which is wrong"
    )


def test_half_of_them_are_no_majority() -> None:
    assert "rank 3 on n1 differ in t0: no more than half" in said([[1], [1], [2], [2]])
    assert "nobody can say which are wrong" in said([[1], [2], [3], [4]])


def test_each_tensor_is_judged_by_itself() -> None:
    found = judge(["a", "b"], dict.fromkeys(range(4), "n"), [[1, 1], [1, 1], [1, 2], [9, 2]])
    assert found is not None
    assert [(one.rank, one.tensors) for one in found.odd] == [(3, ("a",))]
    assert found.undecided == ("b",)


@given(st.integers(3, 40), st.data())
def test_less_than_half_are_always_found_and_nobody_else(size: int, data: st.DataObject) -> None:
    odd = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=(size - 1) // 2))
    table = [[rank + 100 if rank in odd else 7] for rank in range(size)]
    found = judge(["a"], dict.fromkeys(range(size), "n"), table)
    assert found is not None
    assert {one.rank for one in found.odd} == odd
    assert found.undecided == ()


# --- what is compared ----------------------------------------------------------------------------


def test_what_is_compared_of_a_model_and_its_optimizer() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert list(replicas.tensors(model, optimizer)) == ["weight", "bias"]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moments = ("", " step", " exp_avg", " exp_avg_sq")
    found = replicas.tensors(model, optimizer)
    assert list(found) == [f"{name}{one}" for name in ("weight", "bias") for one in moments]


def test_a_world_of_one_differs_in_nothing() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert replicas.compare(replicas.tensors(torch.nn.Linear(2, 2))) is None
    finally:
        dist.destroy_process_group()


def test_what_is_sharded_over_the_group_is_refused_and_over_another_is_not() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found = {"weight": distribute_tensor(torch.ones(4), mesh["shard"], [Shard(0)])}
        assert replicas.compare(found, mesh["replicate"].get_group()) is None
        with pytest.raises(UsageError, match="weight is sharded over the ranks that are compared"):
            replicas.compare(found, mesh["shard"].get_group())
        with pytest.raises(UsageError, match="weight is sharded"):
            replicas.compare(found)
    finally:
        dist.destroy_process_group()

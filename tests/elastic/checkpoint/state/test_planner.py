"""A plan that is kept from save to save is the one that would be made anew, whatever became of the state;
and what ranks divide has no holes that nobody finds."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.agent.snapshots.uneven import uneven
from elastic.checkpoint.state import share
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import Piece
from elastic.checkpoint.state.planner import Planner, Share
from elastic.checkpoint.state.tensors import Part
from elastic.proto.errors import CheckpointError
from elastic.proto.sums import Chunk

HERE = Place(rank=1, world_size=4, local_rank=1, local_world_size=2)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    mesh_of.cache_clear()
    dist.destroy_process_group()


# --- states, and what becomes of them ------------------------------------------------------------

State = dict[str, Any]
MADE: list[Callable[[], torch.Tensor]] = [
    lambda: torch.ones(2, 3),
    lambda: torch.ones(3, 2).t(),
    lambda: torch.ones(2, 3, dtype=torch.int32),
    lambda: torch.ones(6),
    lambda: torch.ones(2, 1).expand(2, 3),
    lambda: torch.empty(0, 3),
    lambda: torch.ones(()),
    lambda: nn.Parameter(torch.ones(2, 3)),
    lambda: sharded(2, Shard(0), Replicate()),
    lambda: sharded(2, Replicate(), Shard(0)),
    lambda: sharded(2, Shard(0), Shard(0)),
    lambda: sharded(2, _StridedShard(0, split_factor=2), Shard(0)),
    lambda: sharded(2, Shard(0), Replicate(), turned=True),
    lambda: sharded(1, Shard(0)),
    lambda: sharded(1, Replicate()),
]


@functools.cache
def mesh_of(dims: int, turned: bool) -> DeviceMesh:
    ranks = torch.arange(4).view((2, 2) if dims == 2 else (4,))
    return DeviceMesh("cpu", ranks.t() if turned else ranks)


def sharded(dims: int, *placements: Any, turned: bool = False) -> DTensor:
    """Of 4 rows and 2 columns. turned: the mesh has this rank in another row."""
    mesh = mesh_of(dims, turned)
    parts = 2 ** sum(not placement.is_replicate() for placement in placements) if dims == 2 else 4
    rows = 4 if all(placement.is_replicate() for placement in placements) else 4 // parts
    return DTensor.from_local(
        torch.ones(rows, 2),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size((4, 2)),
        stride=(2, 1),
    )


def new_state() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return {
        "model": DistributedDataParallel(model),
        "optimizer": torch.optim.Adam(model.parameters()),
        "tensors": {f"{n}": torch.ones(2, 3) for n in range(3)},
        "count": 0,
    }


def changed(state: State, how: tuple[Any, ...]) -> None:
    """`how` begins with what is done."""
    tensors, kind = state["tensors"], how[0]
    if kind == "put":
        tensors[how[1]] = MADE[how[2]]()
    elif kind == "tie":
        if how[2] in tensors:
            tensors[how[1]] = tensors[how[2]]
    elif kind == "untie":
        if how[1] in tensors:
            tensors[how[1]] = tensors[how[1]].detach().clone()
    elif kind == "remove":
        tensors.pop(how[1], None)
    elif kind == "data":  # another memory, of another shape, behind the same object
        found = tensors.get(how[1])
        if type(found) is torch.Tensor and found.dtype is torch.float32:
            found.data = MADE[how[2] % 2]() if how[2] < 10 else torch.ones(5)
    elif kind == "turn":
        found = tensors.get(how[1])
        if type(found) is torch.Tensor and found.dim() == 2:
            found.t_()
    elif kind == "train":  # nobody is there to reduce with
        inner = state["model"].module
        for parameter in [*inner.parameters()][: how[1]]:
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    elif kind == "rate":
        state["optimizer"].param_groups[0]["lr"] = how[1]
    elif kind == "share":
        inner = state["model"].module
        inner[1].weight = (
            inner[0].weight if how[1] else nn.Parameter(inner[0].weight.detach().clone())
        )
    elif kind == "count":
        state["count"] = how[1]


NAMES = st.sampled_from(["0", "1", "2", "3"])
KINDS = st.integers(0, len(MADE) - 1)
CHANGES = st.one_of(
    st.tuples(st.just("put"), NAMES, KINDS),
    st.tuples(st.sampled_from(["tie"]), NAMES, NAMES),
    st.tuples(st.sampled_from(["untie", "remove", "turn"]), NAMES),
    st.tuples(st.just("data"), NAMES, KINDS),
    st.tuples(st.just("train"), st.integers(1, 4)),
    st.tuples(st.just("rate"), st.sampled_from([0.1, 0.125])),
    st.tuples(st.just("share"), st.booleans()),
    st.tuples(st.just("count"), st.sampled_from([1, "x", [1.5]])),
    st.tuples(st.just("apart"), st.booleans()),
)


def looks(one: Share) -> tuple[Any, ...]:
    """All that is to be the same."""
    chunks = [Chunk(end, number) for number, end in enumerate(one.image.chunk_ends())]
    assert one.image.sums_bytes == 16 * len(chunks)
    tensors = {
        name: (t.data_ptr(), t.shape, t.stride(), t.dtype, type(t))
        for name, t in one.tensors.items()
    }
    return one.image, one.values, one.units.of(chunks), one.beliefs, tensors


@given(st.lists(CHANGES, min_size=1, max_size=12))
def test_a_plan_that_is_kept_is_the_one_that_would_be_made(
    group: None, changes: list[tuple[Any, ...]]
) -> None:
    state, kept = new_state(), Planner(HERE)
    kept.share(state)
    for how in changes:
        changed(state, how)
        fresh = Planner(HERE)
        fresh.apart = kept.apart = how[1] if how[0] == "apart" else kept.apart
        assert looks(kept.share(state)) == looks(fresh.share(state)), how


def test_each_kind_of_tensor_in_the_place_of_each_other(group: None) -> None:
    planner = Planner(HERE)
    for first in range(len(MADE)):
        for second in range(len(MADE)):
            for kind in (first, second):
                state = {"x": MADE[kind]()}
                assert looks(planner.share(state)) == looks(Planner(HERE).share(state)), (
                    first,
                    second,
                )


def test_a_plan_is_kept_while_only_values_change(group: None) -> None:
    state, planner = new_state(), Planner(HERE)
    changed(state, ("train", 4))
    before = planner.share(state)
    for how in (("train", 4), ("rate", 0.123456789), ("count", [1, 2, 3])):
        changed(state, how)
        after = planner.share(state)
        assert after.units is before.units, how
        assert after.values != before.values or how[0] == "train"
    state["tensors"]["new"] = torch.ones(1)
    assert planner.share(state).units is not before.units


def test_what_cannot_be_kept_is_refused_also_in_the_place_of_what_can(group: None) -> None:
    state, planner = new_state(), Planner(HERE)
    planner.share(state)
    for bad in (torch.ones(2, 3).to_sparse(), torch.ones(2, 3, device="meta")):
        state["tensors"]["0"] = bad
        with pytest.raises(CheckpointError, match=r"^tensors\.0 is "):
            planner.share(state)


# --- ranks that do not hold the same -------------------------------------------------------------


def part(name: str, size: int, holders: tuple[int, ...]) -> Part:
    piece = Piece(name=name, dtype="uint8", shape=(size,), offset=(0,), extent=(size,))
    return Part(piece=piece, tensor=torch.empty(size, dtype=torch.uint8), holders=holders)


def holes(ranks: list[list[Part]], ties: list[dict[str, str]]) -> tuple[bool, bool]:
    """Whether somebody has what nobody writes, and whether that is seen."""
    written: set[Any] = set()
    wanted: set[Any] = set()
    believed = {}
    for rank, parts in enumerate(ranks):
        here = Place(rank=rank, world_size=len(ranks), local_rank=rank, local_world_size=len(ranks))
        groups = share.groups(parts, here)
        mine = share.mine(groups, rank)
        written |= {one.piece for one in mine}
        written |= {
            (tie, one.piece)
            for one in mine
            for tie, to in ties[rank].items()
            if to == one.piece.name
        }
        wanted |= {one.piece for one in parts}
        wanted |= {
            (tie, one.piece)
            for one in parts
            for tie, to in ties[rank].items()
            if to == one.piece.name
        }
        believed[rank] = share.beliefs(groups, share.shared(parts, ties[rank]))
    return not wanted <= written, uneven(believed)


@given(st.data(), st.integers(2, 4))
def test_holes_are_seen_and_who_holds_the_same_has_none(data: st.DataObject, world: int) -> None:
    everyone = tuple(range(world))
    names = st.sampled_from("abcdef")
    lists = [
        data.draw(st.dictionaries(names, st.sampled_from([1, 1, 1, 2]), max_size=6))
        for _ in everyone
    ]
    tied = [
        {"tie": to} if (to := data.draw(st.sampled_from([None, "a"]))) in one else {}
        for one in lists
    ]
    ranks = [[part(name, size, everyone) for name, size in one.items()] for one in lists]
    torn, seen = holes(ranks, tied)
    assert seen or not torn
    same = [ranks[0]] * world
    assert holes(same, [tied[0]] * world) == (False, False)
    apart = [[share.alone(one, Place(rank=n)) for one in parts] for n, parts in enumerate(ranks)]
    assert holes(apart, tied) == (False, False)

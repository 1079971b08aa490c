"""Taking a state apart: names without wrappers, boxes, holders, ties; what cannot be kept is refused."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.checkpoint.state.collect import Place, collect
from elastic.checkpoint.state.image import SIZES
from elastic.proto.errors import CheckpointError

ALONE = Place()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(4, 2)).sum().backward()
    optimizer.step()


def test_names_are_paths() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer)
    state = {"model": module, "opt": optimizer, "extra": {"x": [torch.ones(1)], "n": 3}}
    found = collect(state, ALONE)
    assert {
        "model.0.weight", "model.0.bias", "model.1.running_mean", "model.1.num_batches_tracked",
        "opt.state.model.0.weight.exp_avg", "opt.state.model.1.bias.step", "extra.x[0]",
    } <= found.parts.keys()  # fmt: skip
    assert all(part.holders == (0,) for part in found.parts.values())
    assert found.parts["model.0.weight"].tensor.data_ptr() == module[0].weight.data_ptr()  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_wrappers_leave_no_trace() -> None:
    plain = collect({"model": model()}, ALONE)
    whole = collect({"model": torch.compile(model())}, ALONE)
    blocks = model()
    blocks[0] = torch.compile(blocks[0])  # type: ignore[index,operator]
    inner = collect({"model": blocks}, ALONE)
    assert plain.parts.keys() == whole.parts.keys() == inner.parts.keys()
    assert plain.values == whole.values == inner.values


def test_an_optimizer_without_its_module_goes_by_number() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer)
    assert "o.state.parameter 1.exp_avg" in collect({"o": optimizer}, ALONE).parts


def test_tied_tensors_are_kept_once() -> None:
    module = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    module[1].weight = module[0].weight
    found = collect({"m": module, "empty": [torch.empty(0), torch.empty(0)]}, ALONE)
    assert found.ties == {"m.1.weight": "m.0.weight"}
    assert found.parts.keys() == {"m.0.weight", "empty[0]", "empty[1]"}


def test_views_that_are_not_the_same_tensor_are_kept_apart() -> None:
    base = torch.arange(4.0)
    state = {
        "a": base,
        "b": base[:2],
        "c": base.view(2, 2),
        "d": base.view(torch.int32),
        "e": base[1:],
    }
    found = collect(state, ALONE)
    assert found.ties == {}
    assert len(found.parts) == 5


DTYPES = sorted(
    {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:.*quantized tensor creation")
@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_of_torch_is_kept_or_refused(name: str) -> None:
    dtype = getattr(torch, name)
    if name in SIZES:
        part = collect({"x": torch.empty(3, dtype=dtype)}, ALONE).parts["x"]
        assert part.piece.dtype == name
        assert part.piece.nbytes == 3 * dtype.itemsize
    else:
        assert re.match("q|bits|u?int[1-7]$", name), f"{name} ought to be kept"
        try:
            tensor = torch.empty(3, dtype=dtype)
        except (RuntimeError, NotImplementedError):
            tensor = torch._empty_affine_quantized([3], scale=1, zero_point=0, dtype=dtype)
        with pytest.raises(CheckpointError, match=r"^x is a .*cannot keep"):
            collect({"x": tensor}, ALONE)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        (
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "layout torch.jagged",
        ),
        (object(), "builtins.object"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(value: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^a\.b\[0\] .*{what}"):
        collect({"a": {"b": [value]}}, ALONE)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(CheckpointError, match="does it hold itself"):
        collect(state, ALONE)


def test_two_paths_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'a\.b' is the name of two tensors"):
        collect({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ALONE)


# --- many ranks ----------------------------------------------------------------------------------


@pytest.fixture
def rank_five_of_eight() -> Iterator[Place]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield Place(rank=5, world_size=8, local_rank=1, local_world_size=4)
    dist.destroy_process_group()


def test_boxes_and_holders(rank_five_of_eight: Place) -> None:
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    place = (1, 0, 1)
    assert tuple(mesh.get_coordinate() or ()) == place
    x = torch.arange(48.0).view(6, 8)
    for placements, offset, extent, holders in (
        ((Replicate(), Replicate(), Replicate()), (0, 0), (6, 8), tuple(range(8))),
        ((Shard(0), Replicate(), Replicate()), (3, 0), (3, 8), (4, 5, 6, 7)),
        ((Replicate(), Shard(0), Shard(1)), (0, 4), (3, 4), (1, 5)),
        ((Replicate(), Shard(1), Shard(1)), (0, 2), (6, 2), (1, 5)),
        ((Shard(1), Shard(0), Replicate()), (0, 4), (3, 4), (4, 5)),
    ):
        tensor = distribute_tensor(x, mesh, placements, src_data_rank=None)
        part = collect({"x": tensor}, rank_five_of_eight).parts["x"]
        assert (part.piece.shape, part.piece.offset, part.piece.extent) == ((6, 8), offset, extent)
        assert part.holders == holders
        box = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
        assert torch.equal(part.tensor, x[box])


def test_uneven_shards(rank_five_of_eight: Place) -> None:
    mesh = DeviceMesh("cpu", torch.arange(8))
    for size, offset, extent in ((9, 9, 0), (11, 10, 1), (3, 3, 0), (16, 10, 2)):
        tensor = distribute_tensor(torch.arange(size), mesh, [Shard(0)], src_data_rank=None)
        part = collect({"x": tensor}, rank_five_of_eight).parts["x"]
        assert (part.piece.offset, part.piece.extent) == ((offset,), (extent,))


def test_partial_sums_are_refused(rank_five_of_eight: Place) -> None:
    mesh = DeviceMesh("cpu", torch.arange(8))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(CheckpointError, match=r"^x is a DTensor with a partial sum"):
        collect({"x": tensor}, rank_five_of_eight)


def test_rows_that_do_not_follow_one_another_are_refused(rank_five_of_eight: Place) -> None:
    """Strided over one dim of the mesh, they only make a box where another splits them."""
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"))
    x = torch.arange(32.0).view(16, 2)
    both = (_StridedShard(0, split_factor=4), Shard(0))
    tensor = distribute_tensor(x, mesh, both, src_data_rank=None)
    part = collect({"x": tensor}, rank_five_of_eight).parts["x"]
    (first,), (rows,) = part.piece.offset[:1], part.piece.extent[:1]
    assert torch.equal(part.tensor, x[first : first + rows])
    alone = distribute_tensor(x, mesh, (both[0], Replicate()), src_data_rank=None)
    with pytest.raises(CheckpointError, match=r"^x is a DTensor whose piece is no box"):
        collect({"x": alone}, rank_five_of_eight)


def test_ddp_keeps_parameters_and_their_optimizer_equal_but_no_buffers(
    rank_five_of_eight: Place,
) -> None:
    group = dist.new_group([1, 3, 5, 7])
    module = nn.parallel.DistributedDataParallel(model(), process_group=group)
    optimizer = torch.optim.Adam(module.parameters())
    train(module.module, optimizer)  # nobody is there to reduce with
    parts = collect(
        {"model": module, "opt": optimizer, "seed": torch.ones(1)}, rank_five_of_eight
    ).parts
    assert parts["model.0.weight"].holders == (1, 3, 5, 7)
    assert parts["opt.state.model.0.weight.exp_avg"].holders == (1, 3, 5, 7)
    assert parts["model.1.running_mean"].holders == (5,)
    assert parts["seed"].holders == (5,)


@pytest.mark.parametrize("how", ["of its own parameters", "with state for its own"])
def test_state_that_only_some_ranks_have_is_each_ranks_own(
    rank_five_of_eight: Place, how: str
) -> None:
    """ZeRO-1 by hand: another rank has the state of the other parameters."""
    module = nn.parallel.DistributedDataParallel(model(), process_group=dist.new_group([4, 5]))
    own = [*module.parameters()][:2]
    every = own if how == "of its own parameters" else [*module.parameters()]
    optimizer = torch.optim.Adam(every)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": module, "opt": optimizer}
    parts = collect(state, rank_five_of_eight).parts
    assert parts["model.0.weight"].holders == (4, 5)
    assert parts["opt.state.model.0.weight.exp_avg"].holders == (5,)
    rest = torch.optim.Adam([*module.parameters()][2:])
    for parameter in [*module.parameters()][2:]:
        parameter.grad = torch.ones_like(parameter)
    rest.step()
    parts = collect(state | {"rest": rest}, rank_five_of_eight).parts
    assert parts["opt.state.model.0.weight.exp_avg"].holders == (4, 5), "together they have all"
    assert parts["rest.state.model.1.bias.exp_avg"].holders == (4, 5)

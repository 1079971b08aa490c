"""Leaves' gradients, added up for FSDP: its own sums, in fewer kernels; in exact mode each on its grid."""

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastic.data import exact
from elastic.proto.errors import UsageError
from elastic.trainer.parallel import accumulators
from elastic.trainer.parallel.accumulators import Accumulator, Forwards, Grids, Kernels, groups
from tests.trainer.forks import whole

LEAVES = 4

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """Two layers, of which a leaf may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulators: list[Accumulator] = []
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, given: Tensor, *, both: bool) -> Tensor:
        hidden: Tensor = self.first(given)
        return self.second(hidden) if both else hidden


def sharded(reduce: torch.dtype, kernels: Kernels | None, grids: Grids | None = None) -> Model:
    torch.manual_seed(1)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    if kernels is not None:
        wrapped.unshard()
        for group in groups(model):
            own = {f"number {n}": one for n, one in enumerate(group.fsdp_params)}
            model.accumulators.append(Accumulator(group, own, grids, kernels))
        wrapped.reshard()
    return model


def run(model: Model, used: str) -> dict[str, Tensor]:
    """Gradients of leaves that use both layers, `b`, or the first one, `f`."""
    drawn = torch.Generator().manual_seed(2)
    for number, which in enumerate(used):
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(number == len(used) - 1)
        given = torch.randn(3, 8, generator=drawn).bfloat16()
        model(given, both=which == "b").float().square().sum().backward()
    return {n: whole(one.grad) for n, one in model.named_parameters() if one.grad is not None}


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return accumulators.kernels(compiled=request.param)


@pytest.mark.parametrize("used", ["b" * LEAVES, "b", "bfbb", "fbb", "bbf", "fff", "fbfb"])
def test_sums_are_those_of_fsdp_whatever_a_leaf_leaves_out(used: str, kernels: Kernels) -> None:
    wanted = run(sharded(torch.float32, None), used)
    found = run(sharded(torch.float32, kernels), used)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


def test_nothing_is_left_for_fsdp_to_add() -> None:
    """Else the test above would be of FSDP alone."""
    added = []

    def add(_: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        added.append([one.dtype for one in sums])

    _, rounds, in_place = accumulators.kernels(compiled=False)
    found = run(sharded(torch.float32, Kernels(add, rounds, in_place)), "b" * LEAVES)
    assert added == [[torch.float32] * 4] * LEAVES
    assert all(not one.any() for one in found.values())


def test_each_leaf_is_rounded_and_its_largest_noted(kernels: Kernels) -> None:
    tops = torch.tensor([5, 6, 7, 8])
    for used in ("b" * LEAVES, "b"):
        grids = Grids(torch.zeros(4), exact.offsets(tops + 40, LEAVES))
        found = run(sharded(torch.float64, kernels, grids), used)
        wanted = [torch.zeros_like(one, dtype=torch.float64) for one in found.values()]
        largest = torch.zeros(4)
        for number in range(len(used)):
            leaf = alone(number, len(used))
            for place, one in enumerate(leaf):
                wanted[place] += exact.rounded(one, grids.offsets[place]).double()
                largest[place] = torch.maximum(largest[place], exact.largest(one))
        assert torch.equal(grids.magnitudes, largest)
        for one, other in zip(found.values(), wanted, strict=True):
            assert torch.equal(one.double(), other.float().double())
        coarse = [bool((one != exact.rounded(one, grids.offsets[0])).any()) for one in leaf]
        assert any(coarse), "grids on which these are anyway"


def alone(number: int, leaves: int) -> list[Tensor]:
    """What one of so many leaves gives, in bf16."""
    torch.manual_seed(1)
    model = Model().bfloat16()
    drawn = torch.Generator().manual_seed(2)
    for _ in range(number + 1):
        given = torch.randn(3, 8, generator=drawn).bfloat16()
    assert number < leaves
    model(given, both=True).float().square().sum().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("used", ["bfbb", "fbb", "fff", "fbfb"])
def test_in_exact_mode_a_leaf_that_leaves_some_out_is_refused(used: str) -> None:
    grids = Grids(torch.zeros(4), exact.offsets(torch.zeros(4).long(), LEAVES))
    model = sharded(torch.float64, accumulators.kernels(compiled=False), grids)
    with pytest.raises(UsageError, match="no gradient to number"):
        checked(model, used)


def checked(model: Model, used: str) -> None:
    """As a step ends."""
    run(model, used)
    for one in model.accumulators:
        one.check()


@pytest.mark.gpu
def test_on_a_gpu_what_is_compiled_is_what_is_not() -> None:
    sizes = (768, 768 * 768, 5, 3072 * 768, 1, 50304 * 64)
    drawn = torch.Generator("cuda").manual_seed(1)
    first = [
        torch.randn(size, generator=drawn, device="cuda", dtype=torch.bfloat16) for size in sizes
    ]
    offsets = exact.offsets(torch.arange(len(sizes), device="cuda") * 8, 8)
    found = []
    for kernels in (accumulators.kernels(compiled=False), accumulators.kernels(compiled=True)):
        rounded = [one.clone() for one in first]
        magnitudes = torch.zeros(2, len(sizes), device="cuda")
        exactly = [torch.zeros_like(one, dtype=torch.float64) for one in first]
        widely = [torch.zeros_like(one, dtype=torch.float32) for one in first]
        for factor in (1, 3, 2):  # the largest is not of the last
            leaf = [one * factor for one in first]
            kernels.add(leaf, widely)
            kernels.add_rounded(leaf, exactly, magnitudes[0], offsets)
            rounded = [one * factor for one in rounded]
            kernels.round(rounded, magnitudes[1], offsets)
        found.append((*rounded, *exactly, *widely, magnitudes))
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)
    assert not torch.equal(found[0][3], first[3] * 6), "tops that round nothing"


def test_a_leaf_that_does_not_run_what_is_reduced_by_itself_is_refused() -> None:
    """Before its backward, in which other replicas' ranks would wait for this one; what is not trained may be left out."""
    given = torch.randn(3, 8)
    for trained in (True, False):
        model, mesh = Model(), init_device_mesh("cpu", (1,))
        model.second.requires_grad_(trained)
        fully_shard(model.second, mesh=mesh)
        fully_shard(model, mesh=mesh)
        forwards = Forwards(model)
        for _ in range(2):  # as a pipeline's leaves follow one another
            with forwards.leaf():
                hidden = model(given, both=True)
        hidden.sum().backward()
        if not trained:
            with forwards.leaf():
                model(given, both=False)
            continue
        with pytest.raises(UsageError, match="did not run second, whose"), forwards.leaf():
            model(given, both=False)

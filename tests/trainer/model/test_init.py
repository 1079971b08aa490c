"""What parameters of a team's own modules begin with."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.proto.errors import UsageError
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.model.tensor_parallel import local
from tests.trainer.model.shapes import GPT2


class Scale(nn.Module):
    """Knows what its own begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(6))
        self.noise = nn.Parameter(torch.empty(3, 2, 2))
        self.register_parameter("unused", None)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, 1e-4)
        nn.init.normal_(self.noise)


class Own(GPT):
    """A team's."""

    def __init__(self) -> None:
        super().__init__(GPT2)
        self.scale, self.again = Scale(), Scale()
        self.adapter, self.norm = nn.Linear(8, 4), nn.LayerNorm(4)
        self.plain = nn.Module()
        self.plain.bias = nn.Parameter(torch.empty(5))
        self.plain.weight = nn.Parameter(torch.empty(5))


def begun() -> dict[str, Tensor]:
    model, state = Own(), torch.get_rng_state()
    initialize(model, GPT2, 1, 0.02)
    assert torch.equal(torch.get_rng_state(), state), "a script's own numbers stay as they are"
    return {name: one.detach() for name, one in model.named_parameters()}


def begun_on(rank: int, size: int) -> dict[str, Tensor]:
    """What a rank of so many has of it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with torch.device("meta"):
            model = Own()
        for part in (model.scale, model):  # the one is of another class then, FSDP's
            fully_shard(part, mesh=init_device_mesh("cpu", (size,)))
        model.to_empty(device="cpu")
        initialize(model, GPT2, 1, 0.02)
        return {name: local(one.detach()) for name, one in model.named_parameters()}
    finally:
        dist.destroy_process_group()


def test_modules_set_their_own_and_names_say_the_rest() -> None:
    found = begun()
    assert found["scale.gamma"].tolist() == pytest.approx([1e-4] * 6)
    assert 0.5 < float(found["scale.noise"].std()) < 2
    assert not torch.equal(found["scale.noise"], found["again.noise"])
    assert 0 < float(found["adapter.weight"].abs().max()) <= 8**-0.5, (
        "torch's own, not --init-method-std's"
    )
    assert found["norm.weight"].tolist() == [1.0] * 4
    assert found["plain.bias"].tolist() == [0.0] * 5
    assert found["plain.weight"].tolist() == [1.0] * 5
    with torch.no_grad():
        gpt = GPT(GPT2)
        initialize(gpt, GPT2, 1, 0.02)
    for name, parameter in gpt.named_parameters():
        assert torch.equal(parameter, found[name]), name


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (2, 3)])  # torch knows one rank of a mesh
def test_they_are_the_same_however_they_are_shared_out(rank: int, size: int) -> None:
    torch.rand(5)  # the global generator has no part in it
    whole, part = begun(), begun_on(rank, size)
    for name, parameter in whole.items():
        each = -(-len(parameter) // size)
        assert torch.equal(part[name], parameter[rank * each : (rank + 1) * each]), name


def test_a_module_that_would_set_those_below_it_is_refused_by_name() -> None:
    class Adapter(nn.Sequential):
        def reset_parameters(self) -> None:
            nn.init.zeros_(next(self[1].parameters()))

    model = GPT(GPT2)
    model.blocks["0"].adapter = Adapter(nn.Linear(8, 2), nn.Linear(2, 8))
    with pytest.raises(
        UsageError, match=r"blocks\.0\.adapter has a reset_parameters\(\) and modules"
    ):
        initialize(model, GPT2, 1, 0.02)


def test_what_is_called_a_bias_with_more_words_is_one() -> None:
    """Torch's attention has `in_proj_bias`."""
    model = GPT(GPT2)
    model.blocks["0"].more = nn.MultiheadAttention(8, 2)
    initialize(model, GPT2, 1, 0.02)
    found = dict(model.blocks["0"].more.named_parameters())
    assert not found["in_proj_bias"].any()
    assert found["in_proj_weight"].all()


@pytest.mark.parametrize("shape", [(5,), (3, 2, 2), ()])
def test_what_nobody_knows_is_refused_by_name(shape: tuple[int, ...]) -> None:
    model = GPT(GPT2)
    model.blocks["0"].slopes = nn.Parameter(torch.ones(shape))
    with pytest.raises(
        UsageError, match=r"parameter blocks\.0\.slopes begins with, .*reset_parameters"
    ):
        initialize(model, GPT2, 1, 0.02)

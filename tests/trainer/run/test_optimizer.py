"""What decays, that a step takes the rates that it is given, and that options stay whatever is loaded."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.model.tensor_parallel import local
from elastic.trainer.run import optimizer as optimizers
from tests.trainer.model.shapes import ALL

OWN = ("lr", "betas", "eps", "weight_decay", "decays", "fused")


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("shape", sorted(ALL))
def test_matrices_decay_and_biases_and_norms_do_not(shape: str, on_host: bool) -> None:
    """Without a gradient to speak of, all that a step does is to decay by lr x weight decay."""
    model = GPT(ALL[shape])
    initialize(model, ALL[shape], 1, 0.1)
    adam = optimizers.build(model, betas=(0.9, 0.95), eps=1e-8, on_host=on_host)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for lr, weight_decay in ((0.1, 0.5), (0.2, 0.0)):
        optimizers.set_rates(adam, lr, weight_decay)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        adam.step()
    for name, parameter in model.named_parameters():
        matrix = not name.endswith("bias") and "norm" not in name
        wanted = before[name] * (1 - 0.1 * 0.5) if matrix else before[name]
        torch.testing.assert_close(parameter.detach(), wanted, msg=name)


def test_a_step_is_adamws_by_hand() -> None:
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    adam = optimizers.build(model, betas=(0.5, 0.75), eps=0.25)
    optimizers.set_rates(adam, 0.1, 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    adam.step()  # averages are 3 and 9 once corrected
    moved = 0.1 * 3 / (3 + 0.25)
    assert float(model.weight.detach()) == pytest.approx(2 * (1 - 0.1 * 0.5) - moved)
    assert float(model.bias.detach()) == pytest.approx(2 - moved)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_step_of_pieces_is_torchs_own_step(mesh: DeviceMesh) -> None:
    """To the bit, and its moments are pieces, as they are saved."""
    ours, theirs = (
        [
            nn.Parameter(distribute_tensor(torch.linspace(-1, 1, rows * 3).view(rows, 3), mesh, [Shard(0)]))
            for rows in (4, 7)
        ]
        for _ in range(2)
    )  # fmt: skip
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    sharded = optimizers.ShardedAdamW(ours, **options)  # type: ignore[arg-type]
    torchs = torch.optim.AdamW(theirs, **options)  # type: ignore[arg-type]
    for step in range(3):
        for parameters, adam in ((ours, sharded), (theirs, torchs)):
            for parameter in parameters:
                parameter.grad = (parameter.detach() * (step + 1)).sin()
            adam.step()
    for mine, its in zip(ours, theirs, strict=True):
        assert isinstance(mine, DTensor)
        assert torch.equal(local(mine), local(its))
        for name in ("exp_avg", "exp_avg_sq"):
            moments = sharded.state[mine][name]
            assert isinstance(moments, DTensor)
            assert torch.equal(moments.to_local(), local(torchs.state[its][name]))


def stepped(*, on_host: bool, beta: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of a matrix and a bias, and its optimizer, behind a step."""
    model = nn.Linear(3, 5)
    made = optimizers.build(model, betas=(0.9, beta), eps=1e-8, on_host=on_host)
    optimizers.set_rates(made, 0.1, 0.01)
    torch.autograd.backward(model(torch.ones(2, 3)).sum())
    made.step()
    return model, made


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: group.get(name) for name in OWN} for group in optimizer.param_groups]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("saved_on_host", [False, True])
def test_a_loaded_state_brings_moments_and_no_options(on_host: bool, saved_on_host: bool) -> None:
    saver, saved = stepped(on_host=saved_on_host, beta=0.999)
    model, loads = stepped(on_host=on_host, beta=0.5)
    wanted = options(loads)
    loads.load_state_dict(saved.state_dict())
    assert options(loads) == wanted
    for one, other in zip(model.parameters(), saver.parameters(), strict=True):
        for name, value in saved.state[other].items():
            assert torch.equal(loads.state[one][name], value), name

"""What decays, that a step takes the rates that it is given, and that options stay whatever is loaded."""

from typing import Any

import pytest
import torch
from torch import nn

from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
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

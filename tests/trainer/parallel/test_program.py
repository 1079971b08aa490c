"""What loss functions return, as Megatron's have it, and what it comes to."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastic.proto.errors import UsageError
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.program import Batch, Program, Told
from elastic.trainer.run.non_loss import NonLoss
from tests.trainer.model.shapes import GPT2

Loss = Callable[[Tensor, Tensor], Any]
LEAVES = 3


def summed(losses: Tensor, mask: Tensor) -> Any:
    total, tokens = (losses * mask).sum(), mask.sum().int()
    return total, tokens, {"lm loss": torch.stack((total.detach(), tokens))}


def in_a_pair(losses: Tensor, mask: Tensor) -> Any:
    total, tokens, report = summed(losses, mask)
    return total, tokens, {"lm loss": tuple(report["lm loss"])}


def mean(losses: Tensor, mask: Tensor) -> Any:
    """As it was until 2024."""
    found = (losses * mask).sum() / mask.sum()
    return found, {"lm loss": found.detach()}


def trained(loss: Loss, mask: Tensor, *, told_mask: bool = True) -> tuple[Told, list[Tensor]]:
    """What came of a leaf of two samples that is one of three, and gradients."""
    model = GPT(GPT2)
    initialize(model, GPT2, 1, 0.1)

    def step(batches: Iterator[Batch], model: nn.Module) -> Any:
        batch = next(batches)
        given = {"loss_mask": batch["loss_mask"]} if told_mask else {}
        output = model(batch["tokens"], labels=batch["labels"], **given)
        return output, lambda losses: loss(losses, batch["loss_mask"])

    program = Program(model, step, last=True)
    program.begin(torch.tensor([1 / LEAVES]), mask.numel())
    samples = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(2))
    batch = {"tokens": samples[:, :-1], "labels": samples[:, 1:], "loss_mask": mask}
    torch.autograd.backward(program(**batch))
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return program.told[0], gradients


HALF = torch.ones(2, 16).index_fill(1, torch.arange(0, 16, 2), 0.0)


@pytest.mark.parametrize("mask", [torch.ones(2, 16), HALF])
def test_a_sum_may_be_reported_in_a_pair(mask: Tensor) -> None:
    (told, gradients), (other, others) = trained(summed, mask), trained(in_a_pair, mask)
    assert told.tokens == other.tokens == mask.sum()
    assert told.reports["lm loss"].tolist() == other.reports["lm loss"].tolist()
    assert all(map(torch.equal, gradients, others))


def test_a_mean_is_the_same_bits_where_every_token_counts() -> None:
    (told, gradients), (other, others) = (trained(one, torch.ones(2, 16)) for one in (summed, mean))
    assert told.tokens == other.tokens == 32
    total, tokens = told.reports["lm loss"].tolist()
    assert other.reports["lm loss"].tolist() == [total / tokens, 1]
    assert all(map(torch.equal, gradients, others))


def test_each_leaf_counts_alike_where_means_are_returned() -> None:
    """Which is what that meant in Megatron: half of the tokens then weigh twice."""
    (_, gradients), (told, others) = trained(summed, HALF), trained(mean, HALF)
    assert told.tokens == 32
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(2 * one, other)


@pytest.mark.parametrize("loss", [summed, mean])
def test_a_model_that_is_given_no_mask_takes_the_leafs(loss: Loss) -> None:
    """Scripts gave none until 2025; with ones in its place, gradients would be NaN."""
    (_, gradients), (_, others) = trained(loss, HALF), trained(loss, HALF, told_mask=False)
    assert all(map(torch.equal, gradients, others))


@pytest.mark.parametrize(
    ("returned", "kinds"),
    [
        (torch.ones(()), "Tensor"),
        ((torch.ones(()), 3, {}), "Tensor, int, dict"),
        ((torch.ones(()), torch.ones(())), "Tensor, Tensor"),
    ],
)
def test_what_else_is_returned_is_refused_in_a_line(returned: Any, kinds: str) -> None:
    message = (
        rf"the loss function returned \({kinds}\): return \(sum of the losses, number of tokens"
    )
    with pytest.raises(UsageError, match=message):
        trained(lambda losses, mask: returned, torch.ones(2, 16))


def told(loss: Tensor, reports: Any) -> Any:
    return loss.mean(), reports


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (lambda one: told(one.detach(), {}), r"a loss that no gradient comes of: .* detach\(\) what"),
        (lambda one: (one, {}), r"a loss of shape \[2, 16\]: return one number"),
        (lambda one: (one.sum(), one, {}), r"a number of tokens of shape \[2, 16\]: return one"),
        (lambda one: told(one, {3: 1.0}), "reports something as 3: the names are texts"),
        (lambda one: told(one, {"a": "x"}), r"reports 'a' as \(str\): report a number, or two"),
        (lambda one: told(one, {"a": None}), r"reports 'a' as \(NoneType\): report a number"),
        (lambda one: told(one, {"a": (1, 2, 3)}), r"reports 'a' as \(int, int, int\): report a"),
        (lambda one: told(one, {"a": torch.ones(3)}), "reports 'a' as a tensor of 3 numbers: report"),
        (lambda one: told(one, {"a": ()}), r"reports 'a' as \(\): report a number"),
    ],
)  # fmt: skip
def test_losses_and_reports_that_are_none_are_refused_in_a_line(
    returned: Callable[[Tensor], Any], what: str
) -> None:
    with pytest.raises(UsageError, match=f"^the loss function .*{what}"):
        trained(lambda losses, mask: returned(losses), torch.ones(2, 16))


@pytest.mark.parametrize("value", [2, 2.0, True, np.float32(2), torch.tensor([2])])
def test_a_number_of_any_kind_may_be_reported(value: Any) -> None:
    found, _ = trained(lambda losses, mask: told(losses, {"a": value}), torch.ones(2, 16))
    assert found.reports["a"].tolist() == [float(value), 1]


@pytest.mark.parametrize(
    ("returned", "kinds"),
    [(None, "NoneType"), (torch.ones(()), "Tensor"), ((torch.ones(()), 3), "Tensor, int"), ((), "")],
)  # fmt: skip
def test_a_forward_step_that_returns_something_else_is_refused_in_a_line(
    returned: Any, kinds: str
) -> None:
    program = Program(GPT(GPT2), lambda batches, model: returned, last=True)
    whole = NonLoss(process=None, of_model=None, step=lambda batches, model: returned)
    what = rf"^forward_step returned \({kinds}\): return \(the model's output, a function from that"
    program.begin(torch.ones(1), 1)
    with pytest.raises(UsageError, match=what):
        program()
    with pytest.raises(UsageError, match=what):
        whole.forward_step(iter([]), nn.Module())


def test_a_stage_between_hands_a_tensor_on() -> None:
    step: Any = lambda batches, model: ([], print)
    program = Program(GPT(GPT2), step, last=False)
    program.begin(torch.ones(1), 1)
    with pytest.raises(
        UsageError, match=r"^forward_step returned \(list, builtin_function_or_method\)"
    ):
        program()


@pytest.mark.parametrize(("model", "what"), [(None, "None"), (nn.Linear(1, 1), "a Linear")])
def test_a_provider_that_returns_something_else_is_refused_in_a_line(model: Any, what: str) -> None:
    message = f"^model_provider returned {what}, without set_input_tensor: return a GPTModel"
    with pytest.raises(UsageError, match=message):
        Program(model, lambda batches, model: next(iter(())), last=True)

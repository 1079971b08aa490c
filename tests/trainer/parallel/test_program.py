"""What loss functions return, as Megatron's have it, and what it comes to."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.proto.errors import UsageError
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.program import Batch, Program, Told
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

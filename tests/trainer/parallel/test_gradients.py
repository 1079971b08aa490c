"""In exact mode each leaf's gradient really is on the grid; in fast mode it is not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule

from elastic.data import Leaves, exact
from elastic.proto.errors import UsageError
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Laid, Part, lay_out
from elastic.trainer.run.loss_scale import LossScale, Policy
from elastic.trainer.run.step import Stepper
from tests.trainer.forks import whole
from tests.trainer.model.shapes import GPT2
from tests.trainer.parallel.layouts import LEAVES, PLAIN, share
from tests.trainer.program import forward_step

SUMS = LEAVES.count * 2
"""What is added up: the words have a gradient as embedding and one as head."""


def test_no_more_of_a_model_is_gathered_at_once_than_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ZeRO 3 all of it may be more than a device has."""
    whole_now: set[int] = set()
    most = [0]
    unshard, rest = FSDPModule.unshard, FSDPModule.reshard

    def gathered(part: FSDPModule) -> None:
        unshard(part)
        whole_now.add(id(part))
        most[0] = max(most[0], len(whole_now))

    def let_go(part: FSDPModule) -> None:
        rest(part)
        whole_now.discard(id(part))

    monkeypatch.setattr(FSDPModule, "unshard", gathered)
    monkeypatch.setattr(FSDPModule, "reshard", let_go)
    lay_out(
        GPT2, replace(PLAIN, zero=3), make=lambda part: GPT(GPT2, part.tp, part.layers),
        forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert most == [1]
    assert not whole_now


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stepped(*, exactly: bool) -> tuple[Laid, dict[str, Tensor]]:
    """Gradients of a batch's second time."""
    laid = lay_out(
        GPT2, replace(PLAIN, exact=exactly), make=lambda part: GPT(GPT2, part.tp, part.layers),
        forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, GPT2, 1, 0.05)
    stepper = Stepper(laid, leaf_tokens=2 * GPT2.seq_length)
    stepper.accumulate(share(LEAVES, 0, 1), LEAVES)
    laid.model.zero_grad()
    stepper.accumulate(share(LEAVES, 0, 1), LEAVES)
    return laid, {n: whole(p.grad) for n, p in laid.model.named_parameters() if p.grad is not None}


def test_sums_of_gradients_are_on_the_grid() -> None:
    laid, rounded = stepped(exactly=True)
    _, plain = stepped(exactly=False)
    offsets = exact.offsets(laid.gradients.tops, SUMS)
    assert len(rounded) == len(offsets)
    off = 0
    for (name, gradient), offset in zip(rounded.items(), offsets, strict=True):
        assert torch.equal(exact.rounded(gradient, offset), gradient), name
        torch.testing.assert_close(gradient, plain[name])
        off += int((exact.rounded(plain[name], offset) != plain[name]).sum())
    assert off > 0, "these gradients would be on it anyway"


def test_what_a_leaf_leaves_without_a_gradient_is_named() -> None:
    """A sum of which one part was not rounded would be another one in another world."""

    def make(part: Part) -> GPT:
        model = GPT(GPT2, part.tp, part.layers)
        model.blocks["0"].spare = nn.Parameter(torch.zeros(3, 3))
        return model

    laid = lay_out(
        GPT2, PLAIN, make=make, forward_step=forward_step, leaf_size=2, leaves=LEAVES.count,
        seed=1, device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, GPT2, 1, 0.05)
    stepper = Stepper(laid, leaf_tokens=2 * GPT2.seq_length)
    with pytest.raises(
        UsageError, match=r"no gradient to blocks\.0\.spare, .*of 13 parameters.*fast"
    ):
        stepper.accumulate(share(LEAVES, 0, 1), LEAVES)


def test_a_buffer_is_refused_by_name() -> None:
    """It would begin as whatever lay there, and again after each restart."""

    def make(part: Part) -> GPT:
        model = GPT(GPT2, part.tp, part.layers)
        model.blocks["0"].register_buffer("slopes", torch.ones(3), persistent=False)
        return model

    with pytest.raises(UsageError, match=r"buffer blocks\.0\.slopes would be lost"):
        lay_out(
            GPT2, PLAIN, make=make, forward_step=forward_step, leaf_size=2, leaves=LEAVES.count,
            seed=1, device=torch.device("cpu"),
        )  # fmt: skip


def test_fp16s_gradients_are_those_of_fp32_and_an_overflow_is_seen() -> None:
    def found(compute: torch.dtype, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        laid = lay_out(
            GPT2, replace(PLAIN, compute=compute), make=lambda part: GPT(GPT2, part.tp, part.layers),
            forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=1,
            device=torch.device("cpu"),
        )  # fmt: skip
        initialize(laid.model, GPT2, 1, 0.05)
        stepper = Stepper(laid, leaf_tokens=2 * GPT2.seq_length)
        sums = stepper.accumulate(share(LEAVES, 0, 1), LEAVES, loss_scale=scale)
        norm = stepper.clip(sums, LEAVES, 0.0, loss_scale=scale)
        return norm, {
            n: whole(p.grad) for n, p in laid.model.named_parameters() if p.grad is not None
        }

    wanted, plain = found(torch.float32, 1.0)
    norm, scaled = found(torch.float16, 2.0**12)
    torch.testing.assert_close(norm, wanted, rtol=0.01, atol=0)
    for name, gradient in scaled.items():
        assert (gradient - plain[name]).norm() < 0.02 * plain[name].norm(), name
    scale = LossScale(Policy())
    assert not scale.update(found(torch.float16, 2.0**32)[0])
    assert scale.update(norm)


def test_one_leaf_or_many_take_the_same_step() -> None:
    """Accumulated over 1, 2, 4 and 8 micro-batches; in fp32, but for how matrix products add up."""

    def found(leaf_size: int) -> dict[str, Tensor]:
        leaves = Leaves(batch_size=8, leaf_size=leaf_size)
        laid = lay_out(
            GPT2, PLAIN, make=lambda part: GPT(GPT2, part.tp, part.layers),
            forward_step=forward_step, leaf_size=leaf_size, leaves=leaves.count, seed=1,
            device=torch.device("cpu"),
        )  # fmt: skip
        initialize(laid.model, GPT2, 1, 0.05)
        stepper = Stepper(laid, leaf_tokens=leaf_size * GPT2.seq_length)
        sums = stepper.accumulate(share(leaves, 0, 1), leaves)
        stepper.clip(sums, leaves, 0.1)
        return {n: whole(p.grad) for n, p in laid.model.named_parameters() if p.grad is not None}

    wanted = found(8)
    for leaf_size in (4, 2, 1):
        for name, gradient in found(leaf_size).items():
            assert (gradient - wanted[name]).norm() < 1e-6 * wanted[name].norm(), (leaf_size, name)

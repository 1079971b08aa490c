"""`python -m tests.trainer.run.waits`: steps on a GPU in which the host waits only where it says so.

A wait that torch makes by itself, for a number that goes to the device or comes from it, is an error.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from elastic.data import Leaves
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Layout, lay_out
from elastic.trainer.parallel.program import Batch, ForwardStep, LossFunction
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run.deadline import Deadline
from elastic.trainer.run.step import Share, Stepper
from elastic.trainer.run.told import Coming
from elastic.trainer.run.totals import num_zeros, params_norm
from elastic.trainer.transfers import ToHost
from tests.trainer import program

WARM = 2
"""Steps in which a run may wait: kernels are loaded, and numbers sent that stay there."""
LEAVES = Leaves(batch_size=8, leaf_size=2)
GPT2 = GPTConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=128, vocab_size=320
)


def of_means(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
    """Megatron's older form, with a report that is no tensor."""
    one = next(batches)

    def loss(losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return losses.mean(), {"lm loss": losses.detach().mean(), "one": 1.0}

    losses: Any = model(one["tokens"], None, None, labels=one["labels"], loss_mask=one["loss_mask"])
    return losses, loss


def steps(config: GPTConfig, layout: Layout, forward_step: ForwardStep) -> None:
    """As a run makes them."""
    device = torch.device("cuda")
    laid = lay_out(
        config, layout, make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=1, device=device,
    )  # fmt: skip
    initialize(laid.model, config, 1, 0.05)
    stepper = Stepper(laid, leaf_tokens=2 * config.seq_length)
    adam = optimizers.build(laid.model, betas=(0.9, 0.95), eps=1e-8)
    drawn = torch.randint(config.vocab_size, (LEAVES.batch_size, config.seq_length + 1))
    batch = {name: one.to(device) for name, one in program.batch(drawn).items()}
    mine = Share(LEAVES.of(0, 0, 1), batch)
    coming: list[tuple[Coming, ToHost]] = []
    deadline = Deadline(math.inf, device)
    for step in range(2 * WARM):
        torch.cuda.set_sync_debug_mode("error" if step >= WARM else "default")
        sums = stepper.accumulate(mine, LEAVES)
        norm = stepper.clip(sums, LEAVES, 1.0)
        numbers = Coming(sums, norm, num_zeros(laid))
        optimizers.set_rates(adam, 1e-4, 0.1)
        adam.step()
        adam.zero_grad()
        coming.append((numbers, ToHost(params_norm(laid))))
        assert not deadline.passed()
    torch.cuda.set_sync_debug_mode("default")
    for numbers, of_params in coming:
        means = numbers.means()
        assert math.isfinite(means["lm loss"] + numbers.norm + float(of_params.read())), means
    assert numbers.there
    assert of_params.there


def main() -> None:
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    for exact in (False, True):  # exact is for the rest of a process
        for compiled in (False, True):
            layout = Layout(exact=exact, compile=compiled)
            for config in (GPT2, replace(GPT2, hidden_dropout=0.1)):
                for forward_step in (program.forward_step, of_means):
                    steps(config, layout, forward_step)
            sys.stdout.write(f"exact {exact}, compiled {compiled}: no wait\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

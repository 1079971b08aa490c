"""`python -m tests.trainer.run.waits`: steps on a GPU in which the host waits only where it says so.

A wait that torch makes by itself, for a number that goes to the device or comes from it, is an error.
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.parallel.layout import Layout, lay_out
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run.step import Share, Stepper
from tests.trainer.model.shapes import GPT2
from tests.trainer.parallel.layouts import LEAVES, share
from tests.trainer.program import forward_step

WARM = 2
"""Steps in which a run may wait: kernels are loaded, and numbers sent that stay there."""


def steps(config: GPTConfig, layout: Layout) -> None:
    """As a run makes them."""
    device = torch.device("cuda")
    laid = lay_out(
        config, layout, make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=1, std=0.05, device=device,
    )  # fmt: skip
    stepper = Stepper(laid, leaf_tokens=2 * config.seq_length)
    adam = optimizers.build(laid.model, betas=(0.9, 0.95), eps=1e-8)
    leaves, batch = share(LEAVES, 0, 1)
    mine = Share(leaves, {name: one.to(device) for name, one in batch.items()})
    for step in range(2 * WARM):
        torch.cuda.set_sync_debug_mode("error" if step >= WARM else "default")
        sums = stepper.accumulate(mine, LEAVES)
        stepper.clip(sums, LEAVES, 1.0)
        optimizers.set_rates(adam, 1e-4, 0.1)
        adam.step()
        adam.zero_grad()
    torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    for config in (GPT2, replace(GPT2, hidden_dropout=0.1)):
        for exact in (True, False):
            layout = Layout(exact=exact)
            steps(config, layout)
            sys.stdout.write(f"exact {exact}, drops {config.drops}: no wait\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

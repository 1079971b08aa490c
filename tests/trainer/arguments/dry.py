"""`python -m tests.trainer.arguments.dry FILE ...`: a leaf of each configuration on a rank of its first, a
middle and its last stage, whose fellows are fake: as many layers, heads, stages and ranks as it says, but narrow.

A rank is a fork: torch keeps some of a group for longer than the group lives.
"""

import os
import sys
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.layout import lay_out
from tests.trainer.program import forward_step

DATA = ("--data-path", "p", "--vocab-size", "50256")
LENGTH = 16


def be(settings: Settings, grid: Grid, stage: int) -> None:
    """Forward and backward of all that the rank has. What is eager is what would be compiled."""
    layout = replace(settings.parallel(), compile=False)
    config = settings.config(vocab_size=256)
    config = replace(
        config, hidden_size=2 * config.num_attention_heads, seq_length=LENGTH, max_positions=LENGTH
    )
    rank = grid.rank(Place(grid.dp - 1, stage, grid.tp - 1))
    dist.init_process_group("fake", rank=rank, world_size=grid.size, store=FakeStore())
    laid = lay_out(
        config, layout, make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=1, leaves=8, seed=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, config, 1, 0.02)
    assert laid.place.pp == stage
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(1, LENGTH)}
    positions = LENGTH // (layout.tp if layout.sequence else 1)
    for program in laid.programs:
        hidden = torch.zeros(1, positions, config.hidden_size, dtype=layout.compute)
        program.begin(torch.ones(1), LENGTH)
        torch.autograd.backward(program(hidden.requires_grad_(), **batch).sum())
    assert all(one.grad is not None for one in laid.model.parameters())


def main() -> None:
    """Status 1 where one fails."""
    for file in sys.argv[1:]:
        settings = parse(["--yaml-cfg", file, *DATA])
        layout = settings.parallel()
        grid = Grid(dp=2, pp=layout.pp, tp=layout.tp)
        for stage in sorted({0, layout.pp // 2, layout.pp - 1}):
            if os.fork() == 0:
                try:
                    be(settings, grid, stage)
                    os._exit(0)
                except BaseException:  # noqa: BLE001 - nothing may go on in a fork
                    sys.stderr.write(f"{file}, stage {stage}:\n{traceback.format_exc()}")
                    sys.stderr.flush()
                    os._exit(1)
            if os.wait()[1]:
                raise SystemExit(1)


if __name__ == "__main__":
    main()

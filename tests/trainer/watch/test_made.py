"""What a run's settings make of what watches it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.parallel.footprint import footprint
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.run.plan import Plan
from elastic.trainer.schedules import BatchSizes
from elastic.trainer.watch import made, memory

GPT = GPTConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512)


@pytest.mark.parametrize(("dp", "leaves"), [(1, 12), (4, 4), (5, 4), (7, 2)])
def test_the_footprint_is_of_the_leaves_that_a_replica_runs(dp: int, leaves: int) -> None:
    """Padding takes memory, too: of 12 leaves five replicas run three each, made four by a pipeline of two."""
    layout = Layout(pp=2, schedule="interleaved", virtual=2)
    grid = Grid(dp=dp, pp=2, tp=1)
    plan = Plan(sizes=BatchSizes.constant(24), steps=1, leaf_size=2, multiple=2, at_least=2)
    laid: Any = SimpleNamespace(grid=grid, device=torch.device("cpu"))
    every = [
        footprint(
            GPT, layout, grid, Place(0, stage, 0), leaf_size=2, leaves=leaves, keeps_sent=True
        )
        for stage in range(2)
    ]
    most = max(every, key=lambda one: one.total)
    assert made.footprint_line(GPT, layout, laid, plan) == memory.theoretical(most, None)

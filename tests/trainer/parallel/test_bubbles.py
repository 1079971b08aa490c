"""What stages wait for one another, in the order in which torch's schedules run leaves here."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Layout, lay_out
from elastic.trainer.parallel.pipeline import Schedule
from tests.trainer.model.shapes import LLAMA
from tests.trainer.program import forward_step

STAGES = 2
TOOK = {"FORWARD": 1, "FULL_BACKWARD": 2, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1}
BACK = ("FULL_BACKWARD", "BACKWARD_INPUT")
"""What the stage before waits for."""


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=STAGES, store=FakeStore())
    yield
    dist.destroy_process_group()


def bubble(schedule: Schedule, virtual: int, leaves: int) -> float:
    """How much longer a step takes than a rank is busy, if every stage takes as long."""
    layout = Layout(pp=STAGES, virtual=virtual, schedule=schedule, zero=0)
    laid = lay_out(
        LLAMA, layout, make=lambda part: GPT(LLAMA, part.tp, part.layers),
        forward_step=forward_step, leaf_size=1, leaves=leaves, seed=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, LLAMA, 1, 0.02)
    runner: Any = laid.runner
    made, _ = runner._make(torch.ones(leaves), backward=True)
    left = {
        rank: [(one.computation_type.name, one.stage_index, one.microbatch_index)
               for one in order if one and one.computation_type.name in TOOK]
        for rank, order in made.pipeline_order.items()
    }  # fmt: skip
    busy = {sum(TOOK[kind] for kind, *_ in actions) for actions in left.values()}
    ends: dict[tuple[str, int, int], int] = {}
    now = dict.fromkeys(left, 0)
    last = STAGES * virtual - 1
    while any(left.values()):
        for rank, actions in left.items():
            while actions:
                kind, stage, leaf = actions[0]
                wanted = []
                if kind == "FORWARD" and stage > 0:
                    wanted = [("FORWARD", stage - 1, leaf)]
                elif kind in BACK and stage < last:
                    following = [(one, stage + 1, leaf) for one in BACK]
                    wanted = [next((one for one in following if one in ends), following[0])]
                if not all(one in ends for one in wanted):
                    break
                now[rank] = max([now[rank], *(ends[one] for one in wanted)]) + TOOK[kind]
                ends[actions.pop(0)] = now[rank]
    (each,) = busy
    return max(now.values()) / each - 1


@pytest.mark.parametrize("leaves", [2, 4, 8, 16])
def test_bubbles_are_those_of_the_formula(leaves: int) -> None:
    """1F1B is not among them: torch runs it by other means than the order that it tells of it."""
    once = (STAGES - 1) / leaves
    assert bubble("gpipe", 1, leaves) == pytest.approx(once)
    assert bubble("interleaved", 2, leaves) == pytest.approx(once / 2)
    assert bubble("zero-bubble", 2, leaves) == pytest.approx(once / 2 / 3)

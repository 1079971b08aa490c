"""The order of passes is torch's, in pipelines of more ranks than a test runs."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from elastic.trainer.parallel.order import Pass, order
from elastic.trainer.parallel.pipeline import Schedule

KINDS: dict[str, Any] = {
    "FORWARD": "forward", "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights",
}  # fmt: skip
"""By torch's names."""


@pytest.mark.parametrize(
    ("schedule", "torchs"),
    [("interleaved", ScheduleInterleaved1F1B), ("zero-bubble", ScheduleInterleavedZeroBubble)],
)
def test_it_is_what_torchs_schedule_says(schedule: Schedule, torchs: Any) -> None:
    for pp, virtual, times in product((2, 3, 4), (1, 2, 3), (1, 2, 5)):
        leaves = times * pp
        stages = [
            SimpleNamespace(
                stage_index=number * pp, num_stages=pp * virtual, group_size=pp, group_rank=0,
                is_first=number == 0, is_last=False, has_backward=True, submod=None, group=None,
            )
            for number in range(virtual)
        ]  # fmt: skip
        made = torchs(stages, leaves, loss_fn=lambda loss, _: loss)
        for rank in range(pp):
            theirs = [
                Pass(KINDS[one.computation_type.name], one.stage_index // pp, one.microbatch_index)
                for one in made.pipeline_order[rank]
                if one and one.computation_type.name in KINDS
            ]
            found = order(schedule, rank=rank, pp=pp, virtual=virtual, leaves=leaves)
            assert found == theirs, (pp, virtual, leaves, rank)

"""When a run's time is over, and that nobody waits for it."""

import time

import pytest
import torch
from torch import Tensor

from elastic.trainer.run import deadline
from elastic.trainer.run.deadline import Deadline

CPU = torch.device("cpu")


class Read:
    """In place of `ToHost`: what is on its way from a device."""

    count = 0

    def __init__(self, number: Tensor) -> None:
        self._number = number.clone()

    def read(self) -> Tensor:
        Read.count += 1
        return self._number


def test_it_is_read_behind_the_next_step_and_stays_over(monkeypatch: pytest.MonkeyPatch) -> None:
    others = iter([0.0, 0.0, 1.0, 0.0, 0.0])  # the clocks of the other ranks
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda mine, _: mine.fill_(max(float(mine), next(others)))
    )
    monkeypatch.setattr(deadline, "ToHost", Read)
    monkeypatch.setattr(Read, "count", 0)
    here = Deadline(time.time() + 3600, CPU)
    found = []
    for asked in range(5):
        found.append(here.passed())
        assert Read.count == asked, "what was asked now is not read"
    assert found == [False, False, False, True, True]

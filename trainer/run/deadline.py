"""The time that a run has, by the clocks of all its ranks."""

import time

import torch
import torch.distributed as dist

from elastic.trainer.transfers import ToHost


class Deadline:
    """`--exit-duration-in-mins`. All ranks ask behind each step, and come to the same."""

    def __init__(self, at: float, device: torch.device) -> None:
        """at: in Unix seconds."""
        self._at, self._device = at, device
        self._coming: ToHost | None = None
        self._passed = False

    def passed(self) -> bool:
        """Whether it was behind the step before, on any rank: what is asked now is read behind the next one, so the
        device has something to do meanwhile."""
        if self._coming is not None:
            self._passed |= bool(self._coming.read())
        mine = torch.full((), float(time.time() > self._at), device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        self._coming = ToHost(mine)
        return self._passed

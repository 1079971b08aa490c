"""What torch's zero-bubble schedule leaves undone: weights' gradients that are added up as all others are.

Its weight pass computes them with `torch.autograd.grad` and adds them into `.grad`, in the parameter's
own dtype and past its hooks. Here each pass is followed by what autograd and FSDP do otherwise.
"""

from typing import Any

import torch

from elastic.trainer.parallel.accumulators import accumulate
from elastic.trainer.parallel.stage import LeanStage

LOSS_IN_ONE = torch.__version__ < "2.13"
"""Before, torch cannot begin at an autograd.Function, as the loss and its head are."""


class Stage(LeanStage):
    """One of a schedule that computes weights' gradients by themselves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done: set[int] = set()
        """Leaves whose weights' gradients came with the others."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        whole = full_backward or (self.is_last and LOSS_IN_ONE)
        super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        if whole and not full_backward:
            self._done.add(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._done:
            self._done.remove(bwd_chunk_id)
            return
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        accumulate(self.submod)

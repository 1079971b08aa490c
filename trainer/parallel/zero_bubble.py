"""What torch's zero-bubble schedule leaves undone: weights' gradients that are added up as all others are.

Its weight pass computes them with `torch.autograd.grad` and adds them into `.grad`, in the parameter's
own dtype and past its hooks. Here each pass is followed by what autograd and FSDP do otherwise. FSDP's
accumulator is reached by private names, in torch 2.11 to 2.13: the only place that does.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.fsdp import fully_shard

from elastic.trainer.parallel.stage import LeanStage

_LOSS_IN_ONE = torch.__version__ < "2.13"
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
        whole = full_backward or (self.is_last and _LOSS_IN_ONE)
        super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        if whole and not full_backward:
            self._done.add(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._done:
            self._done.remove(bwd_chunk_id)
            return
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        parameters = list(_parameters(self.submod))
        for parameter in parameters:
            unsharded: nn.Parameter = parameter.unsharded_param
            if unsharded.grad is not None:
                for hook in (unsharded._post_accumulate_grad_hooks or {}).values():
                    hook(unsharded)
        for parameter in parameters:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def _parameters(module: nn.Module) -> Iterator[Any]:
    """FSDP's own of all parameters."""
    of: Any = replicate if isinstance(module, ReplicateModule) else fully_shard
    for state in of.state(module)._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            yield from group.fsdp_params

"""A pipeline's stage that holds what it receives only while the leaf is under way, and raises what its forward does.

torch's makes buffers for the activations, and for the gradients, of all leaves of a step before it begins, and
keeps them, their gradients, and what an evaluation put out from step to step. So memory would grow with the number
of leaves, whatever the schedule, and with each size of batch of a ramp. Here they are made when they are received.

torch's raises an error of its own in place of any that forward raises, so that nobody would know a user's mistake, or
memory that ran out, for what it is.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from elastic.trainer.parallel.accumulators import Forwards

_META = torch.device("meta")


class LeanStage(PipelineStage):
    """One of a schedule of any kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forwards = Forwards(self.submod)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._take(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._take(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        found, raised = None, None
        whole = self._forwards.leaf() if self.has_backward else nullcontext()
        try:
            with whole:
                found = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raised = error.__cause__ or error
        if raised is not None:  # not in `except`, where torch's would be shown with it
            raise raised
        if not self.has_backward:
            _leave(self.args_recv_info[fwd_chunk_id])
            if self.is_last:
                del self.fwd_cache[fwd_chunk_id]
        return found

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        found = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return found

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _leave(self.args_recv_info[bwd_chunk_id])
        _leave(self.grad_recv_info.get(bwd_chunk_id, ()))

    def rest(self) -> None:
        """After a step: nothing of it is held."""
        self.clear_runtime_states()
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            _leave(infos)

    def _take(self, infos: Any) -> None:
        for info in infos:
            held = getattr(info, "buffer", None)
            if held is not None and held.is_meta:
                made = torch.empty_like(held, device=self.device)
                info.buffer = made.requires_grad_(held.requires_grad)

    # torch calls these before a schedule's first step; what they make of `device` are the buffers.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_forward_infra, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_backward_infra, *args, **kwargs)

    def _without_memory(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        device, self.device = self.device, _META
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = device


def _leave(infos: Any) -> None:
    for info in infos:
        held = getattr(info, "buffer", None)
        if held is not None and not held.is_meta:
            info.buffer = torch.empty_like(held, device=_META).requires_grad_(held.requires_grad)

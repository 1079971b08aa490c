"""Data parallelism: FSDP2 at every ZeRO stage, and when a step's gradients are added up.

| stage | parameters | gradients | optimizer's state |
|---|---|---|---|
| 0 | whole | whole, reduced once a step | whole |
| 1 | kept whole in a step | whole, reduced once a step | a shard |
| 2 | kept whole in a step | a shard, reduced every leaf | a shard |
| 3 | a shard, gathered for every block | a shard, reduced every leaf | a shard |

Parameters are kept in fp32 and computed with in `compute`, so it is applied in a world of one, too.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastic.trainer.model.gpt import GPT


def shard(
    model: GPT, mesh: DeviceMesh, *, stage: int, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Shard `model` in place over the one dimension of `mesh`.

    Its parameters may be on the meta device; those of the tensor-parallel layers are DTensors already.
    Gradients come out as sums over ranks: whoever computes the loss divides it by the global batch.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for part in (*model.blocks.values(), model):
        if stage == 0:
            replicate(part, mesh=mesh, mp_policy=policy)
        else:
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
    for piece in sharded(model):
        piece.set_gradient_divide_factor(1.0)
        piece.set_force_sum_reduction_for_comms(True)  # Gloo has no sum that divides


def sharded(model: nn.Module) -> Iterable[FSDPModule]:
    """Each part of the model that gathers and reduces by itself."""
    return (part for part in model.modules() if isinstance(part, FSDPModule))


def begin_leaf(model: FSDPModule, *, stage: int, last: bool) -> None:
    """Before a leaf's forward: whether its backward ends with the step's reduction."""
    model.set_requires_gradient_sync(last or stage >= 2)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last or stage == 3)

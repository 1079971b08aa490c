"""Data parallelism: FSDP2 at every ZeRO stage, and when a step's gradients are added up.

| stage | parameters | gradients | optimizer's state |
|---|---|---|---|
| 0 | whole | whole, reduced once a step | whole |
| 1 | kept whole in a step | whole, reduced once a step | a shard |
| 2 | kept whole in a step | a shard, reduced every leaf | a shard |
| 3 | a shard, gathered for every block | a shard, reduced every leaf | a shard |

Parameters are kept in fp32 and computed with in `compute`, so it is applied in a world of one, too.

All stages end with the same bits in exact mode.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from elastic.trainer.parallel.program import Program

BLOCKS = "blocks"
"""A model's child, an `nn.ModuleDict`, with what is gathered, compiled and recomputed by itself."""


def shard(
    program: Program,
    mesh: DeviceMesh,
    *,
    stage: int,
    compute: torch.dtype,
    reduce: torch.dtype,
    on_host: bool = False,
) -> None:
    """Shard `program` in place over the one dimension of `mesh`.

    Its parameters may be on the meta device; those of the tensor-parallel layers are DTensors already.
    Gradients come out as sums over ranks: whoever computes the loss divides it by the global batch.
    on_host: they, and parameters, are in host memory, and parameters go to the device when they are
    gathered.
    """
    # What comes in stays as it is: the loss mask is fp32, and is to be.
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    pinned = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if on_host else OffloadPolicy()
    for part in (*blocks(program), program):
        if stage == 0:
            replicate(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
        else:
            fully_shard(
                part, mesh=mesh, mp_policy=policy, offload_policy=offload,
                reshard_after_forward=stage == 3,
            )  # fmt: skip
    for piece in sharded(program):
        piece.set_gradient_divide_factor(1.0)
        piece.set_force_sum_reduction_for_comms(True)  # Gloo has no sum that divides


def blocks(program: Program) -> Iterable[nn.Module]:
    """What is gathered, compiled and recomputed by itself."""
    return getattr(program.model, BLOCKS, nn.ModuleDict()).values()


def sharded(model: nn.Module) -> Iterable[FSDPModule]:
    """Each part of the model that gathers and reduces by itself."""
    return (part for part in model.modules() if isinstance(part, FSDPModule))


def reshard(model: nn.Module) -> None:
    """What forward has gathered, and no backward has let go of."""
    for part in sharded(model):
        part.reshard()


def gathered(program: Program) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of the model as forward computes with it, a piece at a time, since all may be more than a device
    has: to be looked at before the next one is asked for. All ranks of data parallelism go through it, between
    steps."""
    taken: set[int] = set()
    for piece in reversed(list(sharded(program))):  # blocks before what is around them
        own = {id(one) for one in cast(nn.Module, piece).parameters()} - taken
        taken |= own
        names = [name for name, one in program.model.named_parameters() if id(one) in own]
        piece.unshard()
        for name in names:
            yield name, program.model.get_parameter(name)
        piece.reshard()


def begin_leaf(model: FSDPModule, *, stage: int, last: bool) -> None:
    """Before a leaf's forward: whether its backward ends with the step's reduction."""
    model.set_requires_gradient_sync(last or stage >= 2)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last or stage == 3)

"""Numbers over all of a model's parameters, of which each rank has some, and several ranks may have the same."""

from collections.abc import Callable, Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic.trainer.parallel.layout import Laid


def params_norm(laid: Laid) -> Tensor:
    """The norm of all parameters, fp64 [], on every rank."""
    return _total(
        laid, laid.model.named_parameters(), lambda one: one.double().square().sum()
    ).sqrt()


def num_zeros(laid: Laid) -> Tensor:
    """How many elements of the gradients are zero, fp64 [], on every rank."""
    gradients = (
        (name, one.grad) for name, one in laid.model.named_parameters() if one.grad is not None
    )
    return _total(laid, gradients, lambda one: (one == 0).sum().double())


def _total(
    laid: Laid, tensors: Iterable[tuple[str, Tensor]], of: Callable[[Tensor], Tensor]
) -> Tensor:
    grid = laid.grid
    found = torch.zeros((), dtype=torch.float64, device=laid.device)
    for name, tensor in tensors:
        if name == "head.weight" and laid.gradients.copied:
            continue  # the first stage has it
        pieces = 1
        local = tensor.detach()
        if isinstance(local, DTensor):
            sizes = zip(local.placements, local.device_mesh.shape, strict=True)
            pieces = prod(size for placement, size in sizes if not placement.is_replicate())
            local = local.to_local()
        found += of(local).to(laid.device) * pieces / (grid.dp * grid.tp)
    dist.all_reduce(found)
    return found

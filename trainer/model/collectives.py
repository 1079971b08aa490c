"""Collectives that compile sees through, each with its result there when it returns.

`group` is a process group; every rank of it calls with the same shapes.
"""

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

_wait: Any = funcol.wait_tensor
# torch 2.13 has other names for these two, and warns of the old ones.
_gather: Any = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
_scatter: Any = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def total(part: Tensor, group: Any) -> Tensor:
    """The sum over ranks, on each of them."""
    return cast(Tensor, _wait(funcol.all_reduce(part.contiguous(), "sum", group)))


def largest(part: Tensor, group: Any) -> Tensor:
    """The largest over ranks, element by element, on each of them."""
    return cast(Tensor, _wait(funcol.all_reduce(part.contiguous(), "max", group)))


def gathered(part: Tensor, dim: int, group: Any) -> Tensor:
    """The ranks' parts one behind the other along `dim`."""
    parts = cast(Tensor, _wait(_gather(part.contiguous(), 0, group)))
    # torch would do the same; compile sees through its way to do it in 2.13 only.
    return parts if dim == 0 else torch.cat(parts.chunk(group.size()), dim)


def scattered(part: Tensor, dim: int, group: Any) -> Tensor:
    """This rank's part along `dim` of the sum over ranks, whose number divides that dim."""
    return cast(Tensor, _wait(_scatter(part.contiguous(), "sum", dim, group)))

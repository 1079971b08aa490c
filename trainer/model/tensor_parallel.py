"""Tensor and sequence parallelism: the two functions between what every rank has and what is shared out.

Weights are DTensors on the `tp` mesh, for FSDP and for checkpoints; in forward only their local pieces
are used. Between the pieces stand `enter` and `leave`, one the other's backward, so a layer costs what
can be read here: without sequence parallelism an all-reduce in `leave` (and one in `enter`'s backward),
with it an all-gather in `enter` and a reduce-scatter in `leave`.

Shapes: B samples, S positions, s = S / tp of them under sequence parallelism, H hidden size.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from elastic.trainer.model.collectives import gathered, scattered, total

_SEQUENCE = 1
"""The dimension of positions, in [B, S, H]."""


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The ranks that share each layer of a model among them."""

    mesh: DeviceMesh | None = None
    """One dimension; None: each rank has whole layers."""
    sequence: bool = False
    """Whether the residual stream is split by positions (Megatron's sequence parallelism)."""

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def group(self) -> Any:
        """What collectives take. Only where there is a mesh."""
        assert self.mesh is not None
        return self.mesh.get_group()

    def piece(self, count: int) -> range:
        """This rank's part of `count` things, which `size` divides."""
        each = count // self.size
        return range(each * self.rank, each * (self.rank + 1))

    @property
    def part(self) -> int:
        """Which part of the residual stream's positions this rank has."""
        return self.rank if self.sequence else 0

    def stored(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        """The parameter as it is kept; itself where layers are whole."""
        if self.mesh is None:
            return parameter
        split = distribute_tensor(parameter.data, self.mesh, [placement], src_data_rank=None)
        return nn.Parameter(split, requires_grad=parameter.requires_grad)

    def enter(self, hidden: Tensor) -> Tensor:
        """From the residual stream to where heads, columns or words are shared out.

        [B, S or s, H] -> [B, S, H], the same on every rank.
        """
        if self.mesh is None:
            return hidden
        return _apply(_Gather if self.sequence else _Copy, hidden, self.group)

    def leave(self, part: Tensor) -> Tensor:
        """Back: the sum over ranks of what each has. [B, S, H] -> [B, S or s, H]."""
        if self.mesh is None:
            return part
        return _apply(_Scatter if self.sequence else _Reduce, part, self.group)

    def mine(self, positions: Tensor, dim: int = 0) -> Tensor:
        """This rank's positions under sequence parallelism, else all; they are counted along `dim`."""
        if self.mesh is None or not self.sequence:
            return positions
        part = self.piece(positions.shape[dim])
        return positions.narrow(dim, part.start, len(part))

    def on_stream(self, parameter: Tensor) -> Tensor:
        """A replicated parameter that is used on the residual stream; its gradients of all ranks are
        added up where each rank has some of the positions."""
        if not isinstance(parameter, DTensor):
            return parameter
        gradient = Partial() if self.sequence else Replicate()
        return parameter.to_local(grad_placements=[gradient])


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of what is shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Column(nn.Module):
    """A linear layer whose outputs are shared out: [B, S, H] -> [B, S, O / tp]; its input is entered."""

    def __init__(self, inputs: int, outputs: int, tp: TensorParallel, *, bias: bool) -> None:
        super().__init__()
        self.weight = tp.stored(nn.Parameter(torch.empty(outputs, inputs)), Shard(0))
        self.bias = tp.stored(nn.Parameter(torch.empty(outputs)), Shard(0)) if bias else None

    def forward(self, entered: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        return nn.functional.linear(entered, local(self.weight), bias)


class Row(nn.Module):
    """A linear layer whose inputs are shared out, and which leaves: [B, S, I / tp] -> [B, S or s, H]."""

    def __init__(self, inputs: int, outputs: int, tp: TensorParallel, *, bias: bool) -> None:
        super().__init__()
        self.tp = tp
        self.weight = tp.stored(nn.Parameter(torch.empty(outputs, inputs)), Shard(1))
        self.bias = tp.stored(nn.Parameter(torch.empty(outputs)), Replicate()) if bias else None

    def forward(self, part: Tensor) -> Tensor:
        left = self.tp.leave(nn.functional.linear(part, local(self.weight)))
        return left if self.bias is None else left + self.tp.on_stream(self.bias)


class VocabEmbedding(nn.Module):
    """An embedding whose words are shared out: [B, S] int64 -> [B, S or s, H]."""

    def __init__(self, words: int, width: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.words = tp.piece(words)
        self.weight = tp.stored(nn.Parameter(torch.empty(words, width)), Shard(0))

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.tp.mesh is None:
            return nn.functional.embedding(tokens, weight)
        here = tokens - self.words.start
        foreign = (here < 0) | (here >= len(self.words))
        found = nn.functional.embedding(here.masked_fill(foreign, 0), weight)
        return self.tp.leave(found.masked_fill(foreign.unsqueeze(-1), 0.0))


# --- the two functions, and their backward -------------------------------------------------------


def _apply(function: Any, tensor: Tensor, group: Any) -> Tensor:
    return cast(Tensor, function.apply(tensor, group))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return total(gradients[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return total(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(hidden, _SEQUENCE, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scattered(gradients[0], _SEQUENCE, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scattered(part, _SEQUENCE, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], _SEQUENCE, ctx.group), None

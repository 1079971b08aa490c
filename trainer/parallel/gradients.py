"""The gradient of a step: what each leaf adds to it, whether its sum is exact, its norm.

In exact mode a hook rounds each leaf's gradient to the grid of its tensor (`elastic.data.exact`) before
FSDP adds it up in fp64, so that no world and no layout of data parallelism changes a bit of it. What all
ranks must agree on, a number or three for each tensor, goes over the world in one vector; tensors are
numbered as the whole model has them, whoever has which part.

Shapes: N tensors of the whole model.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from elastic.data import exact
from elastic.trainer.parallel.sharding import sharded

WORDS = "embedding.words.weight"
"""The embedding, which is the head, too, where they are tied."""


class Gradients:
    """Those of one model over its life. `tops` is state, the same on every rank."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        names: Sequence[str],
        *,
        leaves: int | None,
        tied: dist.ProcessGroup | None = None,
    ) -> None:
        """parts: of the model, sharded, that this rank has; names: of all tensors of the whole model.

        leaves: the most that a batch of the run has, times the tensor-parallel ranks that each add a
        part to it; None: fast mode, which rounds nothing. tied: the first and the last stage of a
        pipeline, where both have the words' embedding and this rank is one of them.
        """
        self._number = {name: number for number, name in enumerate(names)}
        self._parameters = {name: p for part in parts for name, p in part.named_parameters()}
        self._copied = "head.weight" not in self._number and "head.weight" in self._parameters
        """The head is the embedding, which another stage has."""
        if self._copied:
            self._number["head.weight"] = self._number[WORDS]
        self._leaves, self._tied = leaves, tied
        device = next(iter(self._parameters.values())).device
        self._magnitudes = torch.zeros(len(names), dtype=torch.float32, device=device)
        self.tops = exact.unknown_tops(len(names), device)
        """The grids, int64 [N]; of no meaning in fast mode."""
        self._offsets = torch.zeros(len(names), dtype=torch.float64, device=device)
        if leaves is not None:
            for name, parameter in (found for part in parts for found in _accumulated(part)):
                hook = self._rounding(self._number[name])
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before the first leaf of a step."""
        if self._leaves is not None:
            self._magnitudes.zero_()
            self._offsets.copy_(exact.offsets(self.tops, self._leaves))

    def exact(self) -> bool:
        """After the last leaf, on all ranks: whether the sums are right. If not, the step is to be run
        again, from `begin`, with nothing of these gradients. Always so in fast mode."""
        if self._leaves is None:
            return True
        dist.all_reduce(self._magnitudes, dist.ReduceOp.MAX)
        fits = bool(exact.fits(self._magnitudes, self.tops).all())
        self.tops = exact.next_tops(self._magnitudes, self.tops)
        return fits

    def join(self) -> None:
        """Once they are reduced: what is tied over stages has the gradients of both."""
        if self._tied is not None:
            words = self._parameters["head.weight" if self._copied else WORDS]
            assert words.grad is not None
            dist.all_reduce(_local(words.grad), group=self._tied)

    def norm(self) -> Tensor:
        """Of the whole gradient, fp32 [], on all ranks; NaN where not all of it is finite."""
        own = {name: part for name, part in self._parts()}
        tops = torch.zeros_like(self._magnitudes)
        for name, part in own.items():
            tops[self._number[name]] = exact.largest(part)
        dist.all_reduce(tops, dist.ReduceOp.MAX)
        exponents = exact.next_tops(tops, torch.zeros_like(self.tops), headroom=0)
        limbs = torch.zeros(len(tops), exact.LIMBS, dtype=torch.float64, device=tops.device)
        for name, part in own.items():
            number = self._number[name]
            limbs[number] = exact.squares(part, exponents[number], self._parameters[name].numel())
        dist.all_reduce(limbs)
        return exact.norm(limbs)

    def clip(self, norm: Tensor, most: float) -> None:
        """Scale all, so that the norm is at most `most`."""
        scale = torch.clamp(most / (norm + 1e-6), max=1.0)
        parts = [_local(p.grad) for p in self._parameters.values() if p.grad is not None]
        torch._foreach_mul_(parts, scale)

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank counts of each gradient: each element is counted by one rank of the world."""
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None or (self._copied and name == "head.weight"):
                continue
            if isinstance(gradient, DTensor):
                place = gradient.device_mesh.get_coordinate()
                assert place is not None
                copies = zip(gradient.placements, place, strict=True)
                if any(isinstance(how, Replicate) and at for how, at in copies):
                    continue
            yield name, _local(gradient)

    def _rounding(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = _local(parameter.grad)
            magnitude = self._magnitudes[number]
            magnitude.copy_(torch.maximum(magnitude, exact.largest(gradient)))
            gradient.copy_(exact.rounded(gradient, self._offsets[number]))

        return hook


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _accumulated(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that backward accumulates into, which FSDP keeps from step to step."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for part in sharded(model):
        part.unshard()
    for name, parameter in model.named_parameters():
        found.setdefault(id(parameter), (name, parameter))
    for part in sharded(model):
        part.reshard()
    return iter(found.values())

"""The gradient of a step: what each leaf adds to it, whether its sum is exact, its norm.

In exact mode hooks round each leaf's gradient to the grid of its tensor (`elastic.data.exact`) before
FSDP adds it up in fp64, so that no world and no layout of data parallelism changes a bit of it. What all
ranks must agree on, a number or three for each tensor, goes over the world in one vector; tensors are
numbered as the whole model has them, whoever has which part.

Shapes: N tensors of the whole model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from elastic.data import exact
from elastic.trainer.model.tensor_parallel import local
from elastic.trainer.parallel import accumulators
from elastic.trainer.parallel.accumulators import Accumulator
from elastic.trainer.parallel.program import Program
from elastic.trainer.parallel.sharding import sharded
from elastic.trainer.transfers import to_device

WORDS = "embedding.words.weight"
"""The embedding, which is the head, too, where they are tied."""

_ROW, _ROWS = 256, 2**16
"""Elements of a gradient whose squares are summed up by themselves, and how many such rows at once."""
_ALIGNED = 16
"""Bytes. Inductor copies what lies elsewhere, before it works on it, and back."""


class Gradients:
    """Those of one model over its life. `tops` is state, the same on every rank."""

    def __init__(
        self,
        programs: Sequence[Program],
        names: Sequence[str],
        *,
        leaves: int | None,
        tied: tuple[int, dist.ProcessGroup] | None = None,
        every_leaf: bool = False,
        compiled: bool = False,
        device: torch.device,
    ) -> None:
        """programs: with the parts of the model, sharded, that this rank has; names: of all tensors of
        the whole model.

        leaves: the most that a batch of the run has, times the tensor-parallel ranks that each add a
        part to it; None: fast mode, which rounds nothing. tied: the rank that has the other end of a
        pipeline, where both ends have the words' embedding and this rank one of them, and the group that the
        two are in. every_leaf: whether FSDP reduces after each leaf (ZeRO 2 and 3). device: where is computed, and what
        ranks agree on; parameters may be in host memory.
        """
        self._number = {name: number for number, name in enumerate(names)}
        self._parameters = {
            name: p for program in programs for name, p in program.model.named_parameters()
        }
        self.copied = "head.weight" not in self._number and "head.weight" in self._parameters
        """The head is the embedding, which another stage has."""
        if self.copied:
            self._number["head.weight"] = self._number[WORDS]
        self._leaves, self._tied = leaves, tied
        self._device = device
        self.tops = exact.unknown_tops(len(names), device)
        """The grids, int64 [N]; of no meaning in fast mode."""
        numels = [1] * len(names)
        for name, parameter in self._parameters.items():
            numels[self._number[name]] = parameter.numel()
        self._numels = torch.tensor(numels, device=device)
        self._squares: Callable[..., Tensor] = exact.squares
        if compiled:
            self._squares = _for_any_rows(torch.compile(exact.squares))
        self._sums: list[ShardSum] = []
        if leaves is not None and every_leaf:
            self._sums = [ShardSum(piece, own) for one in programs for piece, own in _pieces(one)]
        self._accumulators: list[Accumulator] = []
        if leaves is not None or compiled:
            self._accumulate(programs, compiled=compiled)

    def _accumulate(self, programs: Sequence[Program], *, compiled: bool) -> None:
        """From now on each leaf's gradients are added up here, where that is another sum than FSDP's own, or a
        faster one."""
        groups = [one for program in programs for one in _trained(program)]
        order = [self._number[name] for _, parameters in groups for name in parameters]
        self._at, self._of = self._places(order)
        self._magnitudes = _aligned(len(order), torch.float32, self._device)
        self._offsets = _aligned(len(order), torch.float64, self._device)
        sizes = [len(parameters) for _, parameters in groups]
        grids = map(
            accumulators.Grids,
            torch.split(self._magnitudes, sizes),
            torch.split(self._offsets, sizes),
        )
        kernels = accumulators.kernels(compiled=compiled)
        rounds = self._leaves is not None
        self._accumulators = [
            Accumulator(group, parameters, grid if rounds else None, kernels)
            for (group, parameters), grid in zip(groups, grids, strict=True)
            if rounds or (compiled and accumulators.widens(parameters))
        ]

    def begin(self) -> None:
        """Before the first leaf of a step."""
        if self._leaves is not None:
            self._magnitudes.zero_()
            for shards in self._sums:
                shards.begin()
            self._offsets.copy_(exact.offsets(self.tops, self._leaves)[self._at])

    def exact(self) -> Tensor:
        """After the last leaf, on all ranks: whether the sums are right, bool []. If not, the step is to be run
        again, from `begin`, with nothing of these gradients. Always so in fast mode."""
        if self._leaves is None:
            return torch.ones((), dtype=torch.bool)
        for one in self._accumulators:
            one.check()
        magnitudes = _with_none(self._magnitudes)[self._of]
        dist.all_reduce(magnitudes, dist.ReduceOp.MAX)
        fits = exact.fits(magnitudes, self.tops).all()
        self.tops.copy_(exact.next_tops(magnitudes, self.tops))
        return fits

    def join(self) -> None:
        """Once they are reduced: what is tied over stages has the gradients of both."""
        if self._tied is None:
            return
        words = self._parameters["head.weight" if self.copied else WORDS]
        if words.grad is not None:  # else neither end is trained
            own = local(words.grad)
            sent = own.to(self._device)
            there = torch.empty_like(sent)
            peer, group = self._tied
            ways = (
                dist.P2POp(dist.isend, sent, peer, group),
                dist.P2POp(dist.irecv, there, peer, group),
            )
            for work in dist.batch_isend_irecv(list(ways)):
                work.wait()
            own.add_(there.to(own.device))  # the same on both: of two, the order makes no bits

    def norm(self) -> Tensor:
        """Of the whole gradient, fp32 [], on all ranks; NaN where not all of it is finite."""
        own = {self._number[name]: part.flatten() for name, part in self._parts() if part.numel()}
        groups = list(_together({number: part.numel() for number, part in own.items()}))
        order = [number for numbers in groups for number in numbers]
        at, of = self._places(order)
        largest = torch.zeros(0, device=self._device)
        if own:
            magnitudes = exact.largest_of_each([own[number] for number in order])
            largest = magnitudes.to(self._device)
        largest = _with_none(largest)[of]
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        tops = exact.next_tops(largest, torch.zeros_like(self.tops), headroom=0)
        exponents = exact.square_exponents(tops, self._numels)[at]
        limbs = [exponents.new_zeros(0, exact.LIMBS, dtype=torch.float64)]
        sizes = [len(numbers) for numbers in groups]
        for numbers, own_exponents in zip(groups, torch.split(exponents, sizes), strict=True):
            rows = _rows([own[number] for number in numbers]).to(self._device)
            each = len(rows) // len(numbers)
            found = self._squares(rows, own_exponents.repeat_interleave(each, dim=0))
            limbs.append(found.view(len(numbers), each, exact.LIMBS).sum(dim=1))
        every = _with_none(torch.cat(limbs))[of]
        dist.all_reduce(every)
        return exact.norm(every)

    def scale(self, factor: Tensor) -> None:
        """Multiply all by `factor`, fp32 []."""
        parts = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        torch._foreach_mul_(parts, factor.to(parts[0].device))

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank counts of each gradient: each element is counted by one rank of the world."""
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None or (self.copied and name == "head.weight"):
                continue
            if isinstance(gradient, DTensor):
                place = gradient.device_mesh.get_coordinate()
                assert place is not None
                copies = zip(gradient.placements, place, strict=True)
                if any(isinstance(how, Replicate) and at for how, at in copies):
                    continue
            yield name, local(gradient)

    def _places(self, order: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of what this rank has of tensors, in `order`: their numbers, and where each of the N is found there
        behind `_with_none`."""
        places = [0] * len(self.tops)
        for place, number in enumerate(order, 1):
            places[number] = place
        at, of = (to_device(torch.tensor(one).long(), self._device) for one in (order, places))
        return at, of


class ShardSum:
    """The sum over leaves of what one of FSDP's reductions gives this rank, as wide as it is reduced.

    FSDP itself would add each leaf's, rounded to the parameters' dtype, to `.grad`.
    """

    def __init__(self, piece: FSDPModule, parameters: Sequence[nn.Parameter]) -> None:
        """parameters: those that `piece` reduces, as they are between steps."""
        self._parameters = parameters
        self._sum: Tensor | None = None
        piece.set_all_reduce_hook(self._add)

    def begin(self) -> None:
        """Before the first leaf."""
        if self._sum is not None:
            self._sum.zero_()

    def _add(self, reduced: Tensor) -> None:
        """After a leaf's reduction, before it is rounded: what FSDP makes the gradient of it."""
        if self._sum is None:
            self._sum = torch.zeros_like(reduced)
        self._sum += reduced
        reduced.copy_(self._sum)
        if reduced.is_cuda:  # made on another stream than this one, and not kept by FSDP
            reduced.record_stream(torch.cuda.current_stream())
        for parameter in self._parameters:
            parameter.grad = None  # else it would be added to the sum of the leaves before


def _pieces(model: nn.Module) -> Iterator[tuple[FSDPModule, list[nn.Parameter]]]:
    """What FSDP reduces at once, as it is now."""
    taken: set[int] = set()
    for piece in reversed(list(sharded(model))):  # blocks before what is around them
        own = [p for p in cast(nn.Module, piece).parameters() if id(p) not in taken]
        taken.update(map(id, own))
        yield piece, own


def _with_none(own: Tensor) -> Tensor:
    """[n, ...] -> [1 + n, ...], with zeros in the first place, for what this rank has not."""
    return torch.cat((own.new_zeros(1, *own.shape[1:]), own))


def _aligned(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, [count], each of which a compiled function takes as it lies, and none for another kind of thing: the
    first number of a storage would be one."""
    return torch.zeros(1 + count, _ALIGNED // dtype.itemsize, dtype=dtype, device=device)[1:, 0]


def _for_any_rows(compiled: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """With one graph for any number of rows, from the first call on."""

    def function(rows: Tensor, exponents: Tensor) -> Tensor:
        for one in (rows, exponents):
            torch._dynamo.mark_dynamic(one, 0)
        return compiled(rows, exponents)

    return function


def _together(numels: Mapping[int, int]) -> Iterator[list[int]]:
    """Which tensors of such sizes are summed up at once: of one size, and not too many."""
    alike: dict[int, list[int]] = {}
    for number, numel in numels.items():
        alike.setdefault(numel, []).append(number)
    for numel, numbers in alike.items():
        most = max(1, _ROWS * _ROW // numel)
        yield from (numbers[at : at + most] for at in range(0, len(numbers), most))


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Parts of one size, in rows of `_ROW`, at least two each, with zeros behind each part: [rows, _ROW]."""
    stacked = torch.stack(list(parts))  # one, too: a view of it would be of another kind to compile
    wanted = max(2, math.ceil(stacked.shape[1] / _ROW)) * _ROW
    if missing := wanted - stacked.shape[1]:
        stacked = torch.nn.functional.pad(stacked, (0, missing))
    return stacked.view(-1, _ROW)


def _trained(program: Program) -> Iterator[tuple[Any, dict[str, Any]]]:
    """FSDP's groups, and their parameters that are trained by name, both FSDP's own."""
    for part in sharded(program):
        part.unshard()  # one at a time, since all may be more than a device has
        names: dict[int, str] = {}
        for name, parameter in program.model.named_parameters():
            names.setdefault(id(parameter), name)
        for group in accumulators.groups_of(part):
            found = {
                names[id(one.unsharded_param)]: one
                for one in group.fsdp_params
                if one.unsharded_param.requires_grad
            }
            if found:
                yield group, found
        part.reshard()

"""A leaf's gradients, added to those of the leaves before: all that FSDP reduces at once, in one go.

FSDP adds them up tensor by tensor, with a kernel for each that comes to a third of the memory's speed. Here a block's
are added by one compiled call, when the last of them is there and before FSDP would; in exact mode each is rounded
to its grid in the same call (`elastic.data.exact`). The sums are where FSDP has its own, so whatever is not added
here FSDP adds, and it reduces them as ever.

FSDP's accumulators have private names, in torch 2.11 to 2.13: this is the only module that uses them.

Shapes: n tensors of a group, which FSDP gathers and reduces at once.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from elastic.data import exact
from elastic.proto.errors import UsageError
from elastic.trainer.model.tensor_parallel import local
from elastic.trainer.parallel.sharding import sharded


class Grids(NamedTuple):
    """Of a group's tensors, in their order."""

    magnitudes: Tensor
    """The largest of all leaves so far, fp32 [n], which is brought up to date."""
    offsets: Tensor
    """As `exact.offsets` has them, fp64 [n]."""


class Kernels(NamedTuple):
    """How gradients of tensors, n of [any], are rounded and added up."""

    add: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
    """To wider sums."""
    add_rounded: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]
    """The same in exact mode; then come the two of `Grids`."""
    round: Callable[[Sequence[Tensor], Tensor, Tensor], None]
    """In place."""


class Accumulator:
    """Of one group."""

    def __init__(
        self, group: Any, parameters: Mapping[str, Any], grids: Grids | None, kernels: Kernels
    ) -> None:
        """group: FSDP's own; parameters: those of them that are trained, FSDP's own, by name; grids: of exact
        mode."""
        self._group, self._parameters = group, parameters
        self._grids, self._kernels = grids, kernels
        self._names = {id(one.unsharded_param): name for name, one in parameters.items()}
        self._missing = self._names.copy()
        """Of the leaf under way."""
        for one in parameters.values():
            one.unsharded_param.register_post_accumulate_grad_hook(_weak(self._take))

    def check(self) -> None:
        """Between leaves, in exact mode. UsageError where a leaf's were not all there, so that FSDP added up some
        as they were."""
        if self._grids is not None and len(self._missing) < len(self._names):
            raise UsageError(
                f"a leaf gave no gradient to {', '.join(self._missing.values())}, but to others of "
                f"{len(self._names)} parameters, and --reduction exact wants all or none: take --reduction "
                "fast, or have every leaf use them"
            )

    def _take(self, parameter: Tensor) -> None:
        if id(parameter) not in self._missing:  # of the next leaf
            self.check()
            self._missing = self._names.copy()
        del self._missing[id(parameter)]
        if self._missing:
            return
        every = (one.unsharded_param for one in self._parameters.values())
        came = [one for one in every if one.grad is not None]
        if len(came) == len(self._names):
            self._missing = self._names.copy()
            self._all_there()
            return
        # They were missing in the leaf before this one: what that gave, FSDP has added, and the rest is to come.
        self._missing = {id(one): self._names[id(one)] for one in came}
        self.check()
        self._missing = {key: name for key, name in self._names.items() if key not in self._missing}

    def _all_there(self) -> None:
        every = list(self._parameters.values())
        gradients = [local(one.unsharded_param.grad).view(-1) for one in every]
        sums = [one.unsharded_accumulated_grad for one in every]
        if all(one is None for one in sums):
            if self._group.reduce_grads and not (self._grids and any(map(_is_part, every))):
                # Nothing to add them to, as with one leaf, or ZeRO 2 and 3.
                if self._grids is not None:
                    self._kernels.round(gradients, *self._grids)
                return
            sums = self._begin(every)
        elif any(one is None for one in sums):
            return  # to FSDP, which has begun without some
        into = [local(one).view(-1) for one in sums]
        if self._grids is None:
            self._kernels.add(gradients, into)
        else:
            self._kernels.add_rounded(gradients, into, *self._grids)
        for one in every:
            one.unsharded_param.grad = None

    def _begin(self, every: Sequence[Any]) -> list[Tensor]:
        """Zeros for all of the group, which becomes what FSDP reduces."""
        for one in every:
            like = one.unsharded_param.grad
            total = torch.empty_like(local(like), dtype=one.reduce_dtype)
            if isinstance(like, DTensor):
                total = DTensor.from_local(
                    total, like.device_mesh, like.placements, run_check=False, shape=like.shape,
                    stride=like.stride(),
                )  # fmt: skip
            one.unsharded_accumulated_grad = total
        found = [one.unsharded_accumulated_grad for one in every]
        torch._foreach_zero_([local(one) for one in found])
        return found


class Forwards:
    """Of a program's leaves: each has to run all that is trained. What FSDP reduces at once it reduces where it has
    run: a replica whose leaf leaves it out would meet the others in another collective than they are in."""

    def __init__(self, program: nn.Module) -> None:
        """program: sharded."""
        self._trained = {
            name: group
            for name, part in program.named_modules()
            if isinstance(part, FSDPModule)
            for group in groups_of(part)
            if any(one.sharded_param.requires_grad for one in group.fsdp_params)
        }

    @contextmanager
    def leaf(self) -> Iterator[None]:
        """Around its forward. UsageError where it leaves something out."""
        before = len(self._order())
        yield
        ran = set(map(id, self._order()[before:]))
        for name, group in self._trained.items():
            if id(group) not in ran:
                raise UsageError(
                    f"a leaf did not run {name.removeprefix('model.')}, whose gradients replicas add up where they "
                    "run it: have every leaf run every block"
                )

    def _order(self) -> Sequence[Any]:
        """FSDP's groups as they have run forward, and as often, since a step's last backward."""
        group = next(iter(self._trained.values()), None)
        shared = None if group is None else group.comm_ctx
        return getattr(shared, "post_forward_order", ())  # which its first forward makes


def _is_part(parameter: Any) -> bool:
    """Whether tensor-parallel ranks have parts of its gradient, which FSDP adds up before it reduces them: exactly, then, in
    the sums' width alone."""
    gradient = parameter.unsharded_param.grad
    return isinstance(gradient, DTensor) and any(one.is_partial() for one in gradient.placements)


def widens(parameters: Mapping[str, Any]) -> bool:
    """Whether gradients of FSDP's parameters are added up in a wider dtype than they come in: where not, autograd
    adds them up."""
    return all(one.reduce_dtype is not None for one in parameters.values())


def groups(module: nn.Module) -> Iterator[Any]:
    """FSDP's own, of all that is sharded in `module`."""
    for part in sharded(module):
        yield from groups_of(part)


def groups_of(part: FSDPModule) -> Iterator[Any]:
    """Of what gathers and reduces by itself."""
    of: Any = replicate if isinstance(part, ReplicateModule) else fully_shard
    state = of.state(part)
    several = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    yield from filter(None, several)


def accumulate(module: nn.Module) -> None:
    """What autograd and FSDP do behind a backward, for gradients that came past them, into `.grad`."""
    parameters = [one for group in groups(module) for one in group.fsdp_params]
    for one in parameters:
        unsharded: nn.Parameter = one.unsharded_param
        if unsharded.grad is not None:
            for hook in (unsharded._post_accumulate_grad_hooks or {}).values():
                hook(unsharded)
    for one in parameters:
        one.accumulate_unsharded_grad_if_needed()
        one.to_accumulated_grad_if_needed()


def kernels(*, compiled: bool) -> Kernels:
    """Those of a process."""
    if not compiled:
        return Kernels(_add, _add_rounded, _round)
    options: dict[str, Any] = {"combo_kernels": True}
    plain = (_add, _add_rounded, _round)
    return Kernels(*(torch.compile(one, dynamic=False, options=options) for one in plain))


def _add(gradients: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    for gradient, total in zip(gradients, sums, strict=True):
        total.add_(gradient)


def _add_rounded(
    gradients: Sequence[Tensor], sums: Sequence[Tensor], magnitudes: Tensor, offsets: Tensor
) -> None:
    found = torch.stack([exact.largest(gradient) for gradient in gradients])
    magnitudes.copy_(torch.maximum(magnitudes, found))
    for gradient, total, offset in zip(gradients, sums, offsets.unbind(), strict=True):
        total.add_(exact.rounded(gradient, offset))


def _round(gradients: Sequence[Tensor], magnitudes: Tensor, offsets: Tensor) -> None:
    found = torch.stack([exact.largest(gradient) for gradient in gradients])
    magnitudes.copy_(torch.maximum(magnitudes, found))
    for gradient, offset in zip(gradients, offsets.unbind(), strict=True):
        gradient.copy_(exact.rounded(gradient, offset))


def _weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """As a tensor's hook, which the collector does not see: it would keep its object, and the tensor, for ever."""
    there = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        if (here := there()) is not None:
            here(tensor)

    return hook

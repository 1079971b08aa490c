"""The state that a script hands over, as logical tensors and typed JSON, and the way back.

A name is the path to a tensor: `model.layers.0.weight`, `optimizer.state.model.layers.0.weight.step`.
Wrappers leave no trace in it (DDP's `module.`, `torch.compile`'s `_orig_mod.`), and an optimizer's
tensors are named by their parameter, so that a name means the same in every world.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic.checkpoint.state import typed_json
from elastic.checkpoint.state.tensors import Known, Part, Tensors
from elastic.proto.errors import CheckpointError

_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")


@runtime_checkable
class Stateful(Protocol):
    """Modules, optimizers, schedulers, samplers: whatever keeps its state in a dict."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this rank is. Ranks of a node are consecutive."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def node(self) -> range:
        """The ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A state, taken apart."""

    parts: dict[str, Part]
    ties: dict[str, str]
    """The name of a tensor that is another one, and that one's."""
    values: str
    """The rest, as typed JSON."""


def collect(
    state: Mapping[str, Any], place: Place, known: "dict[str, Known] | None" = None
) -> Collected:
    """Take `state` apart; no tensor is copied, and no other rank is asked.

    known: what was found of each tensor before, and is now; it saves time where that is still so.
    Raises `CheckpointError`, which names the place, for what a checkpoint cannot keep.
    """
    with torch.no_grad():  # else each DTensor's piece is a node of a graph
        try:
            tree, replicas = export(state)
        except RecursionError as error:
            raise CheckpointError(
                "the state is nested without an end: does it hold itself?"
            ) from error
        store = Tensors(place.rank, replicas, {} if known is None else known)
        values = typed_json.encode(tree, "", store)
    return Collected(parts=store.parts, ties=store.ties, values=values)


def export(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, tuple[int, ...]]]:
    """`state` with a plain tree in the place of every object that keeps its state in a dict.

    Also the ranks that keep a tensor of that tree equal, by the tensor's `id`.
    """
    exporter = _Exporter()
    for path, module in modules(state):
        exporter.meet(path, module)
    exporter.look(state)
    return exporter.export(dict(state)), exporter.replicas


def names_of(state: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of the modules in `state`, by the parameter's `id`."""
    exporter = _Exporter()
    for path, module in modules(state):
        exporter.meet(path, module)
    return exporter.names


def modules(value: Any, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules in a state, with their paths."""
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(item, torch.Tensor):
                yield from modules(item, f"{path}.{key}" if path else str(key))


def unwrap(module: torch.nn.Module) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """The module that a script built, and the ranks that DDP keeps it equal on, if any."""
    ranks: tuple[int, ...] = ()
    while True:
        if isinstance(module, DistributedDataParallel):
            ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):  # torch.compile's
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module, ranks


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """Its `state_dict`, with its parameters themselves where that is torch's."""
    if is_torchs(module, "state_dict"):
        return module.state_dict(keep_vars=True)
    return module.state_dict()


def is_torchs(module: torch.nn.Module, method: str) -> bool:
    """Whether a module's method is not the script's own, of its class or put into it."""
    found = getattr(getattr(module, method), "__func__", None)
    return found is getattr(torch.nn.Module, method)


def apart(module: torch.nn.Module, found: Mapping[str, Any]) -> set[str]:
    """What of its `state_dict` is in no memory of its own, but made for that: to fill it changes nothing."""
    own = {memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return {
        key
        for key, value in found.items()
        if not key.endswith("_extra_state")
        and not (isinstance(value, torch.Tensor) and (not value.numel() or memory(value) in own))
    }


def memory(tensor: torch.Tensor) -> int:
    """Where the storage begins that it, or its piece, lies in; 0 where it has none, as one that is sparse."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        return local.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def optimizers(value: Any) -> Iterator[torch.optim.Optimizer]:
    """Those in a state."""
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif type(value) is dict:
        for item in value.values():
            if not isinstance(item, torch.Tensor):
                yield from optimizers(item)


def clean(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    return _WRAPPER.sub("", name) if "_orig_mod" in name or "_checkpoint" in name else name


def _is_stateful(value: object) -> bool:
    """As `isinstance(value, Stateful)`, which takes its time."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


@dataclass(frozen=True, slots=True)
class _Replicated:
    """A module that DDP keeps equal on those ranks."""

    ranks: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    """Of its parameters."""
    trained: set[int] = field(default_factory=set)
    """The `id`s of those that optimizers may change."""


class _Exporter:
    """Knows the parameters of all modules, so that an optimizer's state can be named by them."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._replicated: dict[int, _Replicated] = {}
        """By the `id` of a module that DDP keeps equal."""
        self._ranks: dict[int, tuple[int, ...]] = {}
        """By the `id` of a parameter, those that have equal state for it, where several have."""
        self.replicas: dict[int, tuple[int, ...]] = {}

    def meet(self, path: str, module: torch.nn.Module) -> None:
        inner, ranks = unwrap(module)
        for name, parameter in inner.named_parameters(remove_duplicate=False):
            name = clean(name)
            self.names.setdefault(id(parameter), f"{path}.{name}")
            if ranks:
                one = self._replicated.setdefault(id(inner), _Replicated(ranks))
                one.names.append(name)
                one.trained.update({id(parameter)} if parameter.requires_grad else ())

    def look(self, state: Mapping[str, Any]) -> None:
        """Whether this rank has an optimizer's state for all parameters of a module that DDP keeps equal.
        Where it has not, each rank may have its own part of it (ZeRO): it relies on nobody then."""
        stated = {
            id(parameter)
            for optimizer in optimizers(dict(state))
            for parameter, found in optimizer.state.items()
            if type(found) is not dict or found
        }
        for one in self._replicated.values():
            if one.trained <= stated:
                self._ranks.update(dict.fromkeys(one.trained, one.ranks))

    def export(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        if type(value) is dict:
            return {key: self.export(item) for key, item in value.items()}
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if _is_stateful(value) and not isinstance(value, type):
            return value.state_dict()
        return value

    def _module(self, module: torch.nn.Module) -> dict[str, Any]:
        inner, ranks = unwrap(module)
        tree = {clean(key): value for key, value in state_of(inner).items()}
        if ranks:
            for name in self._replicated[id(inner)].names:  # buffers are each rank's own
                if name in tree:
                    self.replicas[id(tree[name])] = ranks
        return tree

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Its `state_dict` with names in the place of the numbers of parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tree = optimizer.state_dict()
        numbers = [n for group in tree["param_groups"] for n in group["params"]]
        names: dict[Any, str] = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            names[number] = self.names.get(id(parameter), f"parameter {number}")
        state = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in tree["state"]:
                state[names[number]] = tree["state"][number]
                self._note(tree["state"][number], self._ranks.get(id(parameter), ()))
        groups = [
            group | {"params": [names[number] for number in group["params"]]}
            for group in tree["param_groups"]
        ]
        return tree | {"state": state, "param_groups": groups}

    def _note(self, state: Any, ranks: tuple[int, ...]) -> None:
        if ranks:
            for value in pytree.tree_leaves(state):
                if isinstance(value, torch.Tensor):
                    self.replicas[id(value)] = ranks

"""Images into a state: each tensor filled in place, or made, from whatever images hold its pieces."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from elastic.checkpoint import copy_cpu, typed_json
from elastic.checkpoint.image import Image, Piece
from elastic.checkpoint.plan import Read, index, plan
from elastic.checkpoint.state import Part, Place, Stateful, collect, names_of, unwrap
from elastic.proto import sums
from elastic.proto.errors import CheckpointError
from elastic.proto.sums import Chunk


class Reader(Protocol):
    """Where an image's bytes are: a slot, a file, a peer's memory, an object in a store."""

    def read(self, start: int, end: int) -> memoryview:
        """Those bytes of the image, to be read only; may be called by several threads at a time.

        Raises OSError.
        """
        ...


class Mapped:
    """An image that is all in reach: a slot, a file that is mapped."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read(self, start: int, end: int) -> memoryview:
        return self._data[start:end]


@dataclass(slots=True, kw_only=True)
class Source:
    """One image, somewhere; its bytes are verified before they are used."""

    where: str
    """In words: "rank 3's slot", or a file."""
    image: Image
    reader: Reader
    chunks: Sequence[Chunk]
    _verified: dict[str, bool] = field(default_factory=dict[str, bool])

    def intact(self, start: int, end: int) -> bool:
        """Whether the bytes of a span of the image are those that were written."""
        at = 0
        for chunk in self.chunks:
            if (
                at < end
                and chunk.end > start
                and sums.checksum(self.reader.read(at, chunk.end)) != chunk.checksum
            ):
                return False
            at = chunk.end
        return True

    def piece(self, name: str) -> torch.Tensor | None:
        """A piece, in the image's own memory; None where it is damaged."""
        start = self.image.starts[name]
        end = start + self.image.pieces[name].nbytes
        if name not in self._verified:
            self._verified[name] = self.intact(start, end)
        if not self._verified[name]:
            return None
        return copy_cpu.tensor_of(self.image.pieces[name], self.reader.read(start, end))

    def values(self, find: Callable[[str], Any]) -> Any:
        """What is no tensor, with `find(name)` in the place of each tensor."""
        start, end = self.image.values_at, self.image.sums_at
        if not self.intact(start, end):
            raise CheckpointError(f"{self.where}: the values are damaged")
        return typed_json.decode(bytes(self.reader.read(start, end)), find)


@dataclass(frozen=True, slots=True)
class _Saved:
    """The place of a tensor in a tree of saved values."""

    name: str


class Restore:
    """Fills a state from sources, those that are preferred first."""

    def __init__(self, sources: Sequence[Source], place: Place) -> None:
        self._sources = sources
        self._place = place
        self._held = index(
            (number, source.image.pieces.values()) for number, source in enumerate(sources)
        )
        self._ties = {k: v for source in reversed(sources) for k, v in source.image.ties.items()}
        self.damaged: list[str] = []
        """What was found damaged and taken from elsewhere."""
        self._trees = self._values(sources)

    def _values(self, sources: Sequence[Source]) -> list[Any]:
        """What is no tensor, of each source where it is sound. Raises where it is of none."""
        trees: list[Any] = []
        for source in sources:
            try:
                trees.append(source.values(_Saved))
            except CheckpointError as error:
                self.damaged.append(str(error))
        if sources and not trees:
            raise CheckpointError(f"{self.damaged[-1]}, and there is no other copy of them")
        return trees

    # --- tensors -----------------------------------------------------------------------------

    def fill(self, parts: Mapping[str, Part]) -> list[str]:
        """Fill tensors in place; returns the names that no source has."""
        reads, missing = [], []
        for name, part in parts.items():  # several may have been one tensor when they were saved
            found, lacking = plan([self._renamed(part.piece)], self._held)
            reads += [(read, part.tensor) for read in found]
            missing += [name] * len(lacking)
        for read, tensor in reads:
            self._copy(read, tensor)
        return missing

    def _renamed(self, piece: Piece) -> Piece:
        name = self._ties.get(piece.name, piece.name)
        if name == piece.name:
            return piece
        return Piece(
            name=name,
            dtype=piece.dtype,
            shape=piece.shape,
            offset=piece.offset,
            extent=piece.extent,
        )

    @torch.no_grad()
    def _copy(self, read: Read[int], target: torch.Tensor) -> None:
        source = self._sources[read.shard]
        data = source.piece(read.piece.name)
        if data is None:
            self._elsewhere(read, target)
            return
        lazy = target.is_conj() or target.is_neg()  # its memory holds other bits than it has
        raw = (target, data) if lazy else (_bits(target), _bits(data))
        for dim, (start, size) in enumerate(zip(read.box.offset, read.box.extent, strict=True)):
            raw = (
                raw[0].narrow(dim, start - read.wanted.offset[dim], size),
                raw[1].narrow(dim, start - read.piece.offset[dim], size),
            )
        for dim, stride in enumerate(raw[0].stride()):
            if stride == 0 and raw[0].shape[dim] > 1:  # expanded: it is one element in memory
                one = raw[1].narrow(dim, 0, 1)
                if not torch.equal(one.expand_as(raw[1]), raw[1]):
                    raise CheckpointError(
                        f"{read.wanted.name} is expanded in dim {dim} here, and not in the checkpoint"
                    )
                raw = (raw[0].narrow(dim, 0, 1), one)
        raw[0].copy_(raw[1])

    def _elsewhere(self, read: Read[int], target: torch.Tensor) -> None:
        """The same box from other sources: this one is damaged."""
        name = read.piece.name
        self.damaged.append(f"{self._sources[read.shard].where}: {name} is damaged")
        rest = [(shard, piece) for shard, piece in self._held[name] if shard != read.shard]
        box = Piece(
            name=name, dtype=read.wanted.dtype, shape=read.wanted.shape, offset=read.box.offset,
            extent=read.box.extent,
        )  # fmt: skip
        reads, missing = plan([box], {name: rest})
        if missing:
            raise CheckpointError(f"{self.damaged[-1]}, and there is no other copy of it")
        self._held[name] = rest
        for again in reads:
            self._copy(
                Read(wanted=read.wanted, shard=again.shard, piece=again.piece, box=again.box),
                target,
            )

    def make(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """A tensor that is not there yet: laid out as `like` where it is of the same shape (a
        parameter, for its optimizer's state), on its device; else whole, on the CPU."""
        found = self._held.get(self._ties.get(name, name))
        if not found:
            raise CheckpointError(f"{name} is in no part of the checkpoint that is here")
        piece = found[0][1]
        if sum(math.prod(held.extent) for _, held in found) < math.prod(piece.shape):
            raise CheckpointError(f"{name} is not whole in what is here of the checkpoint")
        dtype = getattr(torch, piece.dtype)
        same = like is not None and tuple(like.shape) == piece.shape
        if same and isinstance(like, DTensor):
            local = torch.empty_like(like.to_local(), dtype=dtype)
            made: torch.Tensor = DTensor.from_local(
                local, like.device_mesh, like.placements, run_check=False, shape=like.shape,
                stride=like.stride(),
            )  # fmt: skip
        else:
            made = torch.empty(
                piece.shape, dtype=dtype, device=like.device if same and like is not None else None
            )
        (part,) = collect({name: made}, self._place).parts.values()
        missing = self.fill({name: part})
        if missing:
            raise CheckpointError(f"{name} is not whole in what is here of the checkpoint")
        return made

    # --- everything else ---------------------------------------------------------------------

    def apply(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load all of `state`. Raises `CheckpointError` for what is not there, if strict."""
        parts = collect(state, self._place).parts
        known = {name: part for name, part in parts.items() if part.tensor.numel()}
        missing = self.fill(known)
        if missing and strict:
            raise CheckpointError(_complaint("has no", missing))
        names = names_of(state)
        for key, value in state.items():
            saved = [tree[key] for tree in self._trees if isinstance(tree, dict) and key in tree]
            if not saved:
                if strict:
                    raise CheckpointError(f"the checkpoint has no {key!r}")
                continue
            state[key] = self._load(value, saved, names, key, strict)

    def _load(
        self, value: Any, saved: list[Any], names: Mapping[int, str], path: str, strict: bool
    ) -> Any:
        """One object; returns what belongs in its place."""
        if isinstance(value, torch.nn.Module):
            self._load_extra(value, saved[0], path)
        elif isinstance(value, torch.optim.Optimizer):
            value.load_state_dict(self._optimizer(value, saved, names, path))
        elif isinstance(value, Stateful):
            value.load_state_dict(self._built(saved[0], None))
        elif type(value) is dict:
            for key in value:
                inner = [tree[key] for tree in saved if isinstance(tree, dict) and key in tree]
                if inner:
                    value[key] = self._load(value[key], inner, names, f"{path}.{key}", strict)
                elif strict:
                    raise CheckpointError(f"the checkpoint has no {f'{path}.{key}'!r}")
        elif not isinstance(value, torch.Tensor):
            return self._built(saved[0], None)
        return value

    def _load_extra(self, module: torch.nn.Module, saved: Any, path: str) -> None:
        """What modules keep beside their tensors (`get_extra_state`)."""
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path} is a module here and something else in the checkpoint")
        inner, _ = unwrap(module)
        for name, part in inner.named_modules():
            key = f"{name}._extra_state" if name else "_extra_state"
            if key in saved:
                part.set_extra_state(self._built(saved[key], None))

    def _optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        saved: list[Any],
        names: Mapping[int, str],
        path: str,
    ) -> dict[str, Any]:
        """Its `state_dict`, by the numbers that its parameters have now."""
        if not all(map(_of_optimizer, saved)):
            raise CheckpointError(
                f"{path} is an optimizer here and something else in the checkpoint"
            )
        if len(saved[0]["param_groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                f"an optimizer has {len(optimizer.param_groups)} groups of parameters here and "
                f"{len(saved[0]['param_groups'])} in the checkpoint"
            )
        groups, state, number = [], {}, 0
        for place, group in enumerate(optimizer.param_groups):
            numbers = []
            for parameter in group["params"]:
                name = names.get(id(parameter), f"parameter {number}")
                tree = next((s["state"][name] for s in saved if name in s["state"]), None)
                if tree is not None:
                    state[number] = self._built(tree, parameter)
                numbers.append(number)
                number += 1
            options = self._built(saved[0]["param_groups"][place], None)
            groups.append(options | {"params": numbers})
        rest = {
            key: value for key, value in saved[0].items() if key not in ("state", "param_groups")
        }
        return {**self._built(rest, None), "state": state, "param_groups": groups}

    def _built(self, tree: Any, like: torch.Tensor | None) -> Any:
        """A saved tree with its tensors."""
        if isinstance(tree, _Saved):
            return self.make(tree.name, like)
        if isinstance(tree, dict):
            built = tree.copy()  # of its own type: a Counter, an OrderedDict, a defaultdict
            for key in tree:
                built[key] = self._built(tree[key], like)
            return built
        if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
            return type(tree)(self._built(item, like) for item in tree)
        if type(tree) is collections.deque:
            return collections.deque((self._built(item, like) for item in tree), tree.maxlen)
        return tree


def _of_optimizer(tree: Any) -> bool:
    return (
        isinstance(tree, dict)
        and isinstance(tree.get("state"), dict)
        and isinstance(tree.get("param_groups"), list)
        and all(isinstance(group, dict) for group in tree["param_groups"])
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, which every copy takes as they are."""
    words = copy_cpu.WORDS.get(tensor.itemsize)
    return tensor if words is None else tensor.view(words)


def _complaint(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the checkpoint {what} {', '.join(names[:3])}{more}"

"""Images into a state: each tensor filled in place, or made, from whatever images hold its pieces."""

import collections
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from elastic.checkpoint.load import fetch
from elastic.checkpoint.load.plan import index, plan
from elastic.checkpoint.load.source import Source
from elastic.checkpoint.memory import host
from elastic.checkpoint.state.collect import (
    Place,
    Stateful,
    apart,
    clean,
    collect,
    is_torchs,
    names_of,
    state_of,
    unwrap,
)
from elastic.checkpoint.state.image import Piece
from elastic.checkpoint.state.tensors import Part, Tensors
from elastic.checkpoint.storage.protocol import lasting
from elastic.proto.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class _Saved:
    """The place of a tensor in a tree of saved values."""

    name: str


_Keys = tuple[Any, ...]
"""The way to a value, from the state on."""


class Restore:
    """Fills a state from sources, those that are preferred first: a rank's own is the first.

    Tensors are filled by several threads; what else there is goes into the state once they are.
    """

    def __init__(
        self, sources: Sequence[Source], place: Place, only: Collection[str] | None = None
    ) -> None:
        """only: the names, or beginnings of names ("model", "model.layers.0"), of what is loaded."""
        self._sources = sources
        self._place = place
        self._only = only
        self._held = index(
            (number, source.image.pieces.values()) for number, source in enumerate(sources)
        )
        self._ties = {k: v for source in reversed(sources) for k, v in source.image.ties.items()}
        self._trees: dict[int, Any] = {}
        """The values of each source that were needed; without those that are damaged."""
        self._anew: set[str] = set()
        """Names of what is not filled where it is: tensors, and lists of them."""
        self._made: list[Part] = []
        self._later: list[Callable[[], object]] = []
        """What is done once all tensors are there."""
        self.damaged: list[str] = []
        """What was found damaged, and taken from elsewhere where there is a copy."""
        self.away = False
        """Something could not be read that may be sound."""

    # --- tensors -----------------------------------------------------------------------------

    def fill(self, parts: Mapping[str, Part]) -> list[str]:
        """Fill tensors in place; returns the names that are not here, whole."""
        jobs: list[fetch.Job] = []
        missing: list[str] = []
        for name, part in parts.items():  # several may have been one tensor when they were saved
            reads, lacking = plan([self._renamed(part.piece)], self._held)
            missing += [name] * len(lacking)
            for read in reads:
                jobs += fetch.jobs(self._sources[read.shard], read, part.tensor, frozenset())
        self._fetch(jobs)
        return missing

    def _renamed(self, piece: Piece) -> Piece:
        return replace(piece, name=self._name(piece.name))

    def _name(self, name: str) -> str:
        """Of the tensor that it is tied to; what the rank's own image has, others may have tied."""
        if self._sources and name in self._sources[0].image.pieces:
            return name
        return self._ties.get(name, name)

    def _fetch(self, jobs: list[fetch.Job]) -> None:
        """Do them, and what is damaged again, from the next that has it."""
        threads = host.threads(self._place.local_world_size)
        while jobs:
            jobs.sort(key=lambda job: (job.read.shard, job.chunks))  # as files are best read
            failed = fetch.fetch(jobs, threads)
            jobs = [again for job, error in failed for again in self._elsewhere(job, error)]

    def _elsewhere(self, job: fetch.Job, error: OSError | None) -> Iterator[fetch.Job]:
        """The same boxes from sources that are known to hold the same."""
        name, piece = job.read.piece.name, job.read.piece
        self._note(error)
        why = "is damaged" if error is None else f"cannot be read: {error}"
        complaint = f"{job.source.where}: {name} {why}"
        self._complain(complaint)
        tried = job.tried | {job.read.shard}
        copies = [
            (shard, copy)
            for shard, copy in self._held[name]
            if shard not in tried and job.source.same_piece(piece, self._sources[shard], copy)
        ]
        for _, _, box in job.boxes:
            offset = tuple(map(sum, zip(box.offset, piece.offset, strict=True)))
            reads, missing = plan(
                [replace(job.read.wanted, offset=offset, extent=box.extent)], {name: copies}
            )
            if missing:
                raise CheckpointError(f"{complaint}, and there is no other copy of it")
            for read in reads:
                again = replace(read, wanted=job.read.wanted)
                yield from fetch.jobs(self._sources[read.shard], again, job.target, tried)

    def _note(self, error: BaseException | None) -> None:
        self.away |= isinstance(error, OSError) and not lasting(error)

    def _complain(self, what: str) -> None:
        if what not in self.damaged:
            self.damaged.append(what)

    @torch.inference_mode(False)  # an optimizer could not change what that makes
    def make(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """A tensor that is not there yet, to be filled with all others: laid out as `like` where it is
        of the same shape (a parameter, for its optimizer's state), on its device; else whole, on the
        CPU."""
        found = self._held.get(self._name(name))
        if not found:
            raise CheckpointError(f"{name} is in no part of the checkpoint that is here")
        piece = found[0][1]
        dtype = getattr(torch, piece.dtype)
        same = like is not None and tuple(like.shape) == piece.shape
        shared = same and isinstance(like, DTensor)  # of which the own shard is enough
        held = sum(math.prod(one.extent) for _, one in found)
        if not shared and held < math.prod(piece.shape):
            raise CheckpointError(f"{name} is not whole in what is here of the checkpoint")
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
        store = Tensors(self._place.rank, {}, {})
        with torch.no_grad():
            store(made, name)
        self._made += store.parts.values()
        return made

    def one(self, name: str) -> torch.Tensor:
        """A tensor by its name, whole, on the CPU. Raises `CheckpointError` where it is not here, sound."""
        made = self.make(name, None)
        if self.fill({name: self._made.pop()}):
            raise CheckpointError(_complaint("has not all of", [name]))
        return made

    def has(self, key: str) -> bool:
        """Whether anybody's state had it, at the top."""
        return next(self._saved((key,)), _Nothing) is not _Nothing

    # --- everything else ---------------------------------------------------------------------

    def apply(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load all of `state`, or what `only` names of it. Raises `CheckpointError` for what is not
        there, if strict; the state is then as it was."""
        collected = collect(self._in_place(state), self._place)
        self._anew = self._untied(collected.ties)
        if self._anew:
            collected = collect(self._in_place(state), self._place)
        found = collected.parts
        self._check_only(state)
        known = {
            name: part
            for name, part in found.items()
            if part.tensor.numel() and self._wanted(name) and "_extra_state" not in name.split(".")
        }
        _, missing = plan((self._renamed(part.piece) for part in known.values()), self._held)
        missing = [name for name in known if self._name(name) in set(missing)]
        if missing and strict:
            raise CheckpointError(_complaint("has no", missing))
        names = names_of(state)
        loaded = {
            key: self._load(value, (key,), names, strict)
            for key, value in state.items()
            if self._touched(str(key))
        }
        parts = {name: part for name, part in known.items() if name not in missing}
        parts |= {f"{n} {part.piece.name}": part for n, part in enumerate(self._made)}
        if lacking := self.fill(parts):
            names_ = [name.partition(" ")[2] or name for name in lacking]
            raise CheckpointError(_complaint("has not all of", names_))
        for act in self._later:
            act()
        state.update(loaded)

    def _in_place(self, state: Mapping[Any, Any], keys: _Keys = ()) -> dict[Any, Any]:
        """What of a state has its tensors filled where they are; the rest is made anew."""
        found: dict[Any, Any] = {}
        for key, value in state.items():
            if type(value) is dict:
                found[key] = self._in_place(value, (*keys, key))
            elif isinstance(value, torch.nn.Module) or self._fits(value, (*keys, key)):
                found[key] = value
        return found

    def _fits(self, value: Any, keys: _Keys) -> bool:
        """Whether it is a tensor, or a list of tensors as it was saved, in number and shapes."""
        if ".".join(map(str, keys)) in self._anew:
            return False
        if isinstance(value, torch.Tensor):
            return True
        if type(value) not in (list, tuple) or not value:
            return False
        if not all(isinstance(item, torch.Tensor) for item in value):
            return False
        saved = next(self._saved(keys), None)
        return (
            isinstance(saved, list | tuple)
            and len(saved) == len(value)
            and all(map(self._alike, value, saved))
        )

    def _alike(self, tensor: torch.Tensor, saved: Any) -> bool:
        held = self._held.get(self._name(saved.name)) if isinstance(saved, _Saved) else None
        return held is not None and held[0][1].shape == tuple(tensor.shape)

    def _untied(self, ties: Mapping[str, str]) -> set[str]:
        """The tensors that are another one here, and were not when they were saved, or the lists that have
        them: what is made anew in each step may begin so."""
        pairs = [{self._name(name): name for name in pair} for pair in ties.items()]
        names = {
            name
            for pair in pairs
            if len(pair) > 1 and pair.keys() <= self._held.keys()
            for name in pair.values()
        }
        return names | {name.rpartition("[")[0] for name in names if name.endswith("]")}

    def _wanted(self, name: str) -> bool:
        return self._only is None or any(_within(name, one) for one in self._only)

    def _touched(self, name: str) -> bool:
        """Whether it, or something in it, is wanted."""
        return self._wanted(name) or any(one.startswith(f"{name}.") for one in self._only or ())

    def _check_only(self, state: Mapping[str, Any]) -> None:
        """Nothing is named that is not there, nor a part of what is loaded whole or not at all."""
        if self._only is not None:
            collected = collect(state, self._place)
            names = {*collected.parts, *collected.ties, *map(".".join, _paths(state))}
            for one in self._only:
                if not any(_within(name, one) for name in names):
                    raise CheckpointError(f"only names {one!r}, which the state does not have")

    def _tree(self, number: int) -> Any:
        """What is no tensor, of one source; None where it is damaged. That of the first, the rank's
        own, is taken from another only where that one holds the same."""
        if number in self._trees:
            return self._trees[number]
        source = self._sources[number]
        for one in [
            source,
            *(s for s in self._sources if s is not source and s.same_values(source)),
        ]:
            try:
                self._trees[number] = one.values(_Saved)
                return self._trees[number]
            except CheckpointError as error:
                self._note(error.__cause__)
                self._complain(str(error))
        if not number:
            raise CheckpointError(
                f"{source.where}: the values are damaged, and nobody has the same"
            )
        self._trees[number] = None
        return None

    def _saved(self, keys: _Keys) -> Iterator[Any]:
        """What the sources have there, the rank's own first; others are not read before needed."""
        for number in range(len(self._sources)):
            tree = self._tree(number)
            for key in keys:
                if not isinstance(tree, dict) or key not in tree:
                    break
                tree = tree[key]
            else:
                yield tree

    def _load(self, value: Any, keys: _Keys, names: Mapping[int, str], strict: bool) -> Any:
        """One object; returns what belongs in its place."""
        path = ".".join(map(str, keys))
        saved = next(self._saved(keys), _Nothing)
        if saved is _Nothing:
            if strict:
                raise CheckpointError(f"the checkpoint has no {path!r}")
        elif isinstance(value, torch.nn.Module):
            self._load_module(value, saved, keys)
        elif type(value) is dict:
            self._load_dict(value, saved, keys, names, strict)
        elif self._fits(value, keys):
            pass  # filled in place
        elif not self._wanted(path):
            raise CheckpointError(
                f"only names a part of {path!r}, which is loaded whole or not at all"
            )
        elif isinstance(value, torch.optim.Optimizer):
            built = self._optimizer(value, saved, keys, names)
            self._later.append(lambda: value.load_state_dict(built))
        elif isinstance(value, Stateful):
            built = self._built(saved, None)
            self._later.append(lambda: value.load_state_dict(built))
        else:
            return self._built(saved, value)
        return value

    def _load_dict(
        self, value: dict[Any, Any], saved: Any, keys: _Keys, names: Mapping[int, str], strict: bool
    ) -> None:
        """A plain one, in place: what it has, and what only the checkpoint has."""
        path = ".".join(map(str, keys))
        loaded = {
            key: self._load(inner, (*keys, key), names, strict)
            for key, inner in value.items()
            if self._touched(f"{path}.{key}")
        }
        for key in saved if isinstance(saved, dict) else ():
            if key not in value and self._wanted(f"{path}.{key}"):
                loaded[key] = self._built(saved[key], None)
        self._later.append(lambda: value.update(loaded))

    def _load_module(self, module: torch.nn.Module, saved: Any, keys: _Keys) -> None:
        """What its `state_dict` makes anew, and what modules keep beside their tensors (`get_extra_state`):
        each from the first that has it, since a rank of another world may have other parts of the model."""
        path = ".".join(map(str, keys))
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path} is a module here and something else in the checkpoint")
        inner, _ = unwrap(module)
        found = state_of(inner)
        made = {
            key: self._built(tree, found[key])
            for key in apart(inner, found)
            if self._wanted(f"{path}.{clean(key)}")
            for tree in islice(self._saved((*keys, clean(key))), 1)
        }
        if not is_torchs(inner, "load_state_dict"):  # as it is written: with all that was saved
            here = set(map(clean, found))
            for key in saved.keys() - here if here <= saved.keys() else ():
                if self._wanted(f"{path}.{key}"):
                    made[key] = self._built(saved[key], None)
            rest = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
            self._later.append(partial(inner.load_state_dict, rest | made))
        elif made:
            self._later.append(partial(inner.load_state_dict, found | made, strict=False))
        for name, part in inner.named_modules():
            if type(part).set_extra_state is torch.nn.Module.set_extra_state:
                continue  # it has none, as what wraps one that has
            key = clean(f"{name}._extra_state" if name else "_extra_state")
            if self._wanted(f"{path}.{key}"):
                for tree in islice(self._saved((*keys, key)), 1):
                    self._later.append(partial(part.set_extra_state, self._built(tree, None)))

    def _optimizer(
        self, optimizer: torch.optim.Optimizer, saved: Any, keys: _Keys, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Its `state_dict`, by the numbers that its parameters have now."""
        path = ".".join(map(str, keys))
        if not _of_optimizer(saved):
            raise CheckpointError(
                f"{path} is an optimizer here and something else in the checkpoint"
            )
        if len(saved["param_groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                f"an optimizer has {len(optimizer.param_groups)} groups of parameters here and "
                f"{len(saved['param_groups'])} in the checkpoint"
            )
        groups, state, number = [], {}, 0
        for place, group in enumerate(optimizer.param_groups):
            numbers = []
            for parameter in group["params"]:
                name = names.get(id(parameter), f"parameter {number}")
                tied = self._ties.get(
                    name, name
                )  # a copy of what was one with another when it was saved
                saved_of = (self._saved((*keys, "state", one)) for one in (name, tied))
                tree = next((tree for found in saved_of for tree in found), _Nothing)
                if tree is not _Nothing:
                    state[number] = self._built(tree, parameter)
                elif any(held.startswith(f"{path}.state.{name}.") for held in self._held):
                    raise CheckpointError(f"the values of {path}.state.{name} are damaged")
                numbers.append(number)
                number += 1
            options = self._built(saved["param_groups"][place], None)
            groups.append(options | {"params": numbers})
        if saved["state"] and not state and optimizer.param_groups:
            self._check_names(keys, optimizer, names)
        rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        return {**self._built(rest, None), "state": state, "param_groups": groups}

    def _check_names(
        self, keys: _Keys, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> None:
        """Raises where an optimizer's parameters are all called otherwise, so that its state would be lost."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        here = [names.get(id(p), f"parameter {number}") for number, p in enumerate(parameters)]
        saved = filter(_of_optimizer, self._saved(keys))  # other ranks may have other parameters
        groups = [group for one in saved for group in one["param_groups"]]
        there = [name for group in groups for name in group.get("params", ())]
        if here and there and set(here).isdisjoint(there):
            raise CheckpointError(
                f"{'.'.join(map(str, keys))}: its parameters are called {here[0]!r} and so on here, and {there[0]!r} and so on "
                "in the checkpoint: load it with the same modules as it was saved with"
            )

    def _built(self, tree: Any, like: Any) -> Any:
        """A saved tree with its tensors, which are filled later. like: a tensor that they go with."""
        if isinstance(tree, _Saved):
            return self.make(tree.name, like if isinstance(like, torch.Tensor) else None)
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


_Nothing = object()


def _of_optimizer(tree: Any) -> bool:
    return (
        isinstance(tree, dict)
        and isinstance(tree.get("state"), dict)
        and isinstance(tree.get("param_groups"), list)
        and all(isinstance(group, dict) for group in tree["param_groups"])
    )


def _within(name: str, other: str) -> bool:
    """Whether it is that, or something in it."""
    return name == other or name.startswith((f"{other}.", f"{other}["))


def _paths(state: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """To all that is in it, through plain dicts."""
    for key, value in state.items():
        yield (*path, str(key))
        if type(value) is dict:
            yield from _paths(value, (*path, str(key)))


def _complaint(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the checkpoint {what} {', '.join(names[:3])}{more}"

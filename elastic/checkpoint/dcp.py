"""torch.distributed.checkpoint (DCP) on our files, at any world size:

    dcp.save(state, storage_writer=StorageWriter("/data/run", step=1000))
    dcp.load(state, storage_reader=StorageReader("/data/run"))

What is no tensor is typed JSON in a file, never a pickle. DCP's default planner unpickles whatever a
reader hands it, so ours hands over bytes that it has made a moment ago from checked JSON.
"""

import io
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.storage as interface
import torch.utils._pytree as pytree
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from elastic.checkpoint import arguments
from elastic.checkpoint.load import files
from elastic.checkpoint.load.plan import Box, Held, index
from elastic.checkpoint.load.plan import plan as plan_reads
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.load.source import Source
from elastic.checkpoint.save import writing
from elastic.checkpoint.state import tree
from elastic.checkpoint.state.collect import Place, collect
from elastic.checkpoint.state.image import SIZES, Piece
from elastic.checkpoint.state.tensors import Part
from elastic.checkpoint.state.tree import Reference, Route
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import Storage, canonical
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError
from elastic.proto.manifest import Manifest, Shard

log = logging.getLogger(__name__)

Location = str | os.PathLike[str]


def _connect(path: Location, options: Mapping[str, Any] | None) -> Storage:
    return connect(canonical(path), json.dumps(dict(options or {})))


def _place(checkpoint_id: Location) -> tuple[str, int]:
    """The checkpoint and the step of a step's folder. Raises `CheckpointError`."""
    path, _, name = canonical(checkpoint_id).rpartition("/")
    step = manifest.step_of(name)
    if step is None:
        raise CheckpointError(
            f"a checkpoint_id is the folder of a step, {path}/{manifest.folder(1000)} say, not "
            f"{path}/{name}"
        )
    return path, step


# --- save ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What the coordinator tells a rank of the file that it writes."""

    job: str
    rank: int
    world_size: int
    tensors: frozenset[str]
    """Those that the tree in this file names: the whole state's in the coordinator's, else none."""
    routes: Mapping[str, Route]


class StorageWriter(interface.StorageWriter):
    """Writes one step; a `checkpoint_id`, if one is given, is its folder, `<path>/step-00001000`.

    It takes the default planner, or one derived from it, since a value is kept as JSON and any other
    hands over its pickle.
    """

    def __init__(
        self, path: Location, step: int, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """path: a folder, or a URL that fsspec knows, whose driver is given `storage_options`; step: from 1
        on. Raises `CheckpointError`."""
        self._options = storage_options
        self._storage, self._step = _connect(path, storage_options), arguments.step(step)
        self._coordinates = False
        self._values: set[MetadataIndex] = set()
        self._job = ""

    def reset(self, checkpoint_id: Location | None = None) -> None:
        if checkpoint_id is not None:
            path, self._step = _place(checkpoint_id)
            self._storage = _connect(path, self._options)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        return manifest.step_of(Path(checkpoint_id).name) is not None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("one rank commits for all: leave use_collectives as it is")
        self._coordinates = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:  # a part of the last one's, in which values have moved (below)
            raise CheckpointError("this needs a planner without enable_plan_caching")
        self._values = {item.index for item in plan.items if item.type is WriteItemType.BYTE_IO}
        return replace(plan, storage_data=self._coordinates)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """All values that the coordinator has go into its file, so that their tree is whole there."""
        self._job = uuid.uuid4().hex
        items = [item for plan in plans for item in plan.items]
        values = [item for item in items if item.index in self._values]
        tensors = {item.index.fqn for item in items if item.type is not WriteItemType.BYTE_IO}
        routes: dict[str, Route] = {}
        for plan in plans:
            routes |= _routes(plan)
        prepared = []
        for rank, plan in enumerate(plans):
            own = [item for item in plan.items if item.index not in self._values]
            target = _Target(
                job=self._job,
                rank=rank,
                world_size=len(plans),
                tensors=frozenset(tensors if plan.storage_data else ()),
                routes=routes if plan.storage_data else _routes(plan),
            )
            own += values if plan.storage_data else []
            prepared.append(replace(plan, items=own, storage_data=target))
        return prepared

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[interface.WriteResult]]:
        target: _Target = plan.storage_data
        values: dict[str, Any] = {}
        pieces: list[Piece] = []
        tensors: dict[str, Callable[[], torch.Tensor]] = {}
        for item in plan.items:
            name = item.index.fqn
            if item.type is WriteItemType.BYTE_IO:
                values[name] = _value(planner, item)
            else:
                pieces.append(_piece(item))
                tensors[name] = partial(_tensor, planner, item)
        text, inner = tree.encode(values, sorted(target.tensors), target.routes)
        for name, tensor in inner.items():
            part = checked(name, tensor)
            pieces.append(part.piece)
            tensors[name] = partial(getattr, part, "tensor")
        file = manifest.file(target.rank, target.world_size, 0, target.job)
        shard = writing.write_shard(
            self._storage, self._step, file, target.rank, pieces, tensors, text
        )
        done: Future[list[interface.WriteResult]] = Future()
        done.set_result([interface.WriteResult(MetadataIndex(file), shard.bytes, shard)])
        return done

    def finish(self, metadata: Metadata, results: list[list[interface.WriteResult]]) -> None:
        shards: list[Shard] = [result.storage_data for (result,) in results]
        writing.commit(self._storage, self._step, self._job, shards)


def _routes(plan: SavePlan) -> Mapping[str, Route]:
    """Where the default planner has found what it names; a flat state has none."""
    return plan.planner_data if isinstance(plan.planner_data, dict) else {}


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    if not isinstance(planner, DefaultSavePlanner):
        raise CheckpointError(
            f"{item.index.fqn} is no tensor, and {type(planner).__qualname__} has only a pickle of it: "
            "use DefaultSavePlanner, or derive from it"
        )
    return planner.lookup_object(item.index)


def _piece(item: WriteItem) -> Piece:
    """Of a tensor that is not at hand yet."""
    name, data = item.index.fqn, item.tensor_data
    assert data is not None  # as for every tensor
    dtype = str(data.properties.dtype).removeprefix("torch.")
    if dtype not in SIZES:
        raise CheckpointError(f"{name} is a tensor of {dtype}, which a checkpoint cannot keep")
    return Piece(
        name=name,
        dtype=dtype,
        shape=tuple(data.size),
        offset=tuple(data.chunk.offsets),
        extent=tuple(data.chunk.sizes),
    )


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    found = planner.resolve_data(item)
    assert isinstance(found, torch.Tensor)
    part, planned = checked(item.index.fqn, found), _piece(item)
    if (part.piece.dtype, part.piece.extent) != (planned.dtype, planned.extent):
        raise CheckpointError(
            f"{planned.name} is not of the dtype and shape that the planner planned"
        )
    return part.tensor


def checked(name: str, tensor: torch.Tensor) -> Part:
    """A whole tensor as a part of a state. Raises `CheckpointError` for one that cannot be kept."""
    if isinstance(tensor, DTensor):
        raise CheckpointError(f"{name} is a DTensor within a value: put it into a dict or list")
    (part,) = collect({name: tensor}, Place()).parts.values()
    return part._replace(piece=replace(part.piece, name=name))


# --- load ----------------------------------------------------------------------------------------


class StorageReader(interface.StorageReader):
    """Reads a step, the newest if none is named, whoever wrote it, in whatever world.

    Where ranks had values of their own, each gets its own again, if there is such a rank.
    """

    def __init__(
        self,
        path: Location,
        step: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises OSError, `CheckpointError` where there is no such step."""
        self._options = storage_options
        self._storage = _connect(path, storage_options)
        self._manifest = _committed(self._storage, step)
        self._sources: list[Source] = []
        self._restore = Restore([], Place())
        self._held: Held[int] = {}
        self._ties: dict[str, str] = {}
        self.tensors: dict[str, Piece] = {}
        """Each whole; by DCP's name for it, or ours if it lies within a value, which DCP keeps in one."""
        self.wrong: list[str] = []
        """Why files cannot be read: of what only they have nothing is known."""
        self.missing: list[str] = []
        """Names of tensors that are not whole."""
        self.ambiguous: list[str] = []
        """Names that two values of a rank would have, of which the second is left out."""
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: Location | None = None) -> None:
        if checkpoint_id is not None:
            path, step = _place(checkpoint_id)
            self._storage = _connect(path, self._options)
            self._manifest = _committed(self._storage, step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        return manifest.step_of(Path(checkpoint_id).name) is not None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Of all that is there, whole; what is not is logged. Raises OSError, `CheckpointError`."""
        own = dist.get_rank() if dist.is_initialized() else 0
        found, self.wrong = files.sources(self._storage, self._manifest.step)
        for complaint in self.wrong:
            log.error("%s", complaint)
        sources = [found[rank] for rank in sorted(found, key=lambda rank: (rank != own, rank))]
        self._sources, self._restore = sources, Restore(sources, Place())
        self._held = index((n, source.image.pieces.values()) for n, source in enumerate(sources))
        self._ties = {name: other for s in sources for name, other in s.image.ties.items()}
        self.tensors, self.missing, self.ambiguous, self._values = {}, [], [], {}
        kept: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        routes: dict[str, Route] = {}
        first: dict[str, int] = {}
        for number, route, leaf in _leaves(sources):
            name = ".".join(map(str, route))
            if name in first:
                if first[name] == number:
                    log.error("%s: two values are called %s in DCP", self._storage.url, name)
                    self.ambiguous.append(name)
                continue
            first[name] = number
            if not isinstance(leaf, Reference):
                self._values[name], kept[name] = leaf, BytesStorageMetadata()
            elif (whole := self._whole(leaf.name)) is not None:
                self.tensors[name], boxes = whole
                kept[name] = _metadata(self.tensors[name], boxes)
            else:
                log.error("%s: %s is not whole in what is there", self._storage.url, leaf.name)
                self.missing.append(leaf.name)
                continue
            routes[name] = route
        for name in self._held.keys() - {piece.name for piece in self.tensors.values()}:
            if (whole := self._whole(name)) is not None:
                self.tensors[name] = whole[0]
        return Metadata(kept, planner_data=routes)

    def _whole(self, name: str) -> tuple[Piece, list[Box]] | None:
        """A tensor, and the boxes that make it up in files; None where one is missing."""
        name = self._ties.get(name, name)
        if name not in self._held:
            return None
        whole = self._held[name][0][1].logical
        try:
            reads, missing = plan_reads([whole], self._held)
        except CheckpointError:  # another rank's of the name is no part of it
            return None
        return None if missing else (whole, [read.box for read in reads])

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """All was set up when the metadata was read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=(self._manifest.step, self._manifest.sequence))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            raise CheckpointError(
                f"{self._storage.url}: a step was committed while ranks looked for the newest, and they have "
                f"found several, {', '.join(str(step) for step, _ in found)}: say which, or try again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts: dict[str, Part] = {}
        targets: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        for number, item in enumerate(plan.items):
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self.pickled(item.storage_index.fqn))
                continue
            target = planner.resolve_tensor(item).detach()
            piece = self._wanted(item)
            dtype = getattr(torch, piece.dtype)
            tensor = target if target.dtype == dtype else torch.empty(piece.extent, dtype=dtype)
            parts[f"{number}"] = Part(piece=piece, tensor=tensor, holders=())
            targets.append((item, target, tensor))
        self.fill(parts)
        for item, target, tensor in targets:
            if tensor is not target:  # of another dtype, which DCP converts
                target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fill(self, parts: Mapping[str, Part]) -> None:
        """Fill pieces of `tensors`. Raises OSError, `CheckpointError` for what is damaged everywhere."""
        self._restore.fill(parts)
        for complaint in self._restore.damaged:
            log.error("%s", complaint)
        self._restore.damaged.clear()

    def piece(self, wanted: Piece) -> torch.Tensor:
        """A piece of one of `tensors`; where it is a file's as it lies there, in the file's memory."""
        for source in self._sources:
            if source.image.pieces.get(wanted.name) == wanted:
                found = source.piece(wanted.name)
                if found is not None:
                    return found
        made = torch.empty(wanted.extent, dtype=getattr(torch, wanted.dtype))
        self.fill({wanted.name: Part(piece=wanted, tensor=made, holders=())})
        return made

    def _wanted(self, item: ReadItem) -> Piece:
        whole = self.tensors[item.storage_index.fqn]
        chunk = item.storage_index.offset or (0,) * len(whole.shape)
        offset = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
        return replace(whole, offset=offset, extent=tuple(item.lengths))

    def pickled(self, name: str) -> io.BytesIO:
        """A value as the default planner wants it: not a byte of it is a file's."""
        value = pytree.tree_map_only(Reference, self._inner, self._values[name])
        out = io.BytesIO()
        torch.save(value, out)  # noqa: TID251 - DCP's default planner: docs/security.md
        out.seek(0)
        return out

    def _inner(self, tensor: Reference) -> torch.Tensor:
        """One within a value."""
        whole = self._whole(tensor.name)
        if whole is None:
            raise CheckpointError(
                f"{self._storage.url}: {tensor.name} is not whole in what is there"
            )
        return self.piece(whole[0])


def _committed(storage: Storage, step: int | None) -> Manifest:
    found = manifests.committed(storage, step)
    if found is None:
        what = "no step that is committed" if step is None else f"no step {step}"
        raise CheckpointError(f"{storage.url} has {what}")
    return found


def _leaves(sources: Sequence[Source]) -> Iterator[tuple[int, Route, Any]]:
    """What the trees of all files hold, those of the first files first; with the file's place."""
    for number, source in enumerate(sources):
        try:
            values = source.values(Reference)
        except CheckpointError as error:
            log.error("%s", error)
        else:
            yield from ((number, route, leaf) for route, leaf in tree.leaves(values))


def _metadata(whole: Piece, boxes: Sequence[Box]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, whole.dtype)),
        torch.Size(whole.shape),
        [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.extent)) for box in boxes],
    )

"""A step as other tools have it, and back: one set of safetensors files; a folder of torch's DCP.

What is read is verified. What is written is complete once its last file is there, the index or the
metadata or the manifest; nothing is left of what fails.
"""

import contextlib
import json
import mmap
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from elastic.checkpoint.dcp import StorageReader, checked
from elastic.checkpoint.load import plan
from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.save import writing
from elastic.checkpoint.state import tree
from elastic.checkpoint.state.image import CODES, SIZES, Piece
from elastic.checkpoint.state.tensors import Part
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import canonical
from elastic.checkpoint.tools import foreign
from elastic.checkpoint.tools.foreign import Entry
from elastic.checkpoint.tools.inspection import filled
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError, NotFound

FILE = 4_000_000_000
"""Bytes of the tensors in one file, unless a single one has more."""
INDEX = "model.safetensors.index.json"

Options = Mapping[str, Any] | None
"""`storage_options`."""

T = TypeVar("T")


# --- to safetensors ------------------------------------------------------------------------------


def to_safetensors(path: str, step: int, dest: str, only: str = "", options: Options = None) -> str:
    """Write whole tensors as Hugging Face does, and say what was done.

    only: those under that name, without it, or that one; options: for the driver of a URL. Raises OSError,
    `NotFound`, `CheckpointError`.
    """
    reader, _ = _open(path, step, options)
    chosen = _chosen(reader.tensors, only)
    if not chosen:
        raise NotFound(f"step {step} in {path} has no tensors {f'under {only}' if only else ''}")
    first: dict[str, str] = {}  # of those that share memory
    ties = {n: f for n, p in chosen.items() if (f := first.setdefault(p.name, n)) != n}
    kept = {name: piece for name, piece in chosen.items() if name not in ties}
    for name, piece in kept.items():
        if piece.dtype not in CODES:
            raise CheckpointError(f"{name} is of {piece.dtype}, which safetensors does not have")
        if name.encode(errors="replace").decode() != name:
            raise CheckpointError(f"{name!r} is no UTF-8, as safetensors' names are")
    groups = _groups((piece.nbytes, name, piece) for name, piece in kept.items())
    places: dict[str, str] = {}
    with new_folder(dest) as folder:
        for number, group in enumerate(groups, 1):
            file = folder / f"model-{number:05}-of-{len(groups):05}.safetensors"
            shared = {name: other for name, other in ties.items() if other in group}
            _write(file, group, {**shared, "format": "pt"}, reader)
            places |= dict.fromkeys(group, file.name)
        total = sum(piece.nbytes for piece in kept.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_small(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return f"{len(kept)} tensors, files: {len(groups)}; what is no tensor is left out"


def _chosen(tensors: Mapping[str, Piece], only: str) -> dict[str, Piece]:
    """Those under a name, without it in front; one that has it by the end of it."""
    front = f"{only}." if only else ""
    chosen = {
        name.removeprefix(front): piece
        for name, piece in sorted(tensors.items())
        if name.startswith(front)
    }
    if only in tensors:
        chosen[only.rpartition(".")[2]] = tensors[only]
    return chosen


def _write(
    file: Path, pieces: Mapping[str, Piece], metadata: Mapping[str, str], reader: StorageReader
) -> None:
    """One file, filled as it lies in memory: the kernel writes it out as it likes."""
    order = sorted(pieces, key=lambda name: -_width(pieces[name]))  # so each is aligned
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        piece = pieces[name]
        starts[name], end = end, end + piece.nbytes
        entries[name] = {
            "dtype": CODES[piece.dtype],
            "shape": piece.shape,
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    data = 8 + len(text)
    with open(file, "x+b") as opened, _named(file):
        os.posix_fallocate(
            opened.fileno(), 0, data + end
        )  # a full disk is an error now, not SIGBUS
        memory = mmap.mmap(opened.fileno(), data + end)
        memory[:data] = len(text).to_bytes(8, "little") + text
        view = memoryview(memory)
        parts = {}
        for name in order:
            start = data + starts[name]
            tensor = copy_cpu.tensor_of(pieces[name], view[start : start + pieces[name].nbytes])
            parts[name] = Part(piece=pieces[name], tensor=tensor, holders=())
        reader.fill(parts)
        memory.flush()
        os.fsync(opened.fileno())


def _width(piece: Piece) -> int:
    return SIZES[piece.dtype]


# --- to DCP --------------------------------------------------------------------------------------


def to_dcp(path: str, step: int, dest: str, options: Options = None) -> str:
    """Write what torch's `FileSystemReader` reads, and say what was done. Raises OSError, `CheckpointError`."""
    reader, metadata = _open(path, step, options)
    with new_folder(dest) as folder, _failing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(
            {},
            storage_writer=FileSystemWriter(folder),
            planner=_Pieces(reader, metadata),
            no_dist=True,
        )
    return f"{len(metadata.state_dict_metadata)} tensors and values"


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """What fails within, without DCP's wrapping, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        why, _ = next(iter(error.failures.values()))
        raise why from None


class _Pieces(DefaultSavePlanner):
    """Saves what a reader has, in the pieces in which it lies in files, so in no memory of ours."""

    def __init__(self, reader: StorageReader, metadata: Metadata) -> None:
        super().__init__()
        self._reader = reader
        self._metadata = metadata

    def set_up_planner(self, *_: Any, **__: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        items = [
            item
            for name, kept in self._metadata.state_dict_metadata.items()
            for item in _items(name, kept)
        ]
        return SavePlan(items, planner_data=self._metadata.planner_data)

    def resolve_data(self, item: WriteItem) -> Any:
        name, data = item.index.fqn, item.tensor_data
        if data is None:
            return self._reader.pickled(name)
        offset, extent = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        return self._reader.piece(replace(self._reader.tensors[name], offset=offset, extent=extent))


def _items(name: str, kept: object) -> Iterator[WriteItem]:
    if not isinstance(kept, TensorStorageMetadata):
        yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
        return
    # one that is empty is in no file, and yet has its place
    for chunk in kept.chunks or [ChunkStorageMetadata(torch.Size([0] * len(kept.size)), kept.size)]:
        data = TensorWriteData(chunk, kept.properties, kept.size)
        yield WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


# --- from DCP ------------------------------------------------------------------------------------


def from_dcp(path: str, dest: str, step: int, options: Options = None) -> str:
    """Make a step of what torch's `FileSystemWriter` wrote, and say what was done.

    options: for the driver of `dest`, where that is a URL. Raises OSError, `NotFound`, `CheckpointError`.
    """
    source = _local(path)
    entries, routes = foreign.read(source)
    if Path(dest, foreign.NAME).exists():
        raise CheckpointError(f"{dest} is a folder of DCP: name another")
    storage = connect(canonical(dest), json.dumps(dict(options or {})))
    if manifests.committed(storage, step) is not None:
        raise CheckpointError(f"{dest} has a step {step} already: name another")
    held = [entry for entry in entries if entry.dtype]
    _check_whole(path, [_piece(entry) for entry in held])
    values = {e.name: foreign.load(source, e) for e in entries if not e.dtype}
    text, inner = tree.encode(values, {entry.name for entry in held}, routes)
    groups = _groups((entry.end - entry.start, entry.name, entry) for entry in held) or [{}]
    job = uuid.uuid4().hex
    names = [manifest.file(rank, len(groups), 0, job) for rank in range(len(groups))]
    shards = []
    try:
        for rank, group in enumerate(groups):
            pieces = [_piece(entry) for entry in group.values()]
            tensors = {name: partial(foreign.load, source, entry) for name, entry in group.items()}
            if rank == 0:
                parts = {name: checked(name, tensor) for name, tensor in inner.items()}
                pieces += [part.piece for part in parts.values()]
                tensors |= {name: partial(getattr, part, "tensor") for name, part in parts.items()}
            tree_here = text if rank == 0 else b"{}"
            shards.append(
                writing.write_shard(storage, step, names[rank], rank, pieces, tensors, tree_here)
            )
        writing.commit(storage, step, job, shards)
    except BaseException:
        with contextlib.suppress(OSError):
            storage.delete(step, names)
            storage.drop(step)
        raise
    return f"step {step}, {len(entries)} tensors and values, files: {len(groups)}"


def _check_whole(path: str, pieces: Sequence[Piece]) -> None:
    """Raises `CheckpointError` where a tensor is not made up by its pieces."""
    wholes = {piece.name: piece.logical for piece in pieces}
    wanted = [whole for whole in wholes.values() if 0 not in whole.shape]
    _, missing = plan.plan(wanted, plan.index([(0, pieces)]))
    if missing:
        raise CheckpointError(f"{path}: its pieces of {missing[0]} do not make it up")


def _piece(entry: Entry) -> Piece:
    return Piece(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        offset=entry.offset,
        extent=entry.extent,
    )


# --- what they share -----------------------------------------------------------------------------


def _open(path: str, step: int, options: Options) -> tuple[StorageReader, Metadata]:
    reader = StorageReader(path, step, storage_options=options)
    metadata = reader.read_metadata()
    if reader.wrong:
        raise CheckpointError(reader.wrong[0])
    if reader.missing:
        raise CheckpointError(
            f"{', '.join(reader.missing[:3])}: not whole in {path}, step {step}: "
            "`elasticctl ckpt verify` says why"
        )
    if reader.ambiguous:
        raise CheckpointError(
            f"{path}, step {step}: two values would be called {reader.ambiguous[0]} in DCP: name one "
            "of them otherwise in the state"
        )
    return reader, metadata


def _groups(items: Iterable[tuple[int, str, T]]) -> list[dict[str, T]]:
    """By name, those that go into one file: of `FILE` bytes, no name twice."""
    groups: list[dict[str, T]] = []
    sizes: list[int] = []
    for nbytes, name, item in items:
        for place, group in enumerate(groups):
            if name not in group and sizes[place] + nbytes <= FILE:
                group[name] = item
                sizes[place] += nbytes
                break
        else:
            groups.append({name: item})
            sizes.append(nbytes)
    return groups


@contextlib.contextmanager
def new_folder(dest: str) -> Iterator[Path]:
    """A new or an empty one; gone again, or empty, if it does not get whole."""
    folder = _local(dest).resolve()  # no link is emptied
    before = folder.exists()
    if filled(folder):
        raise CheckpointError(f"{dest} is there already: name a folder that is not, or is empty")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if before:
            folder.mkdir(exist_ok=True)
        raise


def _local(path: str) -> Path:
    """Raises `CheckpointError` for a URL."""
    if "://" in path:
        raise CheckpointError(
            f"{path} is a URL, and this has to be a folder: copy it from or to one"
        )
    return Path(path)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """The calls within do not say which file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def _write_small(file: Path, text: str) -> None:
    with open(file, "x") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())

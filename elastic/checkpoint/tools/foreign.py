"""A folder that torch's DCP wrote. Its metadata is a pickle, of which nothing is run: its unpickler
makes inert records, whatever the pickle says, and knows no names but those that DCP's metadata has.
What is in its files is read by torch's own `weights_only` loader.
"""

import io
import os
import pickle  # noqa: TID251 - a foreign DCP directory, through a restricted unpickler: docs/security.md
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elastic.checkpoint.state.image import SIZES
from elastic.checkpoint.state.tree import Route
from elastic.checkpoint.state.typed_json import DEPTH
from elastic.proto.errors import CheckpointError, NotFound

NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What DCP wrote in one go: a value, or a piece of a tensor."""

    name: str
    file: str
    start: int
    end: int
    dtype: str = ""
    """Empty for a value."""
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()


def read(folder: Path) -> tuple[list[Entry], dict[str, Route]]:
    """What is in it, and where in the state. Raises OSError, `NotFound`, `CheckpointError`."""
    file = folder / NAME
    if file.exists() and not file.is_file():  # a pipe would wait
        raise CheckpointError(f"{file} is no metadata of DCP: it is no file")
    try:
        with open(file, "rb") as opened:
            return _entries(_Unpickler(opened).load())
    except FileNotFoundError as error:
        raise NotFound(f"{folder} is no checkpoint of DCP: it has no {NAME}") from error
    except _MALFORMED as error:
        raise CheckpointError(f"{file} is no metadata of DCP, or damaged: {error}") from error


def load(folder: Path, entry: Entry) -> Any:
    """A value, or a piece of a tensor. Raises OSError, `CheckpointError`."""
    what = f"{folder / entry.file}: {entry.name}"
    if (folder / entry.file).is_fifo():  # it would wait
        raise CheckpointError(f"{what} is in a pipe, not in a file")
    with open(folder / entry.file, "rb") as opened:
        if os.fstat(opened.fileno()).st_size < entry.end:
            raise CheckpointError(f"{what} is damaged: its file ends before it does")
        data = os.pread(opened.fileno(), entry.end - entry.start, entry.start)
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # noqa: TID251 - docs/security.md
    except _MALFORMED as error:
        raise CheckpointError(
            f"{what} is damaged, or more than tensors, numbers and texts, which is not unpickled"
        ) from error
    if entry.dtype and not (
        isinstance(found, torch.Tensor)
        and (found.dtype, tuple(found.shape)) == (getattr(torch, entry.dtype), entry.extent)
    ):
        raise CheckpointError(f"{what} is not the tensor that {NAME} says")
    return found


_MALFORMED = (
    pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError,
    OverflowError, MemoryError, RuntimeError,
)  # fmt: skip
"""What a pickle that is none, or is none of DCP's, may raise."""


class _Record:
    """Stands for any object: what it was called with, and the state that it was given."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in SIZES:
            return name
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP has no use for")
        # Of its own: a pickle may change it.
        return self._made.setdefault((module, name), type(name, (_Record,), {}))


def _entries(metadata: _Record) -> tuple[list[Entry], dict[str, Route]]:
    kinds, places = metadata.state["state_dict_metadata"], metadata.state["storage_data"]
    entries = []
    for index, info in places.items():
        name, at = _text(index.state["fqn"]), info.state
        if at.get("transform_descriptors"):
            raise CheckpointError(f"{name} is compressed: load it with torch, and save it again")
        start = _number(at["offset"])
        entry = Entry(
            name=name,
            file=_plain(at["relative_path"]),
            start=start,
            end=start + _number(at["length"]),
        )
        kind = kinds[name].state
        entries.append(_tensor(entry, kind, index) if kind else entry)
    return entries, _routes(metadata.state.get("planner_data"))


def _tensor(entry: Entry, kind: Any, index: _Record) -> Entry:
    offset = _sizes(index.state["offset"])
    (chunk, *_) = (c.state for c in kind["chunks"] if _sizes(c.state["offsets"]) == offset)
    return replace(
        entry,
        dtype=_text(kind["properties"].state[0]),
        shape=_sizes(kind["size"]),
        offset=offset,
        extent=_sizes(chunk["sizes"]),
    )


def _routes(data: Any) -> dict[str, Route]:
    routes = {_text(name): tuple(route) for name, route in (data or {}).items()}
    if not all(type(key) in (str, int) for route in routes.values() for key in route):
        raise ValueError("a value's place is made of texts and numbers")
    if any(len(route) > DEPTH for route in routes.values()):
        raise ValueError("a value lies too deep")
    return {name: route for name, route in routes.items() if route}


def _sizes(size: Any) -> tuple[int, ...]:
    (sizes,) = size.args
    return tuple(map(_number, sizes))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is no number of 0 or more")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _plain(name: Any) -> str:
    """A file in the folder itself."""
    if Path(_text(name)).name != name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    return str(name)

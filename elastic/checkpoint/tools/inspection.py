"""What lies in a checkpoint's folder and whether it is what was written; loads nothing, needs no torch."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic.checkpoint.state.image import VALUES, Image, header_bytes, parse
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.checkpoint.storage.protocol import File, Storage, words
from elastic.proto import manifest, sums
from elastic.proto.errors import CheckpointError, NotFound, ProtocolMismatch, SlotError
from elastic.proto.manifest import Manifest, Shard

THREADS = 8
"""That read and sum at a time."""
RUN = 16
"""Chunks that a thread takes at a time."""


# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's folder."""

    step: int
    manifest: Manifest | None = None
    """None: it is not committed."""
    time: float | None = None
    """When it was, or when the folder was last changed; Unix time. None for a URL."""
    problem: str = ""
    """Of its manifest."""
    newest: bool = False
    """It is the one that a load takes."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with those of higher numbers, where nobody has asked for this one."""


def steps(storage: Storage) -> list[Step]:
    """All of them, in order. Raises `NotFound` where there is none, OSError."""
    path = storage.url
    folder = Path(path)  # of a URL there is none
    if isinstance(storage, Folder) and not folder.exists():
        raise NotFound(f"{path} is not there: give the folder that Checkpointer was given")
    if (folder / ".metadata").exists():
        raise NotFound(
            f"{path} is a checkpoint of DCP: make it one of ours, `elasticctl ckpt convert {path} DEST "
            "--to elastic --step N`"
        )
    if manifest.step_of(folder.name) is not None:
        raise NotFound(f"{path} is one step: give {path.rpartition('/')[0]} and --step")
    newest = manifests.committed(storage)
    found = [
        _step(storage, step, manifest.NAME in names, newest)
        for step, names in sorted(storage.listing().items())
    ]
    if not found:
        raise NotFound(f"{path} holds no checkpoint: give the folder that Checkpointer was given")
    return found


def _step(storage: Storage, number: int, committed: bool, newest: Manifest | None) -> Step:
    told, problem = None, ""
    if committed:
        try:
            told = manifests.read(storage, number)
        except (OSError, CheckpointError) as error:
            problem = words(error)
    dated, since = Path(storage.url, manifest.folder(number)), None
    with contextlib.suppress(OSError):  # a URL's is not known
        since = (dated / manifest.NAME if committed else dated).stat().st_mtime
    return Step(
        step=number,
        manifest=told,
        time=since,
        problem=problem,
        newest=told is not None and told == newest,
    )


def pick(storage: Storage, number: int | None) -> Step:
    """A committed step, the newest if none is named. Raises `NotFound`, `CheckpointError`, OSError."""
    path, there = storage.url, steps(storage)
    if number is None:
        found = next((step for step in there if step.newest), None)
        if found is None:
            raise NotFound(f"no step in {path} is committed: `elasticctl ckpt ls {path}`")
        return replace(found, passed_over=_passed_over(path, there, found))
    found = next((step for step in there if step.step == number), None)
    if found is None:
        raise NotFound(f"{path} has no step {number}: `elasticctl ckpt ls {path}`")
    if found.problem:
        raise CheckpointError(f"{path}: {found.problem}")
    if found.manifest is None:
        raise NotFound(f"step {number} in {path} is not committed, so nothing can be said of it")
    return found


def _passed_over(path: str, there: Sequence[Step], found: Step) -> tuple[str, ...]:
    return tuple(
        f"{path}: step {one.step} is damaged, and step {found.step} is taken: {one.problem}"
        for one in there
        if one.problem and one.step > found.step
    )


def vacant(storage: Storage) -> None:
    """Raises `CheckpointError` where anything is there: what is begun in it would be the newest of somebody's
    run. OSError."""
    if isinstance(storage, Folder):
        if filled(Path(storage.url)):
            raise CheckpointError(
                f"{storage.url} is there already: name a folder that is not, or is empty"
            )
    elif any(manifest.NAME in names for names in storage.listing().values()):
        raise CheckpointError(f"{storage.url} holds a checkpoint already: name another place")


def filled(folder: Path) -> bool:
    """Whether nothing new can be begun there."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


# --- files ---------------------------------------------------------------------------------------


def _image(file: File) -> Image:
    length = header_bytes(file.read(0, min(8, file.size)))
    return parse(bytes(file.read(0, min(length, file.size))), file.size)


# --- what is in it -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    ranks: list[int] = field(default_factory=list[int])
    """Whose files hold a piece of it."""
    tie: str = ""
    """The tensor whose memory it shares."""


@dataclass(slots=True, kw_only=True)
class Value:
    name: str
    value: Any
    """Typed JSON."""
    ranks: list[int] = field(default_factory=list[int])
    """Who have this one."""


@dataclass(slots=True, kw_only=True)
class Contents:
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    values: dict[tuple[str, str], Value] = field(default_factory=dict[tuple[str, str], Value])
    problems: list[str] = field(default_factory=list[str])
    """Of files that cannot be read."""


def contents(storage: Storage, told: Manifest) -> Contents:
    """Names, shapes and values, as the files' headers say; nothing is verified."""
    found = Contents()
    for shard in told.shards:
        where = manifests.where(storage, told.step, shard.file)
        try:
            file = storage.open(told.step, shard.file)
            image = _image(file)
            values = json.loads(bytes(file.read(image.values_at, image.sums_at)))
        except (OSError, CheckpointError, ProtocolMismatch, ValueError, RecursionError) as error:
            found.problems.append(f"{where}: {words(error)}")
            continue
        for piece in image.pieces.values():
            tensor = Tensor(name=piece.name, dtype=piece.dtype, shape=piece.shape)
            found.tensors.setdefault(piece.name, tensor).ranks.append(shard.rank)
        for name, other in image.ties.items():
            piece = image.pieces[other]
            tensor = Tensor(name=name, dtype=piece.dtype, shape=piece.shape, tie=other)
            found.tensors.setdefault(name, tensor).ranks.append(shard.rank)
        for name, value in _leaves(values, ""):
            key = name, json.dumps(value)
            found.values.setdefault(key, Value(name=name, value=value)).ranks.append(shard.rank)
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What is no tensor, by name."""
    if isinstance(value, dict) and "$tensor" in value:
        return
    if isinstance(value, dict) and value and not any(key.startswith("$") for key in value):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}[{place}]")
    elif name:
        yield name, value


# --- whether it is sound -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    file: str
    what: str
    """A tensor's name, "the header", "the values"; empty for the whole file."""
    problem: str


def verify(storage: Storage, told: Manifest) -> list[Damage]:
    """All that is not as it was written: each byte of each file is read."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [
            Damage(file=shard.file, what=what, problem=problem)
            for shard in told.shards
            for what, problem in _verify(storage, told.step, shard, pool)
        ]


def _verify(
    storage: Storage, step: int, shard: Shard, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, str]]:
    try:
        file = storage.open(step, shard.file)
        if file.size != shard.bytes:
            yield "", f"it has {file.size} bytes, {shard.bytes} were written"
            return
        image = _image(file)
        table = file.read(image.sums_at, file.size)
        if sums.checksum(table) != shard.digest:
            yield "", "its table of checksums is not the one that was written"
            return
        chunks = sums.unpack(table, file.size)
    except (OSError, CheckpointError, ProtocolMismatch, SlotError) as error:
        yield "", words(error)
        return
    starts = [0, *(chunk.end for chunk in chunks)]
    runs = [range(at, min(at + RUN, len(chunks))) for at in range(0, len(chunks), RUN)]

    def check(run: range) -> list[tuple[int, str]]:
        return [(at, problem) for at in run if (problem := _check(file, starts[at], chunks[at]))]

    bad = {starts[at]: problem for found in pool.map(check, runs) for at, problem in found}
    ends = dict(pairwise(starts))
    for name, start, end in image.spans():
        hits = [at for at in bad if at < end and ends[at] > start]
        if hits:
            what = {"": "the header", VALUES: "the values"}.get(name, name)
            yield what, f"{bad[hits[0]]}, from byte {hits[0]} on"


def _check(file: File, start: int, chunk: sums.Chunk) -> str:
    """What is wrong with a chunk."""
    try:
        same = sums.checksum(file.read(start, chunk.end)) == chunk.checksum
    except OSError as error:
        return words(error)
    return "" if same else "its bytes are not those that were written"


def ranks(numbers: Sequence[int]) -> str:
    """0-3,6"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

"""Indices of samples on the disk: made once, by one process of many, and mapped into memory by all.

The files are named as Megatron's: MD5-GPTDataset-SPLIT-{document,sample,shuffle}_index.npy for one
dataset, MD5-BlendedDataset-SPLIT-{dataset,dataset_sample}_index.npy for a blend, and -description.txt, of
which MD5 is the sum. The description has what the indices are a function of, the sequences' lengths by
their checksum; so a cache of other data is never taken for this one's, wherever the data lie, and
Megatron's own is not taken for ours.
"""

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash
from numpy.typing import NDArray

from elastic.agent import cgroup
from elastic.proto.errors import UsageError
from elastic.trainer.data.blend import Blend, by_size, by_weight, shares
from elastic.trainer.data.samples import Indices, Request, build, index_types, memory, plan
from elastic.trainer.files import exclusive, remove_drafts, replace_atomically

BLENDING = 40
"""Bytes a sample that a blend takes while it is made."""
Shape = tuple[np.dtype[Any], tuple[int, ...]]
"""Type and shape of an array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """Arrays that belong together, and what they are a function of."""

    directory: Path
    kind: str
    """Megatron's name of the class that they are of."""
    split: str
    description: str
    shapes: dict[str, Shape]
    """By the array's name."""
    memory: int
    """Bytes that making them takes."""

    @property
    def base(self) -> str:
        name = hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()
        return f"{name}-{self.kind}-{self.split}"

    def path(self, name: str) -> Path:
        return self.directory / f"{self.base}-{name}_index.npy"


def cached(directory: Path, split: str, lengths: NDArray[np.int32], request: Request) -> Indices:
    """The indices of a request, from `directory`, where they are made first if they are not there.

    `lengths` are of all sequences of the dataset, [S]. Any number of processes may ask at once. UsageError
    as `samples.plan` raises it, before anything is written, and where the folder takes no files.
    """

    def make() -> list[NDArray[Any]]:
        made = build(lengths, request)
        return [made.documents, made.samples, made.shuffle]

    shapes = _shapes(lengths, request)
    kept = _Kept(
        directory=directory,
        kind="GPTDataset",
        split=split,
        description=_description(split, lengths, request),
        shapes=shapes,
        memory=memory(shapes["document"][1][0], shapes["shuffle"][1][0]),
    )
    documents, samples, shuffle = _get(kept, make)
    return Indices(documents=documents, samples=samples, shuffle=shuffle)


def blended(
    directory: Path,
    split: str,
    sizes: Sequence[int],
    weights: Sequence[float] | None,
    samples: int | None,
) -> Blend:
    """The blend of datasets with `sizes` samples, by weights or in proportion to sizes; as `cached`.

    samples: how many; None, without weights: all. UsageError where it takes more of one than that has.
    """
    whole = sum(sizes)
    if weights and samples is not None:
        count = sum(shares(weights, samples))
    else:
        count = whole if samples is None else min(samples, whole)

    def make() -> list[NDArray[Any]]:
        if weights and samples is not None:
            made = by_weight(weights, samples)
        else:
            made = by_size(sizes, samples)
        made.check(sizes)
        return [made.datasets, made.samples]

    told = {
        "class": "BlendedDataset",
        "weights": list(weights) if weights else None,
        "sizes": list(sizes),
        "size": samples,
        "split": split,
    }
    kept = _Kept(
        directory=directory,
        kind="BlendedDataset",
        split=split,
        description=json.dumps(told, indent=4),
        shapes={
            "dataset": (np.dtype(np.int16), (count,)),
            "dataset_sample": (np.dtype(np.int64), (count,)),
        },
        memory=BLENDING * count,
    )
    chosen, own = _get(kept, make)
    return Blend(datasets=chosen, samples=own)


def _get(kept: _Kept, make: Callable[[], list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """The arrays, from the disk, where they are put first if they are not there."""
    found = _mapped(kept)
    if found is not None:
        return found
    try:
        kept.directory.mkdir(parents=True, exist_ok=True)
        with exclusive(kept.directory / f".{kept.base}.lock"):
            found = _mapped(kept)
            if found is None:
                found = _made(kept, make)
                _write(kept, found)
            return _mapped(kept) or found
    except OSError as error:
        raise UsageError(
            f"cannot keep the data's indices in {kept.directory}: {error.strerror or error}; "
            "give another folder for them"
        ) from error


def _made(kept: _Kept, make: Callable[[], list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """The arrays; UsageError where there is no memory to make them in."""
    *_, (_, (samples, *_)) = kept.shapes.values()
    room = [psutil.virtual_memory().available, *(most - used for most, used in cgroup.limits())]
    try:
        if kept.memory > min(room):
            raise MemoryError
        return make()
    except MemoryError as error:
        raise UsageError(
            f"the indices of {samples} samples ({kept.split}) take {kept.memory / 1e9:.1f} GB of memory to make, more "
            "than can be had: make the run shorter"
        ) from error


def _shapes(lengths: NDArray[np.int32], request: Request) -> dict[str, Shape]:
    own = request.sequences
    course = plan(request, int(lengths[own.start : own.stop].sum(dtype=np.int64)))
    places = course.epochs * len(own)
    row, name = index_types(places, course.samples)
    return {
        "document": (np.dtype(np.int32), (places,)),
        "sample": (row, (course.samples + 1, 2)),
        "shuffle": (name, (course.samples,)),
    }


def _description(split: str, lengths: NDArray[np.int32], request: Request) -> str:
    own = request.sequences
    return json.dumps(
        {
            "class": "GPTDataset",
            "lengths": xxhash.xxh3_128_hexdigest(lengths[own.start : own.stop].view(np.uint8).data),
            "sequences": [own.start, own.stop],
            "num_samples": request.samples,
            "index_split": split,
            "random_seed": request.seed,
            "sequence_length": request.seq_length,
        },
        indent=4,
    )


def _write(kept: _Kept, arrays: Sequence[NDArray[Any]]) -> None:
    with replace_atomically(kept.directory / f"{kept.base}-description.txt") as draft:
        draft.write_text(kept.description)
    for name, array in zip(kept.shapes, arrays, strict=True):
        remove_drafts(kept.path(name))
        with replace_atomically(kept.path(name)) as draft, draft.open("wb") as file:
            np.lib.format.write_array(file, array)


def _mapped(kept: _Kept) -> list[NDArray[Any]] | None:
    """The files as arrays that are not writable; None where one is missing or is not what it should be."""
    arrays = []
    for name, (dtype, shape) in kept.shapes.items():
        head = _head(dtype, shape)
        try:
            with kept.path(name).open("rb") as file:
                if file.read(len(head)) != head:
                    return None
                array = np.memmap(file, dtype, "r", len(head), shape)
        except (OSError, ValueError):  # it is not there, or shorter
            return None
        arrays.append(np.asarray(array))
    return arrays


def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What such a file begins with: compared, never read, since what numpy raises of a damaged one has no end."""
    file = io.BytesIO()
    told = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, told)
    return file.getvalue()

"""Indices of samples on the disk: made once, by one process of many, and mapped into memory by all.

The files are named as Megatron's: MD5-GPTDataset-SPLIT-{document,sample,shuffle}_index.npy, and
-description.txt, of which MD5 is the sum. The description has what the indices are a function of, the
sequences' lengths by their checksum; so a cache of other data is never taken for this one's, wherever the
data lie, and Megatron's own is not taken for ours.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elastic.proto.errors import UsageError
from elastic.trainer.data.samples import Indices, Request, build, index_types, plan
from elastic.trainer.files import exclusive, replace_atomically

KINDS = ("document", "sample", "shuffle")


def cached(directory: Path, split: str, lengths: NDArray[np.int32], request: Request) -> Indices:
    """The indices of a request, from `directory`, where they are made first if they are not there.

    `lengths` are of all sequences of the dataset, [S]. Any number of processes may ask at once. UsageError
    as `samples.plan` raises it, before anything is written, and where the folder takes no files.
    """
    shapes = _shapes(lengths, request)
    description = _description(split, lengths, request)
    name = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
    base = f"{name}-GPTDataset-{split}"
    found = _mapped(directory, base, shapes)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with exclusive(directory / f".{base}.lock"):
            found = _mapped(directory, base, shapes)
            if found is None:
                found = build(lengths, request)
                _write(directory, base, description, found)
            return _mapped(directory, base, shapes) or found
    except OSError as error:
        raise UsageError(
            f"cannot keep the data's indices in {directory}: {error.strerror}; give another folder for them"
        ) from error


def _shapes(
    lengths: NDArray[np.int32], request: Request
) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of each index, in the order of `KINDS`."""
    own = request.sequences
    course = plan(request, int(lengths[own.start : own.stop].sum(dtype=np.int64)))
    places = course.epochs * len(own)
    row, name = index_types(places, course.samples)
    return [
        (np.dtype(np.int32), (places,)),
        (row, (course.samples + 1, 2)),
        (name, (course.samples,)),
    ]


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


def _write(directory: Path, base: str, description: str, indices: Indices) -> None:
    with replace_atomically(directory / f"{base}-description.txt") as draft:
        draft.write_text(description)
    arrays = (indices.documents, indices.samples, indices.shuffle)
    for kind, array in zip(KINDS, arrays, strict=True):
        path = directory / f"{base}-{kind}_index.npy"
        with replace_atomically(path) as draft, draft.open("wb") as file:
            np.lib.format.write_array(file, array)


def _mapped(
    directory: Path, base: str, shapes: list[tuple[np.dtype[Any], tuple[int, ...]]]
) -> Indices | None:
    """The files as arrays that are not writable; None where one is missing or is not what it should be."""
    arrays = []
    for kind, (dtype, shape) in zip(KINDS, shapes, strict=True):
        path = directory / f"{base}-{kind}_index.npy"
        try:
            array = np.lib.format.open_memmap(
                path, "r"
            )  # reads no objects, so nothing is unpickled
        except (OSError, ValueError):
            return None
        if array.dtype != dtype or array.shape != shape:
            return None
        arrays.append(np.asarray(array))
    documents, samples, shuffle = arrays
    return Indices(documents=documents, samples=samples, shuffle=shuffle)

"""Megatron's indexed datasets: PREFIX.bin, all tokens, and PREFIX.idx, where each sequence lies.

Byte for byte what Megatron-LM reads and writes (`megatron.core.datasets.indexed_dataset`). All of it is
little-endian and packed. The .bin is the sequences' tokens, one after the other; the .idx is

    9 bytes  MAGIC        8  version, 1      1  code of the tokens' type
    8        S            8  D = documents + 1
    4 S      int32, tokens in each sequence
    8 S      int64, byte at which each begins in the .bin
    8 D      int64, sequences before each document, and S

A document is one sequence, or one for each sentence, or none where its text was empty.
"""

import shutil
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elastic.proto.errors import UsageError
from elastic.trainer.files import remove_drafts, replace_atomically

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Types of tokens, by their code. The format has more, which hold no ids: 2 int8, 3 int16, 6 float64,
7 float32."""

_HEADER = struct.Struct("<9sQBQQ")
_INT32_MAX = 2**31 - 1
_CHUNK = 1 << 17
"""Sequences that are checked, and bytes that are copied, at a time: bounds the memory for it. What a check makes
of so many stays in a core's cache: a third of the time."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that Megatron writes the ids of a vocabulary with."""
    return CODES[8] if vocab_size < 65500 else CODES[4]


def paths(prefix: str | Path) -> tuple[Path, Path]:
    """Where the .bin and the .idx of a prefix are."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class Indexed:
    """The sequences of one prefix, mapped into memory, in the order of the file.

    UsageError where a file is missing, or the index is none, or is not that of the .bin: all of it is
    checked here, once. What cannot be seen: documents of several sequences that begin elsewhere.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        data, index = paths(prefix)
        raw = _mapped(index)
        count, self.dtype = _header(index, raw)
        parts = np.split(raw[_HEADER.size :], [4 * count, 12 * count])
        self.lengths: NDArray[np.int32] = parts[0].view("<i4")
        """Tokens of each sequence, [S]."""
        self._offsets: NDArray[np.int64] = parts[1].view("<i8")
        self.documents: NDArray[np.int64] = parts[2].view("<i8")
        """Sequences before each document, and all, [documents + 1]."""
        self._bytes = _mapped(data)
        end = _check_sequences(index, self.lengths, self._offsets, self.dtype.itemsize)
        _check_documents(index, self.documents, count)
        if end != len(self._bytes):
            raise UsageError(
                f"{data} has {len(self._bytes)} bytes where {index.name} says {end}: "
                "copy or preprocess both again"
            )

    def __len__(self) -> int:
        """Sequences S."""
        return len(self.lengths)

    def tokens(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens of a sequence, from `offset` on, `length` or all, [n], of `dtype` and not writable.

        IndexError for what the sequence does not have.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        whole = int(self.lengths[sequence])
        end = whole if length is None else offset + length
        if not 0 <= offset <= end <= whole:
            raise IndexError(f"tokens {offset} to {end} of {whole}")
        start = int(self._offsets[sequence])
        size = self.dtype.itemsize
        return self._bytes[start + offset * size : start + end * size].view(self.dtype)


_State = tuple[int, int, int, int]
"""Of a file: device, inode, bytes, and when it was last written, in ns."""
_opened: WeakValueDictionary[tuple[str, tuple[_State, ...]], Indexed] = WeakValueDictionary()
"""By prefix, and state of its files: what somebody of this process holds."""


def shared(prefix: str | Path) -> Indexed:
    """As `Indexed`, and the same one for all of a process who hold it at once: it is read through, and mapped,
    once. Another one where a file has changed since."""
    try:
        found = [path.stat() for path in paths(prefix)]
    except OSError:
        return Indexed(prefix)  # which says what is wrong
    states = tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found)
    key = str(prefix), states
    if (held := _opened.get(key)) is None:
        held = _opened[key] = Indexed(prefix)
    return held


class Writer:
    """Takes documents for `write`; what it holds in memory is the index, 4 bytes a sequence and 8 a document."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._dtype = dtype
        self._lengths = array("i")
        self._documents = array("q", [0])

    def add_document(self, sequences: Iterable[ArrayLike]) -> None:
        """Add a document of any number of sequences. UsageError for an id that the type does not hold."""
        converted = [self._converted(np.asarray(sequence)) for sequence in sequences]
        for tokens in converted:
            self._file.write(tokens.tobytes())
            self._lengths.append(len(tokens))
        self._documents.append(len(self._lengths))

    def extend(self, lengths: NDArray[np.int32], tokens: bytes) -> None:
        """Add documents of one sequence each, or none where a length is 0, [documents]; their tokens, one
        behind the other, are bytes of the type already."""
        if int(lengths.sum(dtype=np.int64)) * self._dtype.itemsize != len(tokens):
            raise ValueError(f"{len(tokens)} bytes are not {lengths.sum(dtype=np.int64)} tokens")
        ends = len(self._lengths) + np.cumsum(lengths > 0, dtype=np.int64)
        self._file.write(tokens)
        self._lengths.frombytes(lengths[lengths > 0].astype("=i4").tobytes())
        self._documents.frombytes(ends.astype("=i8").tobytes())

    def append(self, other: Indexed) -> None:
        """Add all documents of another dataset. UsageError when its tokens are of another type."""
        if other.dtype != self._dtype:
            raise UsageError(
                f"{other.prefix} holds {other.dtype.name} where {self._dtype.name} is written: "
                "preprocess all with one vocabulary"
            )
        before = len(self._lengths)
        with paths(other.prefix)[0].open("rb") as file:
            shutil.copyfileobj(file, self._file, _CHUNK)
        self._lengths.frombytes(other.lengths.astype("=i4").tobytes())
        self._documents.frombytes((other.documents[1:] + before).astype("=i8").tobytes())

    def index(self) -> Iterator[bytes]:
        """The .idx of what was added, piece by piece."""
        (code,) = (code for code, dtype in CODES.items() if dtype == self._dtype)
        lengths = np.frombuffer(self._lengths, np.int32)
        yield _HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._documents))
        yield lengths.astype("<i4").tobytes()
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        yield np.concatenate([[0], ends[:-1]]).astype("<i8")[: len(lengths)].tobytes()
        yield np.frombuffer(self._documents, np.int64).astype("<i8").tobytes()

    def _converted(self, tokens: NDArray[Any]) -> NDArray[Any]:
        if tokens.size == 0:
            return np.empty(0, self._dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens are whole numbers, [n], not {tokens.dtype} {tokens.shape}")
        if len(tokens) > _INT32_MAX:
            raise UsageError(
                f"a sequence of {len(tokens)} tokens: at most {_INT32_MAX} fit an index"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > np.iinfo(self._dtype).max:
            wrong = low if low < 0 else high
            raise UsageError(
                f"token id {wrong} does not fit {self._dtype.name}: the vocabulary has more"
            )
        return tokens.astype(self._dtype, copy=False)


@contextmanager
def write(prefix: str | Path, dtype: np.dtype[Any]) -> Iterator[Writer]:
    """Write PREFIX.bin and PREFIX.idx: both are there when the block ends, neither if it fails.

    `dtype` is one of `CODES`. Tokens go to the disk as they are added. There is never an index beside
    another dataset's .bin: an older one goes first, and the new one comes last. What killed writers of
    this prefix left goes, too.
    """
    data, index = paths(prefix)
    data.parent.mkdir(parents=True, exist_ok=True)
    for path in (data, index):
        remove_drafts(path)
    with replace_atomically(index) as index_draft, replace_atomically(data) as data_draft:
        with data_draft.open("wb") as file:
            writer = Writer(file, np.dtype(dtype).newbyteorder("<"))
            yield writer
        with index_draft.open("wb") as file:
            file.writelines(writer.index())
        index.unlink(missing_ok=True)


def merge(prefixes: Sequence[str | Path], out: str | Path) -> None:
    """Write one dataset of all documents of the others, in this order: as if preprocessed together.

    UsageError when there are none, one is damaged, or their tokens' types differ.
    """
    if not prefixes:
        raise UsageError("no datasets to merge: give the prefixes of .bin and .idx files")
    parts = [Indexed(prefix) for prefix in prefixes]
    with write(out, parts[0].dtype) as writer:
        for part in parts:
            writer.append(part)


def _mapped(path: Path) -> NDArray[np.uint8]:
    """A file's bytes, not writable."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)  # which mmap refuses
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except OSError as error:
        named = path.stem.endswith((".bin", ".idx"))
        hint = ": give the prefix without .bin or .idx" if named else ""
        raise UsageError(f"cannot read {path}: {error.strerror}{hint}") from error


def _header(path: Path, raw: NDArray[np.uint8]) -> tuple[int, np.dtype[Any]]:
    """Sequences S and the tokens' type, of an index that is as long as its header says."""
    if len(raw) < _HEADER.size or raw[: len(MAGIC)].tobytes() != MAGIC:
        raise UsageError(
            f"{path} is no Megatron index: preprocess the text, or give another prefix"
        )
    _, version, code, count, boundaries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if version != VERSION:
        raise UsageError(
            f"{path} has version {version}; {VERSION} is known: preprocess the text again"
        )
    if code not in CODES:
        known = ", ".join(f"{code} ({dtype.name})" for code, dtype in CODES.items())
        raise UsageError(
            f"{path} has tokens of type {code}, not one of {known}: preprocess the text again"
        )
    size = _HEADER.size + 12 * count + 8 * boundaries
    if size != len(raw):
        raise UsageError(
            f"{path} has {len(raw)} bytes where {count} sequences and {boundaries} document boundaries "
            f"take {size}: copy it again (multimodal indices are not read)"
        )
    return count, CODES[code]


def _check_sequences(
    path: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], size: int
) -> int:
    """The byte at which the last sequence ends; UsageError unless each begins where the one before ends."""
    end = 0
    for first in range(0, len(lengths), _CHUNK):
        part = lengths[first : first + _CHUNK].astype(np.int64)
        ends = end + np.cumsum(part) * size
        wrong = (part < 0) | (offsets[first : first + _CHUNK] != ends - part * size)
        if wrong.any():
            place = int(wrong.argmax())
            raise UsageError(
                f"{path}: sequence {first + place} has {part[place]} tokens and begins at byte "
                f"{offsets[first + place]}, which does not fit those before: copy or preprocess it again"
            )
        end = int(ends[-1])
    return end


def _check_documents(path: Path, documents: NDArray[np.int64], count: int) -> None:
    """UsageError unless documents go from 0 to all sequences, none backwards."""
    good = len(documents) > 0 and bool(documents[0] == 0 and documents[-1] == count)
    for first in range(0, len(documents), _CHUNK):
        part = documents[first : first + _CHUNK + 1]
        good = good and bool((part[1:] >= part[:-1]).all())
    if not good:
        raise UsageError(
            f"{path}: documents do not go from sequence 0 to {count}: copy or preprocess it again"
        )

"""A rank's share of a checkpoint as the bytes of a safetensors file, in a slot and on storage alike.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {"elastic": <JSON>}, <name>: {dtype, shape, data_offsets}, ...}
    data      tensors without a gap, those of the widest elements first, so that each is aligned
    values    the entry `elastic.values`: typed JSON of what is no tensor
    sums      the entry `elastic.sums`, the last: the table of `proto/sums.py`, for all before it

A tensor's entry has the shape of the rank's piece. What safetensors cannot say is in the metadata's
JSON: {"v": "1.0", "pieces": {name: [global shape, offset]}, "dtypes": {name: dtype}, "ties": {name:
name}, "shared": [[ranks, {name: digest}], ...]}. Only pieces that are not the whole tensor are there;
`dtypes` are those that safetensors does not have, whose entry is of plain bytes; a tie names a tensor of
the same memory. `shared`, where there is any, is what the writer held in common with other ranks, in
whose image it may be: a digest for each name, equal where what they held was.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.proto import sums, version
from elastic.proto.errors import CheckpointError

VALUES = "elastic.values"
SUMS = "elastic.sums"
_RESERVED = ("", VALUES, SUMS, "__metadata__")
ALIGN = 4096
"""The data begins at a multiple of this many bytes, so that direct I/O can read it alone."""
_ROOM = 320
"""Bytes of header for the entries of values and sums, whose numbers have up to 19 digits."""
CHUNK = 8 << 20
"""Bytes of one piece, at most, under one checksum."""
MOST_DIMS = 64
"""Of a tensor."""
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""

SIZES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "bool": 1,
    "complex128": 16, "complex32": 4, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes of an element of every dtype that a checkpoint keeps, by torch's name."""

CODES = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "complex64": "C64", "float32": "F32",
    "int32": "I32", "uint32": "U32", "float16": "F16", "bfloat16": "BF16", "int16": "I16",
    "uint16": "U16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8",
    "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""What safetensors calls the dtypes that it has."""

_NAMES = {code: name for name, code in CODES.items()}


Shared = Mapping[tuple[int, ...], Mapping[str, str]]
"""By the ranks that hold it in common, the writer among them: names, and a digest of what each is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a logical tensor, as one rank holds it; the whole of it where nothing is sharded."""

    name: str
    dtype: str
    """torch's name, one of `SIZES`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Of the box in it."""
    extent: tuple[int, ...]
    """Shape of the box."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.extent) * SIZES[self.dtype]

    @property
    def whole(self) -> bool:
        return self.shape == self.extent

    @property
    def logical(self) -> "Piece":
        """The tensor that it is of, as one box."""
        return replace(self, offset=(0,) * len(self.shape), extent=self.shape)


Span = tuple[str, int, int]
"""The name of what an image has there, where it begins and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What an image holds and where; offsets count from the image's first byte."""

    header: bytes = field(repr=False)
    """Everything before the data."""
    pieces: dict[str, Piece]
    starts: dict[str, int]
    ties: dict[str, str]
    """A name to the one whose bytes it shares."""
    shared: Shared = field(default_factory=dict)
    """What the writer holds in common with other ranks, whichever of them has it in an image."""
    data: tuple[Span, ...]
    """The pieces, in the order of their bytes."""
    values_at: int
    values_bytes: int
    sums_bytes: int

    @property
    def sums_at(self) -> int:
        """All before it has checksums."""
        return self.values_at + self.values_bytes

    @property
    def nbytes(self) -> int:
        return self.sums_at + self.sums_bytes

    def spans(self) -> list[Span]:
        """All that it is made of, in order; the header's name is ""."""
        return [("", 0, len(self.header)), *self.data, (VALUES, self.values_at, self.sums_at)]

    def common(self, name: str) -> set[tuple[tuple[int, ...], str]]:
        """What its writer holds in common with others under that name, and with whom."""
        return {(ranks, names[name]) for ranks, names in self.shared.items() if name in names}

    def chunk_ends(self) -> list[int]:
        """Where each chunk ends: `CHUNK` bytes, fewer at the end of what it is a part of."""
        return [
            min(at + CHUNK, end)
            for _, start, end in self.spans()
            for at in range(start, end, CHUNK)
        ]


def chunks_of(nbytes: int) -> int:
    """How many chunks so many bytes of one piece have."""
    return -(-nbytes // CHUNK)


class Layout:
    """Where everything goes in images of the same pieces: to the same place, whatever their values."""

    def __init__(
        self, pieces: Sequence[Piece], ties: Mapping[str, str], shared: Shared | None = None
    ) -> None:
        """Raises `CheckpointError` for a name that is taken twice."""
        order = sorted(pieces, key=lambda piece: -SIZES[piece.dtype])
        entries: dict[str, Any] = {}
        spans: list[Span] = []
        end = 0
        for piece in order:
            if piece.name in _RESERVED:
                raise CheckpointError(
                    f"a tensor cannot be called {piece.name!r}: choose another name"
                )
            if piece.name in entries or piece.name in ties:
                raise CheckpointError(f"{piece.name!r} is the name of two tensors in the state")
            entries[piece.name] = _entry(piece, end)
            spans.append((piece.name, end, end + piece.nbytes))
            end += piece.nbytes
        self._shared = shared or {}
        entries["__metadata__"] = {"elastic": _metadata(order, ties, self._shared)}
        self._json = _json(entries)
        self._length = length = _header_bytes(self._json)
        self.pieces = {piece.name: piece for piece in order}
        self.ties = dict(ties)
        self.data = tuple((name, length + start, length + stop) for name, start, stop in spans)
        self._starts = {name: start for name, start, _ in self.data}
        self.chunks = chunks_of(length), tuple(chunks_of(stop - start) for _, start, stop in spans)
        """How many the header has, and each of `data`; those of the values come last."""
        self._end = end

    def image(self, values_bytes: int) -> Image:
        """The one with so many bytes of values."""
        header, data = self.chunks
        sums_bytes = sums.ENTRY * (header + sum(data) + chunks_of(values_bytes))
        return Image(
            header=self._header(values_bytes, sums_bytes), pieces=self.pieces,
            starts=self._starts, ties=self.ties, shared=self._shared, data=self.data,
            values_at=self._length + self._end, values_bytes=values_bytes, sums_bytes=sums_bytes,
        )  # fmt: skip

    def _header(self, *sizes: int) -> bytes:
        """With the last two entries, and with spaces at its end, as safetensors allows."""
        entries, end = {}, self._end
        for name, size in zip((VALUES, SUMS), sizes, strict=True):
            entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
            end += size
        length = self._length - 8
        text = f"{self._json[:-1]},{_json(entries)[1:]}"
        return length.to_bytes(8, "little") + text.encode().ljust(length)


def lay_out(pieces: Sequence[Piece], ties: Mapping[str, str], values_bytes: int) -> Image:
    """An image of these. Raises `CheckpointError` for a name that is taken twice."""
    return Layout(pieces, ties).image(values_bytes)


def _entry(piece: Piece, start: int) -> dict[str, Any]:
    code = CODES.get(piece.dtype)
    shape = list(piece.extent) if code else [piece.nbytes]
    return {"dtype": code or "U8", "shape": shape, "data_offsets": [start, start + piece.nbytes]}


def _metadata(pieces: Sequence[Piece], ties: Mapping[str, str], shared: Shared) -> str:
    fields: dict[str, Any] = {
        "v": str(version.CHECKPOINT),
        "pieces": {p.name: [p.shape, p.offset] for p in pieces if not p.whole},
        "dtypes": {p.name: [p.dtype, p.extent] for p in pieces if p.dtype not in CODES},
        "ties": ties,
    }
    if shared:
        fields["shared"] = list(shared.items())
    return _json(fields)


def _header_bytes(text: str) -> int:
    """Of a header, room for the last two entries included, so that their sizes move nothing."""
    length = -(-(8 + len(text) + _ROOM) // ALIGN) * ALIGN
    if length - 8 > LONGEST_HEADER:
        raise CheckpointError(
            f"a rank's tensors have names of {length} bytes in all, which is too long"
        )
    return length


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))


def header_bytes(start: bytes | memoryview) -> int:
    """How many bytes the header has, with its length, by an image's first 8 bytes."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= LONGEST_HEADER:
        raise CheckpointError("it is no safetensors file: its header has no sensible length")
    return 8 + length


def parse(header: bytes, image_bytes: int) -> Image:
    """An image's header, taken apart and checked: its tensors make up all of `image_bytes`.

    Raises `CheckpointError` where it is no image of ours, or damaged.
    """
    try:
        entries = json.loads(header[8:])
        fields = json.loads(entries.pop("__metadata__")["elastic"])
        theirs = version.parse(fields["v"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("it is no shard of a checkpoint of ours") from error
    if theirs is None:
        raise CheckpointError("it is a shard of a checkpoint without a version")
    version.check_stored("the checkpoint", theirs, version.CHECKPOINT)
    try:
        return _parse(header, entries, fields, image_bytes)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError("the header of a checkpoint's shard is damaged") from error


def _parse(header: bytes, entries: dict[str, Any], fields: dict[str, Any], total: int) -> Image:
    pieces: dict[str, Piece] = {}
    starts: dict[str, int] = {}
    values, table = (0, 0), (0, 0)
    spans: list[tuple[int, int]] = []
    for name, entry in entries.items():
        start, end = (len(header) + at for at in _sizes(entry["data_offsets"]))
        spans.append((start, end))
        if name == VALUES:
            values = (start, end)
            continue
        if name == SUMS:
            table = (start, end)
            continue
        dtype, extent = fields["dtypes"].get(name) or (_NAMES[entry["dtype"]], entry["shape"])
        shape, offset = fields["pieces"].get(name) or (extent, [0] * len(extent))
        piece = Piece(
            name=name, dtype=dtype, shape=_sizes(shape), offset=_sizes(offset),
            extent=_sizes(extent),
        )  # fmt: skip
        if piece.nbytes != end - start or not _within(piece):
            raise ValueError(f"{name!r} has sizes that make no sense")
        pieces[name], starts[name] = piece, start
    spans.sort()
    if [len(header), *(end for _, end in spans)] != [*(start for start, _ in spans), total]:
        raise ValueError("tensors do not lie one after the other, from the header to the end")
    if table != (values[1], total):
        raise ValueError("the table of checksums is not at the end")
    ties = {str(name): str(fields["ties"][name]) for name in fields["ties"]}
    if not set(ties.values()) <= pieces.keys() or ties.keys() & pieces.keys():
        raise ValueError("a tie to nothing, or of a tensor that has bytes of its own")
    data = [(name, start, start + pieces[name].nbytes) for name, start in starts.items()]
    return Image(
        header=header, pieces=pieces, starts=starts, ties=ties, shared=_shared(fields),
        data=tuple(sorted(data, key=lambda span: span[1:])),
        values_at=values[0], values_bytes=values[1] - values[0], sums_bytes=table[1] - table[0],
    )  # fmt: skip


def _shared(fields: dict[str, Any]) -> dict[tuple[int, ...], dict[str, str]]:
    return {
        _sizes(ranks): {str(name): str(digest) for name, digest in names.items()}
        for ranks, names in fields.get("shared", ())
    }


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if len(sizes) > MOST_DIMS or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError("sizes are numbers of 0 or more, for a few dims")
    return sizes


def _within(piece: Piece) -> bool:
    return len(piece.shape) == len(piece.offset) == len(piece.extent) and all(
        offset + extent <= size
        for size, offset, extent in zip(piece.shape, piece.offset, piece.extent, strict=True)
    )

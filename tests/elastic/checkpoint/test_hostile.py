"""Bytes that no save wrote are refused in a sentence, or make sense; they cost no memory and run nothing."""

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.load.source import Mapped, Source
from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import (
    SIZES,
    SUMS,
    VALUES,
    Image,
    Piece,
    header_bytes,
    lay_out,
    parse,
)
from elastic.checkpoint.state.typed_json import decode
from elastic.proto import manifest, slot, sums
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError
from elastic.proto.sums import Chunk

REFUSALS = (CheckpointError, SlotError, ProtocolMismatch)

TAGS = [
    "$int", "$str", "$float", "$dict", "$numpy", "$tuple", "$set", "$frozenset", "$OrderedDict",
    "$Counter", "$deque", "$defaultdict", "$Size", "$complex", "$bytes", "$bytearray", "$range",
    "$dtype", "$device", "$tensor", "$", "$os.system", "__class__", "__reduce__", "__dict__",
]  # fmt: skip
texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [*TAGS, *SIZES, "load", "os.system", "None", "int", "list", "<f4", "|V0", "S0", "O", "|O8", "T",
         "(9999999,)i4", "i4,i4", "<M8[ns]", "AAAA", "0x1", "7ff8000000000000", "cuda:99999999999", "../x",
         "/etc/passwd", "\ud800", "1.0", "9.9", "w", "b", "F32", "U8", "C64"]
    ),
)  # fmt: skip
numbers = st.one_of(
    st.integers(-3, 9),
    st.sampled_from(
        [2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), math.nan, math.inf, 1.5]
    ),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(texts, inner, max_size=3),
        st.tuples(st.sampled_from(TAGS), inner).map(lambda pair: dict([pair])),
        st.tuples(st.sampled_from(TAGS), st.lists(inner, max_size=3)).map(
            lambda pair: dict([pair])
        ),
        st.tuples(texts, st.one_of(inner, st.lists(numbers, max_size=3)), texts).map(
            lambda three: {"$numpy": list(three)}
        ),
    ),
    max_leaves=12,
)


@contextmanager
def nothing_else() -> Iterator[None]:
    said = ""
    try:
        yield
    except REFUSALS as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 500, "a sentence"


# --- values --------------------------------------------------------------------------------------


@given(anything)
@example({"$deque": [2**63, []]})
@example({"$Size": [2**63]})
@example({"$numpy": ["S0", [2**40], ""]})
@example({"$numpy": ["|V0", [2**40], ""]})
@example({"$numpy": ["(" * 5000, [0], ""]})
@example({"$numpy": ["<f4", [2**62], ""]})
@example({"$set": [{"$tensor": "w"}]})
@example({"$dict": [[{"$tensor": "w"}, 1]]})
@example({"$x" * 1000: 1})
def test_any_values(value: Any) -> None:
    text = json.dumps(value)
    with nothing_else():
        decode(text)
    with nothing_else():
        decode(text, lambda name: [name])


@given(
    st.sampled_from(["[%s]", '{"a":%s}', '{"$tuple":[%s]}', '{"$dict":[[1,%s]]}']),
    st.integers(1, 3000),
)
def test_any_depth(level: str, depth: int) -> None:
    """What is decoded is walked by others after us, who have less room on the stack."""
    before, after = level.split("%s")
    text = before * depth + "1" + after * depth
    if depth > 101:
        with pytest.raises(CheckpointError):
            decode(text)
    else:
        decode(text)


@pytest.mark.parametrize(
    "text", ["9" * 100_000, '{"$int":"0x%s"}' % ("f" * 100_000), "1e999999999", '{"a":1,"a":2}']
)
def test_numbers_without_end_and_keys_twice(text: str) -> None:
    with nothing_else():
        decode(text)


@given(st.binary(max_size=100))
def test_noise(noise: bytes) -> None:
    with nothing_else():
        decode(noise)
    with nothing_else():
        manifest.loads(noise)
    with nothing_else():
        sums.unpack(noise, len(noise))
    with nothing_else():
        slot.read(memoryview(slot.MAGIC + noise.ljust(2 * slot.PAGE, b"\0")))


# --- images --------------------------------------------------------------------------------------


def image() -> tuple[Image, bytearray]:
    """A real one, of a piece of a tensor, a dtype that safetensors has not, a tie, and values."""
    pieces = [
        Piece(name="w", dtype="float32", shape=(4, 2), offset=(2, 0), extent=(2, 2)),
        Piece(name="b", dtype="complex128", shape=(1,), offset=(0,), extent=(1,)),
        Piece(name="empty", dtype="float32", shape=(0, 3), offset=(0, 0), extent=(0, 3)),
    ]
    values = b'{"w":{"$tensor":"w"},"n":3}'
    made = lay_out(pieces, {"t": "w"}, len(values))
    out = bytearray(made.nbytes)
    tensors = {p.name: torch.ones(p.extent, dtype=getattr(torch, p.dtype)) for p in pieces}
    out[made.sums_at :] = sums.pack(copy_cpu.write(made, tensors, values, memoryview(out)))
    return made, out


places = st.sampled_from(
    [("w",), ("b",), ("new",), (VALUES,), (SUMS,), ("__metadata__",), ("__metadata__", "elastic"),
     *((name, key) for name in ("w", "b", "empty", VALUES, SUMS) for key in ("dtype", "shape", "data_offsets")),
     *(("elastic", key) for key in ("v", "pieces", "dtypes", "ties")),
     *(("elastic", key, name) for key in ("pieces", "dtypes", "ties") for name in ("w", "b", "t", "x"))]
)  # fmt: skip
likely = st.one_of(
    anything,
    st.lists(numbers, max_size=3),
    st.lists(st.lists(numbers, max_size=3), min_size=2, max_size=2),
    st.tuples(st.sampled_from(sorted(SIZES)), st.lists(st.integers(0, 2**63), max_size=2)).map(
        list
    ),
)


def changed(changes: list[tuple[tuple[str, ...], Any]]) -> bytes:
    """The header with other entries."""
    whole, _ = image()
    entries = json.loads(whole.header[8:])
    fields = json.loads(entries["__metadata__"]["elastic"])
    for path, value in changes:
        target: Any = fields if path[0] == "elastic" else entries
        path = path[1:] if path[0] == "elastic" else path
        for key in path[:-1]:
            target = target.get(key) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[path[-1]] = value
    if isinstance(entries.get("__metadata__"), dict) and not any(
        path[0] == "__metadata__" for path, _ in changes
    ):
        entries["__metadata__"]["elastic"] = json.dumps(fields)
    length = len(whole.header) - 8
    return length.to_bytes(8, "little") + json.dumps(entries).encode().ljust(length)


@given(st.lists(st.tuples(places, likely), min_size=1, max_size=3))
@example([(("w", "data_offsets"), [0, 32])])
@example([(("w", "shape"), [2**61] * 1000)])
@example([(("elastic", "ties"), {"w": "b", "b": "w"})])
@example([(("elastic", "ties", "t"), "t")])
@example([(("w", "data_offsets"), [math.nan, 16])])
@example([(("elastic", "ties"), [1])])
def test_any_header(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    whole, data = image()
    header = changed(changes)
    with nothing_else():
        found = parse(header, whole.nbytes)
        spans = sorted((start, end) for _, start, end in found.spans()[1:])
        assert [len(header), *(end for _, end in spans)] == [
            *(at for at, _ in spans),
            found.sums_at,
        ]
        assert found.nbytes == whole.nbytes
        chunks = checksums(found, bytes(header) + bytes(data[len(header) :]))
        load(found, memoryview(header + data[len(header) :]), chunks)


def checksums(found: Image, data: bytes) -> list[Chunk]:
    """Of bytes as they are: a hostile file has checksums that fit."""
    starts = [0, *found.chunk_ends()]
    return [
        Chunk(end, sums.checksum(data[start:end]))
        for start, end in zip(starts, found.chunk_ends(), strict=False)
    ]


def load(found: Image, data: memoryview, chunks: list[Chunk]) -> None:
    source = Source(where="a file", image=found, reader=Mapped(data), chunks=chunks)
    state: dict[str, Any] = {"w": torch.zeros(4, 2), "n": 0, "made": torch.zeros(1)}
    Restore([source], Place()).apply(state, strict=False)


@settings(max_examples=50)
@given(anything)
@example({"w": 1, "n": {"$tensor": "huge"}})
def test_values_that_fit_no_state(values: Any) -> None:
    """Of a file that is sound in itself; tensors that are made are as large as what is there of them."""
    text = json.dumps(values).encode()
    huge = Piece(name="huge", dtype="int8", shape=(2**45,), offset=(0,), extent=(1,))
    whole = Piece(name="w", dtype="float32", shape=(2,), offset=(0,), extent=(2,))
    made = lay_out([huge, whole], {}, len(text))
    out = bytearray(made.nbytes)
    tensors = {"huge": torch.ones(1, dtype=torch.int8), "w": torch.ones(2)}
    chunks = copy_cpu.write(made, tensors, text, memoryview(out))
    source = Source(where="a file", image=made, reader=Mapped(memoryview(out)), chunks=chunks)
    parameter = torch.nn.Parameter(torch.ones(2))
    for kind in (
        {"w": torch.zeros(2), "n": 0},
        {"": 0, "a": {"w": {}}},
        {"o": torch.optim.SGD([parameter])},
    ):
        with nothing_else():
            Restore([source], Place()).apply(dict(kind), strict=False)


@given(st.binary(max_size=20), st.integers(0, 2**64 - 1))
def test_any_length_of_a_header(rest: bytes, length: int) -> None:
    with nothing_else():
        assert header_bytes(length.to_bytes(8, "little") + rest) <= 8 + 10**8


# --- slots, tables, manifests --------------------------------------------------------------------

words = st.one_of(
    st.integers(0, 9),
    st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
)


@given(
    data=st.data(),
    at=st.sampled_from([8, 12, 24, 32, 40, 48, 52, 56, 64, 68, 80, 88, 92, 256, 512]),
    word=words,
    wide=st.booleans(),
)
def test_any_number_in_a_slot_with_a_checksum_that_fits(
    data: st.DataObject, at: int, word: int, wide: bool
) -> None:
    content = b"0123456789"
    table = [Chunk(len(content), sums.checksum(content))]
    view = memoryview(bytearray(slot.bytes_for(len(content) + sums.ENTRY)))
    stamp = slot.Stamp(job="job", step=7, round=2, rank=1, world_size=4, generation=3)
    writing = slot.Writing(view, stamp, len(content) + sums.ENTRY, 1)
    writing.image[: len(content)] = content
    writing.commit(table, (1, 2))
    struct.pack_into("=Q" if wide else "=I", view, at, word if wide else word % 2**32)
    view[16:24] = view[24:32]
    digest = slot._digest  # as the writer would have it
    with nothing_else():
        head = slot.parse(view)
        if head.image_bytes <= len(view) - slot.PAGE:
            image = view[slot.PAGE :][: head.image_bytes]
            struct.pack_into("=Q", view, 72, digest(view, image[head.table_at :]))
        found = slot.read(view)
        assert 0 <= found.stamp.step < 2**63
        assert 0 <= found.stamp.round < 2**63
        assert found.stamp.rank in found.stamp.node
        assert found.stamp.node.stop <= found.stamp.world_size
        assert len(found.units) <= slot.MOST_UNITS
        assert len(found.image) <= len(view) - slot.PAGE


@given(st.lists(words, max_size=8), words)
def test_any_table_of_checksums(table: list[int], size: int) -> None:
    with nothing_else():
        chunks = sums.unpack(struct.pack(f"<{len(table)}Q", *table), size)
        ends = [chunk.end for chunk in chunks]
        assert ends == sorted(ends)
        assert (ends or [0])[-1] + 8 * len(table) == size


GOOD = manifest.Manifest(
    job="j", sequence=1, round=1, step=1, world_size=1,
    shards=(manifest.Shard(rank=0, file="f", bytes=1, digest=1),),
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["version", "job", "sequence", "round", "step", "world_size", "shards"]),
        anything,
    ),
    st.dictionaries(st.sampled_from(["rank", "file", "bytes", "digest"]), anything),
)
@example({"step": 10**30}, {})
@example({"job": [[[]]] * 5000}, {"file": "x" * 10_000 + "/"})
def test_any_manifest(fields: dict[str, Any], shard: dict[str, Any]) -> None:
    told = json.loads(manifest.dumps(GOOD))
    told["shards"][0] |= shard
    with nothing_else():
        found = manifest.loads(json.dumps(told | fields))
        assert [one.rank for one in found.shards] == list(range(found.world_size))
        assert not any("/" in one.file for one in found.shards)

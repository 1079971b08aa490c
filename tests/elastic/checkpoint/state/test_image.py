"""Images: safetensors reads them, we read them, and what is damaged or hostile is refused."""

import json
import math
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from elastic.checkpoint.state.image import (
    ALIGN,
    SIZES,
    SUMS,
    VALUES,
    Image,
    Piece,
    header_bytes,
    lay_out,
    parse,
)
from elastic.proto.errors import CheckpointError, ProtocolMismatch


def piece(name: str, dtype: str = "float32", *extent: int) -> Piece:
    return Piece(name=name, dtype=dtype, shape=extent, offset=(0,) * len(extent), extent=extent)


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    names = draw(
        st.sets(st.text(min_size=1, max_size=8).filter(lambda n: n not in TAKEN), max_size=6)
    )
    found = []
    for name in sorted(names):
        box = draw(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=3))
        found.append(
            Piece(
                name=name,
                dtype=draw(st.sampled_from(sorted(SIZES))),
                shape=tuple(sum(side) for side in box),
                offset=tuple(before for before, _, _ in box),
                extent=tuple(extent for _, extent, _ in box),
            )
        )
    return found


TAKEN = (VALUES, SUMS, "__metadata__")


def filled(image: Image, values: bytes) -> bytes:
    data = bytes(image.values_at - len(image.header))
    return image.header + data + values + bytes(image.sums_bytes)


@given(pieces(), st.binary(max_size=40))
def test_what_is_laid_out_is_parsed(found: list[Piece], values: bytes) -> None:
    image = lay_out(found, {}, len(values))
    data = filled(image, values)
    assert len(data) == image.nbytes
    assert header_bytes(data[:8]) == len(image.header)
    assert parse(data[: header_bytes(data)], len(data)) == image
    assert image.pieces == {p.name: p for p in found}
    for name, start in image.starts.items():
        assert start % math.gcd(SIZES[image.pieces[name].dtype], ALIGN) == 0, "elements are aligned"


@given(pieces(), st.binary(max_size=40))
def test_safetensors_reads_it(found: list[Piece], values: bytes) -> None:
    data = filled(lay_out(found, {}, len(values)), values)
    tensors = load(data)
    assert tensors.keys() == {p.name for p in found} | {VALUES, SUMS}
    assert bytes(tensors[VALUES].tolist()) == values
    for p in found:
        if p.dtype == str(tensors[p.name].dtype).removeprefix("torch."):
            assert tuple(tensors[p.name].shape) == p.extent
        else:
            assert tensors[p.name].dtype == torch.uint8, "what safetensors does not know is bytes"
            assert tensors[p.name].numel() == p.nbytes


def test_the_values_size_moves_no_tensor() -> None:
    found = [piece(f"{n}", "float32", n) for n in range(60)]
    places = [lay_out(found, {}, size).starts for size in (0, 9, 10, 99_999, 10**12)]
    assert all(place == places[0] for place in places)


def test_ties_come_back() -> None:
    image = lay_out([piece("a", "float32", 2)], {"b": "a"}, 0)
    assert parse(image.header, image.nbytes).ties == {"b": "a"}


def test_a_name_is_taken_once() -> None:
    for found, ties in (
        ([piece("a"), piece("a")], {}),
        ([piece("a")], {"a": "a"}),
    ):
        with pytest.raises(CheckpointError, match="is the name of two tensors"):
            lay_out(found, ties, 0)


@pytest.mark.parametrize("name", ["", VALUES, "__metadata__"])
def test_our_own_names_are_taken(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^a tensor cannot be called '{name}'"):
        lay_out([piece(name)], {}, 0)


def damaged(change: Any) -> None:
    sharded = Piece(name="w", dtype="float32", shape=(4, 2), offset=(2, 0), extent=(2, 2))
    image = lay_out([sharded, piece("c", "complex128", 1)], {"t": "w"}, 3)
    entries = json.loads(image.header[8:])
    fields = json.loads(entries["__metadata__"]["elastic"])
    change(entries, fields)
    if isinstance(entries.get("__metadata__"), dict):
        entries["__metadata__"]["elastic"] = json.dumps(fields)
    text = json.dumps(entries).encode()
    length = len(image.header) - 8
    parse(length.to_bytes(8, "little") + text.ljust(length), image.nbytes)


def test_nothing_changed_is_fine() -> None:
    damaged(lambda entries, fields: None)


@pytest.mark.parametrize(
    "change",
    [
        lambda e, f: e.pop("__metadata__"),
        lambda e, f: e.update(__metadata__=3),
        lambda e, f: e["w"].update(data_offsets=[0, 10**15]),
        lambda e, f: e["w"].update(data_offsets=[16, 0]),
        lambda e, f: e["w"].update(data_offsets=[-16, 0]),
        lambda e, f: e["w"].update(dtype="F64"),
        lambda e, f: e["w"].update(dtype="X"),
        lambda e, f: e["w"].update(shape=[-1, -4]),
        lambda e, f: e["w"].update(shape=[True, 4]),
        lambda e, f: e["w"].update(shape="22"),
        lambda e, f: e.update(w=None),
        lambda e, f: f["pieces"].update(w=[[3, 2], [2, 0]]),
        lambda e, f: f["pieces"].update(w=[[4], [2]]),
        lambda e, f: f["dtypes"].update(c=["float64", [1]]),
        lambda e, f: f["dtypes"].update(c=["os.system", [1]]),
        lambda e, f: f["ties"].update(t="nothing"),
        lambda e, f: f.update(ties=3),
        lambda e, f: f.pop("dtypes"),
    ],
)
def test_what_is_damaged_is_refused(change: Any) -> None:
    with pytest.raises(CheckpointError):
        damaged(change)


def test_versions() -> None:
    damaged(lambda e, f: f.update(v="1.1", new="field"))
    with pytest.raises(ProtocolMismatch, match=r"the checkpoint speaks version 2\.0"):
        damaged(lambda e, f: f.update(v="2.0"))
    with pytest.raises(CheckpointError, match="without a version"):
        damaged(lambda e, f: f.update(v="new"))


@given(st.binary(max_size=64))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse(noise, len(noise))
    if len(noise) < 8 or int.from_bytes(noise[:8], "little") > 10**8:
        with pytest.raises(CheckpointError):
            header_bytes(noise)


def test_what_safetensors_wrote_alone_is_no_shard_of_ours() -> None:
    from safetensors.torch import save

    data = save({"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no shard of a checkpoint of ours"):
        parse(data[: header_bytes(data)], len(data))


def test_safetensors_is_as_strict_as_we_believe() -> None:
    """We leave no gap since it refuses one."""
    image = lay_out([piece("a", "uint8", 4)], {}, 0)
    entries = json.loads(image.header[8:])
    entries["a"]["data_offsets"] = [1, 5]
    text = json.dumps(entries).encode()
    with pytest.raises(safetensors.SafetensorError):
        load(len(text).to_bytes(8, "little") + text + bytes(5))

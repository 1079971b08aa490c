import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.data.indexed import CODES, MAGIC, Indexed, merge, token_dtype, write

Documents = list[list[list[int]]]
SHORT, LONG = token_dtype(50257), token_dtype(128256)

documents = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=6)


def put(prefix: Path, found: Documents, dtype: np.dtype[np.generic] = SHORT) -> Path:
    with write(prefix, dtype) as writer:
        for document in found:
            writer.add_document(document)
    return prefix


def got(prefix: Path) -> Documents:
    data = Indexed(prefix)
    sequences = [data.tokens(i).tolist() for i in range(len(data))]
    ends = data.documents.tolist()
    return [sequences[a:b] for a, b in pairwise(ends)]


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@settings(deadline=None, max_examples=40)
@given(found=documents, dtype=st.sampled_from(sorted(CODES.values(), key=str)))
def test_what_is_written_is_read(
    found: Documents, dtype: np.dtype[np.generic], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if dtype.itemsize == 1:
        found = [[[token % 256 for token in one] for one in document] for document in found]
    prefix = put(tmp_path_factory.mktemp("data") / "new" / "x", found, dtype)
    assert got(prefix) == found
    assert Indexed(prefix).dtype == dtype


@settings(deadline=None, max_examples=20)
@given(parts=st.lists(documents, min_size=1, max_size=4))
def test_merged_is_as_if_written_together(
    parts: list[Documents], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("data")
    prefixes = [put(folder / str(number), part) for number, part in enumerate(parts)]
    together = pair(put(folder / "together", [one for part in parts for one in part]))
    merge(prefixes, folder / "merged")
    assert pair(folder / "merged") == together
    merge(prefixes, prefixes[0])  # over one of its own
    assert pair(prefixes[0]) == together


def test_a_part_of_a_sequence(tmp_path: Path) -> None:
    data = Indexed(put(tmp_path / "x", [[[1, 2, 3]], [[40, 50, 60, 70]]]))
    assert data.tokens(1, 1, 2).tolist() == [50, 60]
    assert data.tokens(1, 3).tolist() == [70]
    assert data.tokens(1, 4).tolist() == data.tokens(0, 3, 0).tolist() == []
    assert not data.tokens(0).flags.writeable
    for beyond in [(2,), (-1,), (0, 4), (0, -1), (0, 0, 4), (0, 2, -1)]:
        with pytest.raises(IndexError):
            data.tokens(*beyond)


def test_a_document_without_tokens_has_no_sequence(tmp_path: Path) -> None:
    with write(tmp_path / "x", SHORT) as writer:
        writer.extend(np.array([1, 0, 2], np.int32), np.array([5, 6, 7], SHORT).tobytes())
    assert got(tmp_path / "x") == [[[5]], [], [[6, 7]]]


@pytest.mark.parametrize(("vocabulary", "name"), [(65499, "uint16"), (65500, "int32")])
def test_the_type_is_by_vocabulary(vocabulary: int, name: str) -> None:
    assert token_dtype(vocabulary).name == name


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_refused_and_nothing_is_left(
    tmp_path: Path, token: int
) -> None:
    before = pair(put(tmp_path / "x", [[[1]]]))
    with (
        pytest.raises(UsageError, match=f"token id {token} does not fit uint16"),
        write(tmp_path / "x", SHORT) as writer,
    ):
        writer.add_document([[1, token]])
    assert pair(tmp_path / "x") == before
    assert len(list(tmp_path.iterdir())) == 2


def test_other_types_are_not_merged(tmp_path: Path) -> None:
    prefixes = [put(tmp_path / "a", [[[1]]]), put(tmp_path / "b", [[[1]]], LONG)]
    with pytest.raises(UsageError, match="b holds int32 where uint16 is written"):
        merge(prefixes, tmp_path / "out")
    with pytest.raises(UsageError, match="no datasets to merge"):
        merge([], tmp_path / "out")
    assert len(list(tmp_path.iterdir())) == 4


FOUND: Documents = [[[40000, 2, 3]], [[7, 8]], [[9], [10, 11]], []]


def refusal(prefix: Path) -> str | None:
    try:
        Indexed(prefix)
    except UsageError as error:
        return str(error)
    return None


def test_a_damaged_index_reads_the_same_or_is_refused(tmp_path: Path) -> None:
    """Each byte changed, each length. Only which sequences make a document can be another unseen."""
    prefix = put(tmp_path / "x", FOUND)
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    boundaries = len(whole) - 8 * (len(FOUND) + 1)
    read = 0
    for at in range(len(whole)):
        for mask in (1, 4, 128, 255):
            index.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
            said = refusal(prefix)
            if said is None:
                read += 1
                assert at >= boundaries, f"byte {at} of {len(whole)} may not be another"
                assert sum(got(prefix), []) == sum(FOUND, [])  # noqa: RUF017  a few
            else:
                assert said.startswith(str(prefix)), said
                assert "\n" not in said
    assert read < 10
    for damaged in [*(whole[:length] for length in range(len(whole))), whole + b"\0"]:
        index.write_bytes(damaged)
        assert refusal(prefix) is not None, len(damaged)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    rest=st.binary(max_size=80),
    count=st.integers(0, 2**64 - 1) | st.integers(0, 6),
    boundaries=st.integers(0, 2**64 - 1) | st.integers(0, 6),
)
def test_any_bytes_are_refused_in_one_way(
    lengths: list[int], rest: bytes, count: int, boundaries: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("data")
    (folder / "x.bin").write_bytes(b"\1\0")
    header = struct.pack("<9sQBQQ", MAGIC, 1, 8, count, boundaries)
    body = struct.pack(f"<{len(lengths)}i", *lengths) + rest
    (folder / "x.idx").write_bytes(header + body)
    with pytest.raises(UsageError):
        Indexed(folder / "x")


def test_a_length_below_zero_is_refused(tmp_path: Path) -> None:
    """Also where offsets and the .bin's size agree with it."""
    (tmp_path / "x.bin").write_bytes(b"\1\0\2\0")
    body = struct.pack("<2i2q2q", 4, -2, 0, 8, 0, 2)
    (tmp_path / "x.idx").write_bytes(struct.pack("<9sQBQQ", MAGIC, 1, 8, 2, 2) + body)
    with pytest.raises(UsageError, match="sequence 1 has -2 tokens"):
        Indexed(tmp_path / "x")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_bin_of_another_size_is_refused(tmp_path: Path, change: int) -> None:
    data = Path(f"{put(tmp_path / 'x', FOUND)}.bin")
    raw = data.read_bytes() + b"\0"
    data.write_bytes(raw[: len(raw) - 1 + change])
    with pytest.raises(UsageError, match=rf"x.bin has {16 + change} bytes where x.idx says 16"):
        Indexed(tmp_path / "x")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "x", FOUND)
    (tmp_path / f"x.{suffix}").unlink()
    with pytest.raises(UsageError, match=rf"cannot read .*x\.{suffix}: No such file"):
        Indexed(tmp_path / "x")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_in_place_of_a_prefix_is_told(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "x", FOUND)
    with pytest.raises(UsageError, match=r"No such file.*: give the prefix without \.bin or \.idx"):
        Indexed(tmp_path / f"x.{suffix}")


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (9, 2, "version 2; 1 is known"),
        (17, 7, r"tokens of type 7, not one of 1 \(uint8\), 4 \(int32\)"),
        (18, 4, "4 sequences and 5 document boundaries take"),
        (34, 2, "sequence 1 has 2 tokens and begins at byte 6"),
        (98, 6, "documents do not go from sequence 0 to 4"),
    ],
)
def test_each_lie_is_named(tmp_path: Path, at: int, value: int, what: str) -> None:
    """Of 4 sequences and 5 boundaries: lengths from byte 34, offsets from 50, documents from 82."""
    index = Path(f"{put(tmp_path / 'x', FOUND)}.idx")
    raw = bytearray(index.read_bytes())
    raw[at] = value
    index.write_bytes(raw)
    if at == 18:
        index.write_bytes(raw + b"\0")
    with pytest.raises(UsageError, match=what):
        Indexed(tmp_path / "x")

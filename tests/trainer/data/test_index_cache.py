import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from elastic.agent import cgroup
from elastic.proto.errors import UsageError
from elastic.trainer.data import index_cache
from elastic.trainer.data.blend import by_weight
from elastic.trainer.data.index_cache import blended, cached
from elastic.trainer.data.samples import Indices, Request, build
from tests.full_disk import files_of_at_most

LENGTHS = np.arange(1, 301, dtype=np.int32)
REQUEST = Request(sequences=range(10, 290), samples=4000, seq_length=16)
FIELDS = ("documents", "samples", "shuffle")


def same(one: Indices, other: Indices) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def inodes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in directory.iterdir()}


def test_what_is_made_is_found_again(tmp_path: Path) -> None:
    made = cached(tmp_path / "cache", "train", LENGTHS, REQUEST)
    assert same(made, build(LENGTHS, REQUEST))
    assert not any(getattr(made, name).flags.writeable for name in FIELDS)
    (description,) = (tmp_path / "cache").glob("*-description.txt")
    base = hashlib.md5(description.read_bytes()).hexdigest() + "-GPTDataset-train"
    kinds = ("document_index.npy", "sample_index.npy", "shuffle_index.npy", "description.txt")
    before = inodes(tmp_path / "cache")
    assert set(before) == {f".{base}.lock", *(f"{base}-{kind}" for kind in kinds)}
    assert same(made, cached(tmp_path / "cache", "train", LENGTHS, REQUEST))
    assert inodes(tmp_path / "cache") == before


def test_other_data_and_other_requests_have_other_files(tmp_path: Path) -> None:
    swapped = LENGTHS.copy()
    swapped[20:22] = swapped[21:19:-1]
    asked = [
        ("train", LENGTHS, REQUEST),
        ("valid", LENGTHS, REQUEST),
        ("train", swapped, REQUEST),
        ("train", LENGTHS, replace(REQUEST, seed=1)),
        ("train", LENGTHS, replace(REQUEST, samples=4001)),
        ("train", LENGTHS, replace(REQUEST, seq_length=15)),
        ("train", LENGTHS, replace(REQUEST, sequences=range(11, 290))),
    ]
    for split, lengths, request in asked:
        assert same(cached(tmp_path, split, lengths, request), build(lengths, request))
    assert len(list(tmp_path.glob("*_index.npy"))) == 3 * len(asked)


def objects(raw: bytes) -> bytes:
    """The file, as one of Python objects, which only pickle could read."""
    return re.sub(rb"'<[iu]4', ", b"'|O' , ", raw, count=1)


@pytest.mark.parametrize("kind", ["document", "sample", "shuffle"])
@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-1], lambda raw: raw[:20], lambda _: b"", lambda raw: b"x" + raw, objects],
    ids=["cut", "header", "empty", "magic", "objects"],
)
def test_a_damaged_file_is_made_again(
    tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]
) -> None:
    made = cached(tmp_path, "train", LENGTHS, REQUEST)
    (path,) = tmp_path.glob(f"*-{kind}_index.npy")
    whole = path.read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    path.unlink()  # what is mapped stays as it was
    path.write_bytes(damaged)
    assert same(cached(tmp_path, "train", LENGTHS, REQUEST), made)
    assert path.read_bytes() == whole


def test_a_header_with_a_bit_of_any_byte_changed_is_made_again(tmp_path: Path) -> None:
    made = cached(tmp_path, "train", LENGTHS, REQUEST)
    (path,) = tmp_path.glob("*-sample_index.npy")
    whole = path.read_bytes()
    for byte in range(128):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << byte % 8
        path.unlink()
        path.write_bytes(damaged)
        assert same(cached(tmp_path, "train", LENGTHS, REQUEST), made)
        assert path.read_bytes() == whole


def test_of_many_that_ask_at_once_one_makes_it(tmp_path: Path) -> None:
    """Threads, since the lock is of the open file: for it they are as processes are."""
    barrier = Barrier(4)
    long = replace(REQUEST, samples=400_000)  # takes long enough to meet

    def ask(_: int) -> dict[str, int]:
        barrier.wait()
        cached(tmp_path, "train", LENGTHS, long)
        return inodes(tmp_path)

    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(ask, range(4)))
    assert all(one == seen[0] for one in seen)


def test_no_samples_are_kept_too(tmp_path: Path) -> None:
    request = Request(sequences=range(1), samples=0, seq_length=16)
    for _ in range(2):
        assert cached(tmp_path, "test", LENGTHS, request).shuffle.shape == (0,)


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"indices in .*file/cache: Not a directory; give another folder"
    ):
        cached(tmp_path / "file" / "cache", "train", LENGTHS, REQUEST)


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """numpy says so without an error's number."""
    with (
        files_of_at_most(1 << 14),
        pytest.raises(UsageError, match=r"indices in .*: (?!None)\w.*; give another"),
    ):
        cached(tmp_path, "train", LENGTHS, replace(REQUEST, samples=40000))


def test_an_impossible_request_writes_nothing(tmp_path: Path) -> None:
    request = replace(REQUEST, sequences=range(5, 5))
    with pytest.raises(UsageError, match="0 sequences with 0 tokens"):
        cached(tmp_path / "cache", "train", LENGTHS, request)
    assert not (tmp_path / "cache").exists()


def test_a_blend_is_kept_as_well(tmp_path: Path) -> None:
    sizes = [30, 80]
    made = blended(tmp_path, "train", sizes, [1.0, 2.0], 60)
    assert np.array_equal(made.datasets, by_weight([1.0, 2.0], 60).datasets)
    before = inodes(tmp_path)
    again = blended(tmp_path, "train", sizes, [1.0, 2.0], 60)
    assert np.array_equal(made.samples, again.samples)
    assert not again.samples.flags.writeable
    assert inodes(tmp_path) == before
    assert len(blended(tmp_path, "train", sizes, None, 60).datasets) == 60
    assert len(inodes(tmp_path)) == 2 * len(before)
    with pytest.raises(UsageError, match="takes 40 samples of dataset 0, which has 30"):
        blended(tmp_path, "valid", sizes, [2.0, 1.0], 60)


@pytest.mark.parametrize(
    ("left", "limits", "tried"),
    [(1000, [], False), (10**18, [(10**18, 0), (5000, 4000)], False), (10**18, [], True)],
)
def test_indices_that_there_is_no_memory_for_are_told_before_they_are_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: int,
    limits: list[tuple[int, int]],
    tried: bool,
) -> None:
    made: list[str] = []

    def make(*_: object) -> Indices:
        made.append("")
        raise MemoryError

    monkeypatch.setattr(index_cache, "build", make)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=left))
    monkeypatch.setattr(cgroup, "limits", lambda: limits)
    request = replace(REQUEST, samples=10**9)
    with pytest.raises(
        UsageError,
        match=r"indices of 1000\d* samples \(train\) take 52\.3 GB .*: make the run shorter",
    ):
        cached(tmp_path, "train", LENGTHS, request)
    assert bool(made) == tried
    assert not list(tmp_path.glob("*.npy"))

"""Manifests: what a commit writes is read, and whatever else is there is refused, in words."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto import manifest
from elastic.proto.errors import CheckpointError
from elastic.proto.manifest import Manifest, Shard

MANIFEST = Manifest(
    job="job",
    sequence=7,
    round=3,
    step=1000,
    world_size=2,
    shards=tuple(
        Shard(
            rank=rank,
            file=manifest.file(rank, 2, 3, "job"),
            bytes=5000 + rank,
            digest=2**64 - 1 - rank,
        )
        for rank in range(2)
    ),
)


def test_what_is_written_is_read() -> None:
    assert manifest.loads(manifest.dumps(MANIFEST)) == MANIFEST
    assert manifest.loads(manifest.dumps(MANIFEST).encode()) == MANIFEST


@given(st.integers(1, 10**17))
def test_a_folder_names_its_step(step: int) -> None:
    assert manifest.step_of(manifest.folder(step)) == step
    assert manifest.step_of(manifest.folder(0)) is None, "which is the beginning"


@pytest.mark.parametrize(
    "name", ["step-1", "step-", "step-00000001.tmp", "x-00000001", "step-" + "1" * 19]
)
def test_other_folders_are_no_steps(name: str) -> None:
    assert manifest.step_of(name) is None


def test_files_of_other_rounds_and_jobs_have_other_names() -> None:
    name = manifest.file(1, 8, 3, "1f0c2a9b77")
    assert name == "shard-00001-of-00008.r3-1f0c2a9b.safetensors"
    assert name not in (manifest.file(1, 8, 4, "1f0c2a9b77"), manifest.file(1, 8, 3, "00c2a9b77"))


def changed(change: Any) -> Manifest:
    fields = json.loads(manifest.dumps(MANIFEST))
    change(fields, fields["shards"][1])
    return manifest.loads(json.dumps(fields))


def test_nothing_changed_and_what_is_new_are_fine() -> None:
    assert changed(lambda f, s: None) == MANIFEST
    assert changed(lambda f, s: f.update(version="1.1", new=[1])) == MANIFEST


@pytest.mark.parametrize(
    "change",
    [
        lambda f, s: s.update(file="../shard"),
        lambda f, s: s.update(file="/etc/passwd"),
        lambda f, s: s.update(file=".."),
        lambda f, s: s.update(file=""),
        lambda f, s: s.update(file="shard\0"),
        lambda f, s: s.update(file="\ud800"),
        lambda f, s: s.update(file=["shard"]),
        lambda f, s: s.update(rank=0),
        lambda f, s: s.update(rank=2),
        lambda f, s: s.update(rank=-1),
        lambda f, s: s.update(rank=True),
        lambda f, s: s.update(rank=1.0),
        lambda f, s: s.update(bytes=-1),
        lambda f, s: s.update(bytes="5001"),
        lambda f, s: s.update(bytes=10**30),
        lambda f, s: s.update(digest="-1"),
        lambda f, s: s.update(digest="f" * 17),
        lambda f, s: s.update(digest="g"),
        lambda f, s: s.update(digest=7),
        lambda f, s: s.pop("file"),
        lambda f, s: f.update(step=-1),
        lambda f, s: f.update(step=None),
        lambda f, s: f.update(round=-3),
        lambda f, s: f.update(round=10**30),
        lambda f, s: f.update(round=float("inf")),
        lambda f, s: f.update(world_size=3),
        lambda f, s: f.update(world_size=10**15),  # nobody counts that far
        lambda f, s: f.update(job=None),
        lambda f, s: f.update(shards=[]),
        lambda f, s: f.update(shards={"0": s}),
        lambda f, s: f.update(shards=7),
        lambda f, s: f["shards"].append(s),
        lambda f, s: f["shards"].append(None),
        lambda f, s: f.pop("round"),
        lambda f, s: f.pop("version"),
        lambda f, s: f.update(version=1.0),
        lambda f, s: f.update(version="one"),
    ],
)
def test_what_no_commit_writes_is_refused(change: Any) -> None:
    with pytest.raises(CheckpointError, match="the manifest"):
        changed(change)


def test_another_major_version_is_refused_by_its_name() -> None:
    with pytest.raises(CheckpointError, match=r"the checkpoint speaks version 2\.0"):
        changed(lambda f, s: f.update(version="2.0", shards="of another kind"))


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"7", b'"step"', b"\xff\xfe\xfd", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000],
    ids=len,
)  # fmt: skip
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        manifest.loads(text)


@given(st.integers(0, len(manifest.dumps(MANIFEST)) - 3))
def test_half_a_manifest_is_refused(size: int) -> None:
    with pytest.raises(CheckpointError):
        manifest.loads(manifest.dumps(MANIFEST)[:size])


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CheckpointError):
        manifest.loads(noise)

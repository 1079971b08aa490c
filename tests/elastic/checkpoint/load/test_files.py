"""A checkpoint's files: only what is committed and sound is used, and what is not is said by its file."""

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.checkpoint import stored
from elastic.checkpoint.load import files, loading
from elastic.checkpoint.load.loading import looked
from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.image import Piece, lay_out
from elastic.checkpoint.storage import folder, manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.checkpoint.storage.protocol import File
from elastic.proto import keeper, manifest, sums
from elastic.proto.errors import CheckpointError
from tests.elastic.checkpoint import shards

WORLD = 2


def shard(folder: Path, rank: int, round_: int, fill: float = 0) -> manifest.Shard:
    """One rank's file; all are of the same size."""
    piece = Piece(name="w", dtype="float32", shape=(6,), offset=(3 * rank,), extent=(3,))
    values = b'{"w":{"$tensor":"w"}}'
    image = lay_out([piece], {}, len(values))
    out = bytearray(image.nbytes)
    tensors = {"w": torch.full((3,), float(rank + fill))}
    table = sums.pack(copy_cpu.write(image, tensors, values, memoryview(out)))
    out[image.sums_at :] = table
    name = manifest.file(rank, WORLD, round_, "j")
    (folder / name).write_bytes(out)
    return manifest.Shard(rank=rank, file=name, bytes=len(out), digest=sums.checksum(table))


def commit(path: Path, step: int, round_: int = 1, sequence: int = 1) -> Path:
    """A step with all that belongs to it; returns its folder."""
    folder = path / manifest.folder(step)
    folder.mkdir()
    shards = tuple(shard(folder, rank, round_) for rank in range(WORLD))
    whole = manifest.Manifest(
        job="j", sequence=sequence, round=round_, step=step, world_size=WORLD, shards=shards
    )
    (folder / manifest.NAME).write_text(manifest.dumps(whole))
    return folder


def edit(folder: Path, **fields: object) -> None:
    file = folder / manifest.NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# --- steps ---------------------------------------------------------------------------------------


def test_nothing_is_committed_where_nothing_is(tmp_path: Path) -> None:
    assert manifests.committed(Folder(tmp_path / "no")) is None
    assert manifests.committed(Folder(tmp_path)) is None


def newest(path: Path, step: int | None = None) -> int | None:
    found = manifests.committed(Folder(path), step)
    return None if found is None else found.step


def test_the_newest_is_the_one_that_was_committed_last(tmp_path: Path) -> None:
    """Of whatever job and round."""
    for sequence, (step, round_) in enumerate(((10, 57), (30, 1), (20, 2))):
        commit(tmp_path, step, round_, sequence)
    assert newest(tmp_path) == 20
    assert newest(tmp_path, 10) == 10
    assert newest(tmp_path, 11) is None


def test_what_its_round_has_saved_from_a_step_on_is_passed_over(tmp_path: Path) -> None:
    for step, round_ in ((10, 1), (20, 2), (30, 2)):
        commit(tmp_path, step, round_, sequence=step)

    def found(step: int, *, later: bool, round_: int = 2, job: str = "j") -> keeper.Looked:
        bad = keeper.Bad(round=round_, step=step, what="it is in doubt", later=later)
        return looked(str(tmp_path), Folder(tmp_path), None, job, (bad,))

    assert found(20, later=True) == keeper.Looked(job="j", round=1, step=10)
    assert found(15, later=True).step == 10
    assert found(20, later=False).step == found(30, later=True, round_=1).step == 30
    assert found(20, later=True, job="another").step == 30, "a round of this job's"
    none = found(5, later=True, round_=0, job="another")
    assert none.error.count("it is in doubt") == 3, "and says why there is nothing"


def test_a_step_of_more_files_than_may_be_open_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    tokens = SimpleQueue[None]()
    tokens.put(None)
    monkeypatch.setattr(folder, "_tokens", tokens)
    commit(tmp_path, 10)
    before = len(os.listdir("/proc/self/fd"))
    known, wrong = files.newest(Folder(tmp_path))
    assert known is not None
    assert (known.step, wrong) == (10, [])
    found, _ = files.sources(Folder(tmp_path), 10)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert all(one.intact(0, len(one.image.header)) for one in found.values())
    assert len(found) == WORLD
    del found
    assert len(os.listdir("/proc/self/fd")) == before
    assert tokens.qsize() == 1


class Away(Folder):
    """A network's, on which files of one step cannot be read some times."""

    def __init__(self, path: Path, step: int, names: str, times: int) -> None:
        super().__init__(path)
        self.step, self.names, self.times = step, names, times

    def open(self, step: int, name: str) -> File:
        if step == self.step and name.endswith(self.names) and self.times:
            self.times -= 1
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return super().open(step, name)


@pytest.mark.parametrize("names", ["manifest.json", ".safetensors"])
def test_a_step_that_cannot_be_read_now_is_not_passed_over(
    tmp_path: Path, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps since an older one would be lost for it."""
    monkeypatch.setattr(loading, "PAUSES", (0.0, 0.0))
    for step in (10, 20):
        commit(tmp_path, step, sequence=step)

    def found(step: int, times: int) -> keeper.Looked:
        return looked(str(tmp_path), Away(tmp_path, step, names, times), None, "j", ())

    assert found(20, 2).step == 20, "it is tried again"
    assert "timed out" in found(20, 99).error
    assert found(10, 99).step == (20 if names == ".safetensors" else 0), "which may be the newest"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / manifest.NAME).unlink(),
        lambda folder: (folder / manifest.NAME).write_text('{"version": "1.0", "jo'),
        lambda folder: (folder / manifest.NAME).write_bytes(bytes(500)),
        lambda folder: edit(folder, version="2.0"),
        lambda folder: edit(folder, world_size=3),
        lambda folder: edit(folder, step=21),  # of another folder
        lambda folder: shutil.rmtree(folder),
        lambda folder: (
            folder.rename(folder.with_name("x")).joinpath("manifest.json").rename(folder)
        ),
    ],
)
def test_a_step_without_a_sound_manifest_is_passed_over(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    commit(tmp_path, 10)
    spoil(commit(tmp_path, 20))
    (tmp_path / "notes").mkdir()
    assert newest(tmp_path) == 10
    assert newest(tmp_path, 20) is None
    with pytest.raises((CheckpointError, OSError)):
        files.sources(Folder(tmp_path), 20)


# --- shards --------------------------------------------------------------------------------------


def test_shards_are_read_by_rank(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    found, wrong = files.sources(Folder(tmp_path), 10)
    assert wrong == []
    for rank, source in found.items():
        tensor = source.piece("w")
        assert tensor is not None
        assert tensor.tolist() == [rank] * 3
        assert source.values(str) == {"w": "w"}
    assert found.keys() == {0, 1}


def name(rank: int, round_: int = 1) -> str:
    return manifest.file(rank, WORLD, round_, "j")


def swap(folder: Path) -> None:
    (folder / name(0)).replace(folder / "x")
    (folder / name(1)).replace(folder / name(0))
    (folder / "x").replace(folder / name(1))


def empty(folder: Path) -> None:
    (folder / name(1)).write_bytes(b"")
    shards = json.loads((folder / manifest.NAME).read_text())["shards"]
    shards[1]["bytes"] = 0
    edit(folder, shards=shards)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda folder: os.truncate(folder / name(1), 5000), "it has 5000 bytes, .* were written"),
        (lambda folder: os.truncate(folder / name(1), 10**6), "it has 1000000 bytes"),
        (lambda folder: (folder / name(1)).unlink(), "No such file"),
        (lambda folder: shard(folder, 1, 1, fill=0.5), "checksums is not the one that was written"),
        (
            lambda folder: shutil.copy(folder / name(0), folder / name(1)),
            "checksums is not the one",
        ),
        (empty, "no safetensors file"),
    ],
    ids=["truncated", "longer", "missing", "stale", "another's", "empty"],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], what: str
) -> None:
    folder = commit(tmp_path, 10)
    spoil(folder)
    found, wrong = files.sources(Folder(tmp_path), 10)
    assert found.keys() == {0}
    with pytest.raises(CheckpointError, match=rf"^{folder / name(1)}: .*{what}"):
        raise CheckpointError(*wrong)


def test_swapped_files_are_both_named(tmp_path: Path) -> None:
    folder = commit(tmp_path, 10)
    swap(folder)
    found, wrong = files.sources(Folder(tmp_path), 10)
    assert found == {}
    assert [line.split(": ")[0] for line in wrong] == [str(folder / name(rank)) for rank in (0, 1)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(at=st.integers(0, 10**4), in_table=st.booleans(), bit=st.integers(0, 7))
def test_a_flipped_bit_of_header_or_table_is_found(
    tmp_path: Path, at: int, in_table: bool, bit: int
) -> None:
    if not (tmp_path / manifest.folder(10)).exists():
        commit(tmp_path, 10)
    file = tmp_path / manifest.folder(10) / name(1)
    sound = file.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    # a chunk each: header, tensor, values
    at = len(sound) - 1 - at % (3 * sums.ENTRY) if in_table else at % min(header, 600)
    data = bytearray(sound)
    data[at] ^= 1 << bit
    file.write_bytes(data)
    found, wrong = files.sources(Folder(tmp_path), 10)
    file.write_bytes(sound)
    assert found.keys() == {0}
    assert [line.split(": ")[0] for line in wrong] == [str(file)]


def test_a_flipped_bit_of_a_tensor_is_found_when_it_is_read(tmp_path: Path) -> None:
    folder = commit(tmp_path, 10)
    found, _ = files.sources(Folder(tmp_path), 10)
    start = found[1].image.starts["w"]
    data = bytearray((folder / name(1)).read_bytes())
    data[start] ^= 1
    (folder / name(1)).write_bytes(data)
    found, wrong = files.sources(Folder(tmp_path), 10)
    assert wrong == []
    assert found[1].piece("w") is None
    assert found[0].piece("w") is not None


@pytest.mark.parametrize("place", ["header", "table"])
def test_a_hostile_file_with_its_own_checksums_is_named(tmp_path: Path, place: str) -> None:
    folder = commit(tmp_path, 10)
    file = folder / name(1)
    data = file.read_bytes()
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    at, end = entries["elastic.sums"]["data_offsets"]
    if place == "header":
        entries["w"]["data_offsets"] = [0, float("inf")]
    else:  # of no whole number of words
        entries["elastic.values"]["data_offsets"][1] = at + 3
        entries["elastic.sums"]["data_offsets"] = [at + 3, end]
    text = json.dumps(entries).encode()
    length = int.from_bytes(data[:8], "little")
    data = data[:8] + text.ljust(length) + data[8 + length :]
    table = data[8 + length + entries["elastic.sums"]["data_offsets"][0] :]
    file.write_bytes(data)
    shards = json.loads((folder / manifest.NAME).read_text())["shards"]
    shards[1]["digest"] = f"{sums.checksum(table):016x}"
    edit(folder, shards=shards)
    found, wrong = files.sources(Folder(tmp_path), 10)
    assert found.keys() == {0}
    assert [line.split(": ")[0] for line in wrong] == [str(file)]


# --- a state from storage alone ------------------------------------------------------------------


def test_a_program_that_is_no_job_loads_what_was_committed_last(tmp_path: Path) -> None:
    for step, sequence in ((10, 1), (30, 2), (20, 3)):
        commit(tmp_path, step, sequence=sequence)
    state = {"w": torch.zeros(6)}
    assert stored.load(tmp_path, state) == 20
    assert state["w"].tolist() == [0, 0, 0, 1, 1, 1]
    assert stored.load(tmp_path, state, step=30) == 30
    assert stored.load(tmp_path, state, step=40) == stored.load(tmp_path / "none", state) == 0


def test_what_storage_alone_has_not_whole_is_said(tmp_path: Path) -> None:
    folder = commit(tmp_path, 10)
    with pytest.raises(CheckpointError, match="has no v"):
        stored.load(tmp_path, {"v": torch.zeros(6)})
    (folder / name(1)).unlink()
    with pytest.raises(CheckpointError, match="has no w"):
        stored.load(tmp_path, {"w": torch.zeros(6)})


LOADS = """
import sys
from pathlib import Path
import torch
from elastic.checkpoint import stored

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) << 10

w = torch.zeros(int(sys.argv[2]), 2)[:, 0]  # no chunk goes straight into it
w.fill_(7)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
assert stored.load(sys.argv[1], {"w": w}) == 10
print(resident("VmHWM") - before)
assert w[:: 17 << 20].tolist() == [0, 0, 1, 1]
"""


def test_a_load_takes_little_memory_beside_its_tensors(tmp_path: Path) -> None:
    """272 MiB of two files: a rank's peak is what it loads and 256 MB."""
    half = 34 << 20
    shards.commit(Folder(tmp_path), 10, numbers=half)
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path), str(2 * half)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256_000_000 < 8 * half


# --- the step to be loaded -----------------------------------------------------------------------


def spoiled_table(folder: Path) -> None:
    data = bytearray((folder / name(1)).read_bytes())
    data[-1] ^= 1
    (folder / name(1)).write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "file", "what"),
    [
        (lambda folder: (folder / name(1)).unlink(), name(1), "No such file or directory"),
        (lambda folder: os.truncate(folder / name(1), 5000), name(1), "it has 5000 bytes"),
        (spoiled_table, name(1), "its table of checksums is not the one"),
        (swap, name(0), "its table of checksums is not the one"),
        (lambda folder: (folder / manifest.NAME).write_text("{"), manifest.NAME, "damaged"),
        (lambda folder: edit(folder, version="2.0"), manifest.NAME, "version"),
    ],
    ids=["missing", "truncated", "table", "swapped", "manifest", "version"],
)
def test_a_step_that_is_not_whole_is_named_and_the_one_before_it_taken(
    tmp_path: Path, spoil: Callable[[Path], None], file: str, what: str
) -> None:
    here = Folder(tmp_path)
    for sequence, step in enumerate((10, 20, 30)):
        commit(tmp_path, step, sequence=sequence)
    folder = tmp_path / manifest.folder(30)
    spoil(folder)
    found, wrong = files.newest(here)
    assert found is not None
    assert found.step == 20
    assert wrong[0].startswith(f"{folder / file}: ")
    assert what in wrong[0]
    assert (files.older(here, 30), files.older(here, 10)) == (20, None)


def test_what_another_shard_has_is_no_reason_to_go_back(tmp_path: Path) -> None:
    here = Folder(tmp_path)
    shards.commit(here, 10, sequence=1, whole=True)
    known = shards.commit(here, 20, sequence=2, whole=True)
    missing = tmp_path / manifest.folder(20) / known.shards[0].file
    missing.unlink()
    found, wrong = files.newest(here)
    assert found == known
    assert wrong == [f"{missing}: No such file or directory"]


def test_where_no_step_is_whole_the_newest_is_tried(tmp_path: Path) -> None:
    """Each rank knows what it needs: its load says what is missing."""
    for sequence, step in enumerate((10, 20)):
        (commit(tmp_path, step, sequence=sequence) / name(0)).unlink()
    found, wrong = files.newest(Folder(tmp_path))
    assert found is not None
    assert found.step == 20
    assert len(wrong) == 2


def test_a_storage_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (commit(tmp_path, 10) / manifest.NAME).write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json: the manifest is damaged"):
        files.newest(Folder(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        files.newest(Folder(tmp_path / "file"))
    assert files.newest(Folder(tmp_path / "nothing")) == (None, [])

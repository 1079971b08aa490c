"""One storage is like another: a folder, memory as fsspec has it, an object store that speaks S3."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from elastic.checkpoint.load import files
from elastic.checkpoint.storage import protocol
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.folder import Folder
from elastic.checkpoint.storage.objects import Objects
from elastic.checkpoint.storage.protocol import Storage, canonical, words
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError
from tests.elastic.checkpoint.shards import commit

KINDS = ("folder", "file", "memory", "s3")


@pytest.fixture(params=KINDS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A checkpoint's name and its storage's options."""
    if request.param == "s3":
        options = request.getfixturevalue("s3")
        bucket = f"b{uuid.uuid4().hex}"
        fsspec.filesystem("s3", **json.loads(options)).mkdir(bucket)
        return f"s3://{bucket}/run", options
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run", "{}"
    prefix = "file://" if request.param == "file" else ""
    return canonical(f"{prefix}{tmp_path}/deep/run"), "{}"


@pytest.fixture
def here(where: tuple[str, str]) -> Storage:
    return connect(*where)


def pieces(data: bytes, size: int = 4096) -> Iterator[memoryview]:
    """With something beyond its end, as a slot has it."""
    data += bytes(-len(data) % size)
    for at in range(0, len(data), size):
        yield memoryview(data)[at : at + size]


def content(there: Storage, step: int, name: str) -> bytes:
    file = there.open(step, name)
    return bytes(file.read(0, file.size))


def test_what_is_written_is_listed_and_read(here: Storage, where: tuple[str, str]) -> None:
    assert here.listing() == {}
    data = os.urandom(10_000)
    here.write(7, "a", pieces(data), len(data))
    here.write(7, "empty", iter(()), 0)
    here.publish(12, "b", b"told")
    for there in (here, connect(*where)):
        assert there.listing() == {7: {"a", "empty"}, 12: {"b"}}
        file = there.open(7, "a")
        assert file.size == len(data)
        assert bytes(file.read(4090, 4100)) == data[4090:4100]
        assert bytes(file.read(5, 5)) == b""
        assert content(there, 7, "a") == data
        assert content(there, 7, "empty") == b""
        assert content(there, 12, "b") == b"told"


def test_what_has_been_written_is_known_by_its_size_and_its_end(here: Storage) -> None:
    data = os.urandom(10_000)
    end = memoryview(data)[-32:]
    assert not here.has(7, "a", len(data), end)
    here.write(7, "a", pieces(data), len(data))
    assert here.has(7, "a", len(data), end)
    assert not here.has(7, "b", len(data), end)
    assert not here.has(8, "a", len(data), end)
    assert not here.has(7, "a", len(data) + 1, end)
    assert not here.has(7, "a", len(data), memoryview(bytes(32)))
    here.write(7, "empty", iter(()), 0)
    assert here.has(7, "empty", 0, memoryview(b""))


def test_what_another_has_written_or_deleted_is_seen_at_once(where: tuple[str, str]) -> None:
    one, other = connect(*where), connect(*where)
    one.publish(1, "a", b"a")
    assert other.listing() == {1: {"a"}}
    one.publish(2, "b", b"bb")
    assert other.listing() == {1: {"a"}, 2: {"b"}}
    one.publish(2, "b", b"bbb", over=True)
    assert content(other, 2, "b") == b"bbb"
    one.delete(2, ["b", "never"])
    one.drop(2)
    one.delete(3, ["a"])
    one.drop(3)
    assert other.listing() == {1: {"a"}}
    with pytest.raises(FileNotFoundError):
        other.open(2, "b")


def test_a_folder_that_is_not_empty_stays(here: Storage) -> None:
    here.publish(1, "a", b"a")
    here.drop(1)
    assert here.listing() == {1: {"a"}}


def test_what_breaks_off_leaves_what_was_there(here: Storage) -> None:
    def broken() -> Iterator[memoryview]:
        yield from pieces(bytes(8192))
        raise OSError(errno.EIO, "the slot")

    here.publish(1, "other", b"x")
    here.write(1, "a", pieces(b"before"), 6)
    with pytest.raises(OSError, match="the slot"):
        here.write(1, "a", broken(), 20_000)
    if not here.url.startswith("memory"):  # of one process, which has no readers meanwhile
        assert content(here, 1, "a") == b"before"
    assert here.listing() == {1: {"a", "other"}}


@pytest.mark.parametrize("where", ["memory", "s3"], indirect=True)
def test_an_object_store_lets_one_writer_have_a_name(here: Storage) -> None:
    here.publish(1, manifest.NAME, b"first")
    with pytest.raises(FileExistsError):
        here.publish(1, manifest.NAME, b"second")
    assert content(here, 1, manifest.NAME) == b"first"


def test_a_checkpoint_is_found_and_read_wherever_it_is(here: Storage) -> None:
    for step, sequence in ((10, 2), (20, 1)):
        commit(here, step, sequence=sequence)
    found, wrong = files.newest(here)
    assert (found and found.step, wrong) == (10, [])
    sources, wrong = files.sources(here, 20)
    assert wrong == []
    for rank in (0, 1):
        tensor = sources[rank].piece("w")
        assert tensor is not None
        assert tensor.tolist() == [rank] * 3
        assert sources[rank].values(str) == {"w": "w"}


class Counted(Objects):
    """Counts the bytes that are read."""

    read = 0

    def open(self, step: int, name: str) -> protocol.File:
        file, outer = super().open(step, name), self

        class Counting:
            size = file.size

            def read(self, start: int, end: int) -> memoryview:
                outer.read += end - start
                return file.read(start, end)

        return Counting()


@pytest.mark.parametrize("where", ["memory"], indirect=True)
def test_of_an_object_only_header_and_table_are_read_until_a_tensor_is_needed(
    here: Storage,
) -> None:
    assert isinstance(here, Objects)
    commit(here, 10, numbers=4 << 20)
    counted = Counted(here.url, here._fs, here._root)
    sources, wrong = files.sources(counted, 10)
    assert wrong == []
    assert counted.read < 3 * files.FIRST, "of 32 MiB"
    assert sources[1].piece("w") is not None
    assert counted.read > 16 << 20


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/run/", "/data/run"),
        ("file:///data/run", "/data/run"),
        (Path("/data/run"), "/data/run"),
        ("run", os.path.join(os.getcwd(), "run")),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("memory://run", "memory://run"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket/run"),
        ("a:b//c", os.path.join(os.getcwd(), "a:b/c")),
    ],
)
def test_a_checkpoint_has_one_name(path: str | Path, name: str) -> None:
    assert canonical(path) == name
    assert canonical(name) == name


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("nosuch://bucket/run", "{}", "Protocol not known: nosuch"),
        ("gs://bucket/run", "{}", "install gcsfs"),
        ("/data/run", '{"key": "k"}', "storage_options are for URLs"),
    ],
)
def test_who_cannot_be_reached_is_said_in_a_line(url: str, options: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        connect(url, options)
    assert "\n" not in str(caught.value)
    assert url in str(caught.value)


def test_what_a_driver_raises_is_an_os_error(tmp_path: Path) -> None:
    nobody = connect(
        "s3://bucket/run", json.dumps({"key": "k", "secret": "s", "endpoint_url": "x"})
    )
    with pytest.raises(OSError, match="endpoint"):
        nobody.listing()


def test_options_are_in_no_words(where: tuple[str, str]) -> None:
    secret = "xyzzy"
    with pytest.raises((CheckpointError, OSError)) as caught:
        connect("s3://no/run", json.dumps({"key": "k", "secret": secret, "bad": 1})).listing()
    assert secret not in words(caught.value)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_says_where_it_ends(
    here: Storage,
) -> None:
    data = os.urandom(3 << 20)
    here.write(7, "a", pieces(data), len(data))
    file = here.open(7, "a")
    assert file.read(4090, 2 << 20) == data[4090 : 2 << 20]
    here.publish(7, "a", data[:5000], over=True)
    if isinstance(here, Folder):  # who has a file open keeps it, unless it is cut in place
        assert file.read(0, len(data)) == data
        here.write(7, "a", pieces(data), len(data))
        file = here.open(7, "a")
        os.truncate(Path(here.url, manifest.folder(7), "a"), 5000)
    assert file.read(0, 5000) == data[:5000]
    for start in (0, 4096):
        with pytest.raises(protocol.Damaged, match="it ends after 5000 bytes"):
            file.read(start, len(data))


def test_a_pipe_in_the_place_of_a_file_is_an_empty_one(tmp_path: Path) -> None:
    folder = tmp_path / manifest.folder(1)
    folder.mkdir()
    os.mkfifo(folder / manifest.NAME)
    assert Folder(tmp_path).open(1, manifest.NAME).size == 0  # nobody ever writes into it


def test_a_disk_that_fails_under_a_file_is_an_error_of_that_file(tmp_path: Path) -> None:
    """Memory that is not mapped is read as a failing disk is: EIO."""
    here = Folder(tmp_path)
    (tmp_path / manifest.folder(7)).mkdir()
    (tmp_path / manifest.folder(7) / "a").symlink_to("/proc/self/mem")
    with pytest.raises(protocol.Damaged) as found:
        here.open(7, "a").read(0, 4096)
    assert protocol.words(found.value) == "Input/output error: look at its disk"


# --- folders -------------------------------------------------------------------------------------


def test_a_write_that_cannot_be_direct_is_made_through_the_cache(tmp_path: Path) -> None:
    """The disk takes the file, opened for direct writes, and then no piece of such a size."""
    here = Folder(tmp_path)
    data = os.urandom(50_001)
    here.write(1, "a", pieces(data, 1003), len(data))
    assert content(here, 1, "a") == data
    here.write(
        1, "b", (memoryview(data)[at : at + 4097] for at in range(0, len(data), 4097)), 50_001
    )
    assert content(here, 1, "b") == data


def test_one_folder_that_may_not_be_read_hides_no_other() -> None:
    """Root may read all: another program looks, as nobody, where nobody may."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from elastic.checkpoint.storage import manifests\n"
        "from elastic.checkpoint.storage.folder import Folder\n"
        "os.setuid(65534); here = Folder(Path(sys.argv[1]))\n"
        "found, wrong = manifests.readable(here, here.listing())\n"
        "print([one.step for one in found], wrong)"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        here = Folder(folder)
        commit(here, 10, sequence=1)
        commit(here, 20, sequence=2)
        closed = folder / manifest.folder(20)
        closed.chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, check=False
        )
        closed.chmod(0o755)
    if "Operation not permitted" in done.stderr:
        pytest.skip("cannot be another user here")
    assert "[10]" in done.stdout, done.stderr
    assert f"{closed}/{manifest.NAME}: Permission denied" in done.stdout

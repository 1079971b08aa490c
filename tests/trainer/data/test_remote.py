import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import fsspec
import numpy as np
import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import DataFlags
from elastic.trainer.data import remote
from elastic.trainer.data.gpt_dataset import GPTDataset, datasets
from elastic.trainer.data.indexed import Indexed, write
from elastic.trainer.data.remote import local
from elastic.trainer.data.splits import Splits
from elastic.trainer.data.tokenizers import NullTokenizer
from elastic.trainer.watch import sources
from tests.full_disk import files_of_at_most


def store(folder: Path, first: int = 0) -> bytes:
    """FOLDER/data.{bin,idx}; what the .bin holds."""
    with write(folder / "data", np.dtype("<u2")) as writer:
        for number in range(40):
            writer.add_document([range(first + number, first + number + 9)])
    return (folder / "data.bin").read_bytes()


def put(fs: Any, folder: Path, prefix: str) -> None:
    for kind in remote.KINDS:
        fs.pipe_file(f"{prefix}.{kind}", (folder / f"data.{kind}").read_bytes())


@pytest.fixture(params=["memory", "file", "s3"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str, str]:
    """A file system, the URL of a dataset in it, and the driver's options."""
    options, place = "{}", uuid.uuid4().hex
    if request.param == "s3":
        options = request.getfixturevalue("s3")
        fsspec.filesystem("s3", **json.loads(options)).mkdir(place)
    elif request.param == "file":
        place = str(tmp_path / place)
        Path(place).mkdir()
    fs = fsspec.filesystem(request.param, **json.loads(options))
    (tmp_path / "made").mkdir()
    store(tmp_path / "made")
    url = f"{request.param}://{place}/data"
    put(fs, tmp_path / "made", url)
    return fs, url, options


def test_it_is_copied_once_and_again_when_it_changes(
    there: tuple[Any, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(remote, "PART", 100)
    fs, url, options = there
    prefix = local(url, tmp_path / "cache", options)
    assert Indexed(prefix).tokens(39).tolist() == list(range(39, 48))
    made = os.stat(f"{prefix}.bin").st_ino
    assert local(url, tmp_path / "cache", options) == prefix
    assert os.stat(f"{prefix}.bin").st_ino == made
    assert not caplog.records
    data = store(tmp_path / "made", first=100)
    put(fs, tmp_path / "made", url)
    with caplog.at_level(logging.WARNING):
        assert local(url, tmp_path / "cache", options) == prefix
    assert f"{url}.bin has changed since it was copied" in caplog.text
    assert Path(f"{prefix}.bin").read_bytes() == data


def memory(tmp_path: Path) -> tuple[Any, str]:
    fs, url = fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}/data"
    store(tmp_path)
    put(fs, tmp_path, url)
    return fs, url


def test_a_damaged_copy_and_one_without_a_note_are_made_again(tmp_path: Path) -> None:
    _, url = memory(tmp_path)
    prefix = local(url, tmp_path / "cache")
    note = Path(f"{prefix}.bin.json")
    copy, whole = Path(f"{prefix}.bin"), (tmp_path / "data.bin").read_bytes()
    for spoil in (
        lambda: copy.write_bytes(whole[:-1]),
        lambda: copy.write_bytes(whole[:-1] + b"\xff"),
        lambda: copy.rename(tmp_path / "away"),
        lambda: (copy.write_bytes(b"half"), note.rename(tmp_path / "note")),
        lambda: (copy.write_bytes(b"half"), note.write_text("{}")),
    ):
        spoil()
        assert local(url, tmp_path / "cache") == prefix
        assert copy.read_bytes() == whole
    os.utime(copy, ns=(0, 0))
    made = copy.stat().st_ino
    local(url, tmp_path / "cache")
    assert copy.stat().st_ino == made, "it was read through, and is what was copied"


def test_a_storage_that_is_gone_is_no_matter_while_there_are_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs, url = memory(tmp_path)
    prefix = local(url, tmp_path / "cache")
    fs.rm(f"{url}.bin")
    assert local(url, tmp_path / "cache") == prefix
    assert f"{url}.bin cannot be looked at, its copy on this node is used" in caplog.text
    with pytest.raises(UsageError, match=r"data, which is copied to .*other/\w+-data: "):
        local(url, tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").glob("*/*.bin")] == []


def test_what_changes_while_it_is_copied_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, url = memory(tmp_path)
    read = type(fs).cat_file

    def meanwhile(self: Any, path: str, **told: Any) -> Any:
        found = read(self, path, **told)
        if path.endswith(".bin"):
            fs.pipe_file(path, found + b"more")
        return found

    monkeypatch.setattr(type(fs), "cat_file", meanwhile)
    with pytest.raises(UsageError, match=r"data\.bin changed while it was copied"):
        local(url, tmp_path / "cache")
    monkeypatch.undo()
    prefix = local(url, tmp_path / "cache")
    assert Path(f"{prefix}.bin").stat().st_size == fs.size(f"{url}.bin")


def test_a_disk_that_takes_less_than_it_is_given_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is full for a moment."""
    _, url = memory(tmp_path)
    write_at = os.pwrite
    monkeypatch.setattr(remote, "PART", 100)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write_at(fd, data[:70], at))
    prefix = local(url, tmp_path / "cache")
    assert Path(f"{prefix}.bin").read_bytes() == (tmp_path / "data.bin").read_bytes()
    with files_of_at_most(200), pytest.raises(UsageError, match="File too large"):
        local(url, tmp_path / "other")


def test_a_copy_is_of_one_endpoint_whatever_the_keys_are(tmp_path: Path) -> None:
    _, url = memory(tmp_path)
    told = [
        {},
        {"endpoint_url": "http://a"},
        {"client_kwargs": {"endpoint_url": "http://b"}, "secret": "x"},
        {"client_kwargs": {"endpoint_url": "http://b"}, "secret": "y"},
    ]
    found = [local(url, tmp_path / "cache", json.dumps(one)) for one in told]
    assert len(set(found)) == 3
    assert found[2] == found[3]


class Served(BaseHTTPRequestHandler):
    """Files of a folder, in parts."""

    protocol_version = "HTTP/1.1"
    folder: Path
    headers_too: tuple[str, ...] = ()
    """Content-Length, Last-Modified: which it has."""

    def do_GET(self) -> None:
        path = self.folder / Path(self.path).name
        if not path.exists():
            self.send_error(404)
            return
        first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        part = path.read_bytes()[int(first) : int(last) + 1 if last else None]
        self.send_response(206 if "Range" in self.headers else 200)
        values = {
            "Content-Length": str(len(part)),
            "Last-Modified": self.date_time_string(path.stat().st_mtime),
        }
        for name in self.headers_too:
            self.send_header(name, values[name])
        if "Content-Length" not in self.headers_too:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[type[Served], str]]:
    """How it is served, and the URL of `tmp_path`/data."""

    class Own(Served):
        folder = tmp_path
        headers_too = ("Content-Length", "Last-Modified")

    store(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield Own, f"http://127.0.0.1:{server.server_port}/data"
        server.shutdown()
        thread.join()


def test_without_an_etag_its_time_tells_that_it_has_changed(
    served: tuple[type[Served], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how, url = served
    prefix = local(url, tmp_path / "cache")
    data = store(tmp_path, first=100)
    os.utime(tmp_path / "data.bin", (2e9, 2e9))
    local(url, tmp_path / "cache")
    assert Path(f"{prefix}.bin").read_bytes() == data
    assert f"{url}.bin has no ETag" not in caplog.text
    how.headers_too = ("Content-Length",)
    local(url, tmp_path / "other")
    assert f"{url}.bin has no ETag and no time: only another size tells" in caplog.text


def test_a_server_that_does_not_say_how_long_a_file_is_is_told(
    served: tuple[type[Served], str], tmp_path: Path
) -> None:
    how, url = served
    how.headers_too = ()
    with pytest.raises(UsageError, match=r"data\.idx does not say how long it is: a server has to"):
        local(url, tmp_path / "cache")


def test_a_url_that_is_not_there_or_does_not_answer_is_told(
    served: tuple[type[Served], str], tmp_path: Path
) -> None:
    _, url = served
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        refuses = f"http://127.0.0.1:{free.getsockname()[1]}/data"
        for one in (f"{url}2", refuses, "memory://nowhere/data"):
            with pytest.raises(UsageError, match=r"\.idx is not there, or cannot be reached$"):
                local(one, tmp_path / "cache")


def test_of_many_that_ask_at_once_one_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, since the lock is of the open file: for it they are as processes are."""
    fs, url = memory(tmp_path)
    asked: list[str] = []
    read = type(fs).cat_file

    def counted(self: Any, path: str, **told: Any) -> Any:
        asked.append(path)
        return read(self, path, **told)

    monkeypatch.setattr(type(fs), "cat_file", counted)
    barrier = Barrier(4)

    def ask(_: int) -> str:
        barrier.wait()
        return local(url, tmp_path / "cache")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    assert len(asked) == 2, asked


def test_what_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    assert local("some/prefix", None) == "some/prefix"
    with pytest.raises(UsageError, match=r"memory://a/b is copied .* --object-storage-cache-path"):
        local("memory://a/b", None)
    with pytest.raises(UsageError, match=r"nothing://a/b, which is copied to .*Protocol not known"):
        local("nothing://a/b", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        local("memory://a/b", tmp_path / "file")


def test_a_run_trains_on_a_url(tmp_path: Path) -> None:
    fs, url = memory(tmp_path)
    url = url.replace("/data", "/wiki")
    put(fs, tmp_path, url)
    counts = Splits(train=5, valid=0, test=0)
    flags: dict[str, Any] = {"seq_length": 4, "split": "1"}
    words = NullTokenizer(words=600)
    here = datasets(DataFlags(data_path=(str(tmp_path / "data"),), **flags), words, counts)[0]
    away = DataFlags(data_path=("1", url), object_storage_cache_path=tmp_path / "cache", **flags)
    found = datasets(away, words, counts)[0]
    assert found is not None
    assert here is not None
    assert np.array_equal(found[0]["tokens"], here[0]["tokens"])
    assert isinstance(found, GPTDataset)
    assert sources.names([one.name for one in found.sources]) == ["wiki"]
    assert list(tmp_path.glob("cache/*/cache/GPTDataset_indices/*-BlendedDataset-*.npy"))

"""Data at a URL, on this node's disk: `--data-path s3://bucket/wiki_text_document`, or whatever fsspec speaks.

Training maps files, so they are copied here once, by one process of the node; the others wait for it. A copy
counts once a note beside it says what was copied (size, checksum, and what the storage says of the
original), which is written last. Later runs compare all of that: what has changed there, or been damaged
here, is copied again.
"""

import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from elastic.checkpoint.storage.folder import put
from elastic.checkpoint.storage.objects import driver
from elastic.checkpoint.storage.protocol import URL, words
from elastic.proto.errors import UsageError
from elastic.trainer.files import exclusive, remove_drafts, replace_atomically

KINDS = ("idx", "bin")
PART = 16 << 20
"""Bytes that are asked for at a time."""
AT_ONCE = 8
"""Parts that are under way at once."""
ENDPOINT = ("endpoint_url", "account_name", "account_host", "host", "port")
"""Options of drivers, or of S3's client, that choose whose storage a URL is of."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """A file as its storage tells of it."""

    size: int
    version: str
    """Another once the file is another: of its ETag, or time, or whatever that storage has; empty where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What a copy is of. Beside it, as JSON."""

    size: int
    version: str
    """Of the original."""
    checksum: str
    """xxh3, 128 bits, of the copy."""
    modified: int
    """When the copy was last written, in ns: while that is so, it is not read through again."""


def is_url(prefix: str) -> bool:
    return URL.match(prefix) is not None


def local(prefix: str, cache: Path | None, options: str = "{}") -> str:
    """The prefix of the copies of PREFIX.idx and PREFIX.bin; of no URL, that prefix itself.

    cache: a folder on this node. options: JSON, for the storage's driver. UsageError, one sentence, where
    they cannot be had. A storage that does not answer is no mistake while there are copies.
    """
    if not is_url(prefix):
        return prefix
    if cache is None:
        raise UsageError(
            f"{prefix} is copied to this node: say where to, --object-storage-cache-path DIR"
        )
    folder = cache / f"{_place(prefix, options)}-{prefix.rstrip('/').rpartition('/')[2]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / ".lock"):
            for kind in KINDS:
                _ensure(f"{prefix}.{kind}", folder / f"data.{kind}", options)
    except OSError as error:
        raise UsageError(f"{prefix}, which is copied to {folder}: {words(error)}") from error
    return str(folder / "data")


def _place(prefix: str, options: str) -> str:
    """A digest of where the data are: keys and tokens, which are no part of that, may be others tomorrow."""
    given = json.loads(options)
    told = [one for one in (given, given.get("client_kwargs")) if isinstance(one, dict)]
    chosen = [f" {name}={one[name]}" for one in told for name in ENDPOINT if name in one]
    whole = "".join([prefix, *chosen])
    return hashlib.md5(whole.encode(), usedforsecurity=False).hexdigest()[:12]


def _ensure(url: str, copy: Path, options: str) -> None:
    """Make `copy` what is at `url`, unless it is."""
    note = _sound(copy)
    try:
        fs, path = _connect(url, options)
        original = _look(fs, path)
    except OSError as error:
        if note is None:
            raise
        log.warning("%s cannot be looked at, its copy on this node is used: %s", url, words(error))
        return
    if note is not None and (note.size, note.version) == (original.size, original.version):
        return
    if note is not None:
        log.warning("%s has changed since it was copied to this node: it is copied again", url)
    if not original.version:
        log.warning("%s has no ETag and no time: only another size tells that it has changed", url)
    _copy(fs, path, original, copy)


def _connect(url: str, options: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # takes its time, and most data are files

    with driver():
        fs, path = url_to_fs(url, **json.loads(options))
    return fs, path


def _look(fs: Any, path: str) -> Original:
    with driver():
        fs.invalidate_cache()
        try:
            told = fs.info(path)
        except FileNotFoundError as error:  # whose only word is the path, whatever the reason
            said = f"{path} is not there, or cannot be reached"
            raise FileNotFoundError(errno.ENOENT, said) from error
        if told["type"] != "file":
            raise FileNotFoundError(f"{path} is no file")
        if told["size"] is None:
            raise OSError(f"{path} does not say how long it is: a server has to, by Content-Length")
        version = _version(fs, path, told)
    return Original(size=int(told["size"]), version=version)


def _version(fs: Any, path: str, told: Mapping[str, Any]) -> str:
    """Its ETag where there is one: some times are those of the question."""
    for name in ("ETag", "etag", "Last-Modified"):
        if found := told.get(name):
            return str(found)
    return "" if "http" in fs.protocol else str(fs.ukey(path))  # HTTP's is of the URL alone


def _copy(fs: Any, path: str, original: Original, copy: Path) -> None:
    """Copy it, whole or not at all. OSError also where it changes meanwhile."""
    remove_drafts(copy)
    free = shutil.disk_usage(copy.parent).free
    if free < original.size:
        raise OSError(f"{path} has {original.size} bytes, and there is room for {free}")
    _note_of(copy).unlink(missing_ok=True)
    with replace_atomically(copy) as draft:
        with draft.open("r+b") as file, ThreadPoolExecutor(AT_ONCE) as pool:

            def part(start: int) -> None:
                end = min(start + PART, original.size)
                with driver():
                    data = fs.cat_file(path, start=start, end=end)
                if len(data) != end - start:
                    raise OSError(f"{path} ended after {start + len(data)} bytes")
                put(file.fileno(), memoryview(data), start)

            for _ in pool.map(part, range(0, original.size, PART)):
                pass
        if _look(fs, path) != original:
            raise OSError(f"{path} changed while it was copied: start again when it is whole")
        checksum = _checksum(draft)
    note = Note(**asdict(original), checksum=checksum, modified=copy.stat().st_mtime_ns)
    with replace_atomically(_note_of(copy)) as draft:
        draft.write_text(json.dumps(asdict(note)))


def _sound(copy: Path) -> Note | None:
    """What a copy is of; None where there is none, or it is not what was copied."""
    try:
        note = Note(**json.loads(_note_of(copy).read_text()))
        found = copy.stat()
        if found.st_size != note.size:
            return None
        if found.st_mtime_ns != note.modified and _checksum(copy) != note.checksum:
            return None
    except (OSError, ValueError, TypeError):
        return None
    return note


def _note_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.json")


def _checksum(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(PART):
            found.update(part)
    return found.hexdigest()

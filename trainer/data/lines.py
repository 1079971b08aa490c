"""Loose JSON, read as blocks of whole lines: plain, gzip or bzip2, one file or a tree of them."""

import bz2
import codecs
import glob
import gzip
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from elastic.proto.errors import UsageError

BLOCK = 1 << 20
"""Bytes of a block, about: a hundred milliseconds of work."""
STDIN = Path("/dev/stdin")
OTHER_ENCODINGS: Mapping[bytes, str] = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16", b"{\0": "UTF-16", b"\0{": "UTF-16",
}  # fmt: skip
"""By how a file begins; the first that fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some lines of one file."""

    path: Path
    first: int
    """Number of the first line, from 1."""
    text: bytes
    """The lines, each with its end, but for a file's last."""
    read: int
    """Bytes that lie on the disk for it, all files' to be compared with `size`."""


def files(given: Sequence[str]) -> list[Path]:
    """What `--input` means: files, patterns such as `wiki/*/wiki_*`, and folders with all that is in them.

    `-` is standard input. A folder's files come by name, hidden ones are left out (WikiExtractor's have no suffix).
    UsageError for what is not there.
    """
    found: list[Path] = []
    for one in given:
        path = STDIN if one == "-" else Path(one)
        if path.is_dir():
            inner = sorted(p for p in path.rglob("*") if p.is_file())
            own = [
                p for p in inner if not any(q.startswith(".") for q in p.relative_to(path).parts)
            ]
        else:
            own = [path] if path.exists() else sorted(map(Path, glob.glob(one, recursive=True)))
        if not own:
            raise UsageError(f"--input {one}: there is no such file, or no file in it")
        found += own
    return found


def size(paths: Sequence[Path]) -> int:
    """Bytes that all of them take on the disk."""
    return sum(path.stat().st_size for path in paths)


def blocks(paths: Sequence[Path], length: int | None = None) -> Generator[Block, None, None]:
    """All lines of all files, in order, cut into blocks of about `length` bytes (`BLOCK`).

    Where the cuts are depends on the files alone. UsageError for a file that cannot be read.
    """
    for path in paths:
        try:
            with path.open("rb") as raw, _decompressed(raw) as file:
                yield from _of_one(path, raw, file, length or BLOCK)
        except (OSError, EOFError, zlib.error) as error:  # damaged gzip and bzip2 are these
            words = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot read {path}: {words}") from error


def _of_one(path: Path, raw: IO[bytes], file: IO[bytes], length: int) -> Iterator[Block]:
    first, seen = 1, 0
    while True:
        text = file.read(length)
        if not text:
            return
        text += file.readline()
        if first == 1:
            _check_encoding(path, text)
        now = raw.tell() if raw.seekable() else seen + len(text)  # or a pipe
        yield Block(path=path, first=first, text=text, read=now - seen)
        first, seen = first + text.count(b"\n"), now


def _check_encoding(path: Path, text: bytes) -> None:
    for start, name in OTHER_ENCODINGS.items():
        if text.startswith(start):
            raise UsageError(f"{path} is {name}: make it UTF-8 (iconv -f {name} -t UTF-8)")


def _decompressed(raw: BufferedReader) -> Any:
    """A file as what it holds, by its first bytes: suffixes lie."""
    start = raw.peek(3)
    if start[:2] == b"\x1f\x8b":
        return gzip.open(raw)
    return bz2.open(raw) if start[:3] == b"BZh" else raw

"""A checkpoint's storage that is whatever fsspec speaks."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic.checkpoint.storage.protocol import LOOKS, Damaged, File, ends
from elastic.proto import manifest
from elastic.proto.errors import ElasticError

PART = 64 << 20
"""Bytes of one part of an object."""


@dataclass(frozen=True, slots=True)
class _Object:
    fs: Any
    path: str
    size: int

    def read(self, start: int, end: int) -> memoryview:
        if start >= end:
            return memoryview(b"")
        with driver():
            data = self.fs.cat_file(self.path, start=start, end=end)
        if len(data) != end - start:
            raise Damaged(f"it ends after {start + len(data)} bytes")
        return memoryview(bytearray(data))  # torch takes what may be written to


class Objects:
    """What fsspec speaks. An object is there, whole, or not: nothing is renamed, which would be a copy.
    Listings are made anew each time."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.url = url
        self._fs = fs
        self._root = root

    def _path(self, step: int, name: str = "") -> str:
        return "/".join(filter(None, (self._root, manifest.folder(step), name)))

    def listing(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        with driver(), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            for path in self._fs.find(self._root):
                folder, _, name = path[len(self._root) :].strip("/").partition("/")
                step = manifest.step_of(folder)
                if step is not None and name and "/" not in name:
                    found.setdefault(step, set()).add(name)
        return found

    def open(self, step: int, name: str) -> File:
        path = self._path(step, name)
        with driver():
            self._fs.invalidate_cache()
            return _Object(self._fs, path, int(self._fs.info(path)["size"]))

    def has(self, step: int, name: str, size: int, end: memoryview) -> bool:
        return ends(self, step, name, size, end)

    def write(self, step: int, name: str, pieces: Iterable[memoryview], size: int) -> None:
        with driver():
            file = self._create(self._path(step, name))
            try:
                for piece in pieces:
                    file.write(piece[: size - file.tell()])
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                    file.closed = True  # or its end would make an object of what is there
                raise

    def _create(self, path: str) -> Any:
        try:
            return self._fs.open(path, "wb", block_size=PART)
        except FileNotFoundError:  # no object store, but something that has folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(path, "wb", block_size=PART)

    def publish(self, step: int, name: str, data: bytes, *, over: bool = False) -> None:
        with driver():
            self._fs.pipe_file(self._path(step, name), data, mode="overwrite" if over else "create")

    def delete(self, step: int, names: Iterable[str]) -> None:
        def remove(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

        with driver(), ThreadPoolExecutor(LOOKS) as pool:
            deque(pool.map(remove, [self._path(step, name) for name in names]), maxlen=0)

    def drop(self, step: int) -> None:
        """There are folders only in what fsspec speaks that is none of objects."""
        with contextlib.suppress(Exception):
            self._fs.rmdir(self._path(step))


@contextlib.contextmanager
def driver() -> Iterator[None]:
    """A driver's own errors, and those of what it is made of, as OSError."""
    try:
        yield
    except (OSError, ElasticError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error

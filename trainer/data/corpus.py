"""A corpus that every machine has: the source of Python's own standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from elastic.proto.errors import UsageError

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "encodings",  # tables of characters, not code
        "idle_test",
        "pydoc_data",  # the manual, as one string
        "site-packages",  # not the standard library
        "test",
        "tests",
    }
)


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The standard library's modules, in an order that only their names decide.

    Raises UsageError where Python was installed without its source.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in relative if SKIPPED_FOLDERS.isdisjoint(path.parts)]
    if not kept:
        raise UsageError(f"{root} holds no Python source to train on")
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def documents(max_bytes: int, root: Path | None = None) -> Iterator[str]:
    """The text of whole files, one after the other, at most `max_bytes` UTF-8 bytes in all.

    A file that is not UTF-8 is left out, and so is one that would pass the bound, together with
    all after it. The first file is always given, so the corpus is never empty.
    """
    used = 0
    for path in stdlib_files(root):
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not raw:
            continue
        if used and used + len(raw) > max_bytes:
            return
        used += len(raw)
        yield text

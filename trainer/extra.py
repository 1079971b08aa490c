"""Imports of what only `pip install 'elastic-runtime[train]'` brings."""

from collections.abc import Iterator
from contextlib import contextmanager

from elastic.proto.errors import UsageError


@contextmanager
def extra() -> Iterator[None]:
    """Around such an import: UsageError, with what to do, where it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install 'elastic-runtime[train]'"
        ) from error

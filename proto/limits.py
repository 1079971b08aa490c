"""Bounds that both ends know, and one that the shell sets."""

import contextlib
import resource

MOST_SLOTS = 4096
"""Of a node; its report of as many failures is one request."""

LONGEST_NAME = 256
"""Characters of a node's name."""

MAX_REQUEST, MAX_ANSWER = 4 << 20, 16 << 20
"""Bytes; what the master hears, and what it says: the status of 10,000 nodes is 4 MiB and more."""


def lift_open_files() -> None:
    """Let this process, and those that it starts, open as many files as it ever may."""
    limit_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def limit_open_files(count: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # fs.nr_open may have become less since
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))

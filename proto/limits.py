"""Bounds that both ends know, and one that the shell sets."""

import resource

MOST_SLOTS = 4096
"""Of a node; its report of as many failures is one request."""

MAX_REQUEST, MAX_ANSWER = 4 << 20, 16 << 20
"""Bytes; what the master hears, and what it says: the status of 10,000 nodes is 4 MiB and more."""


def lift_open_files() -> None:
    """Let this process, and those that it starts, open as many files as it ever may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

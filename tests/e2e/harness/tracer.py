"""A process that has been killed and cannot be reaped yet, as where a driver takes its time: one of its threads is traced,
and stays until its tracer has waited for it."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

import pytest

_SEIZE = 0x4206
_WALL = 0x40000000
"""Waits for threads, too."""


@contextlib.contextmanager
def holding(thread: int) -> Iterator[None]:
    """Hold that thread, which must not be the first of its process, until the end; its process is killed then, if it
    was not before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_SEIZE, thread, None, None) != 0:
        pytest.skip(f"no ptrace: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.kill(thread, signal.SIGKILL)
        os.waitpid(thread, _WALL)

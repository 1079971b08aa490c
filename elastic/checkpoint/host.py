"""Host memory without Python's lock, so that several threads get on with it: copies, pages, their number."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

MOST_THREADS = 8
"""Of a rank, for one copy: more do not make memory faster."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise; the mmap module names them from 3.14 on
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")
R = TypeVar("R")


def threads(ranks: int) -> int:
    """How many a rank may use for a copy, where so many ranks share this machine."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


def each(work: Callable[[T], R], items: Iterable[T], count: int) -> Iterator[R]:
    """`work` on each item, by so many threads; results in the items' order."""
    if count == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="elastic-copy") as pool:
        yield from pool.map(work, items)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Bytes from one contiguous tensor in host memory into another of the same size."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def populate(data: memoryview, *, write: bool) -> int:
    """Have the pages of a mapping there before they are touched one by one; the kernel's error, or 0."""
    if data.readonly or not data.nbytes:
        return 0
    address = address_of(data)
    start = address - address % mmap.PAGESIZE
    length = ctypes.c_size_t(address + data.nbytes - start)
    advice = _POPULATE_WRITE if write else _POPULATE_READ
    if _libc.madvise(ctypes.c_void_p(start), length, advice):
        return ctypes.get_errno()
    return 0


def address_of(data: memoryview) -> int:
    """Of memory that may be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))

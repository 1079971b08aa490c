"""Host memory without Python's lock, so that several threads get on with it: copies, pages, their number."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import torch

MOST_THREADS = 8
"""Of a rank, for one copy: more do not make memory faster."""
HUGE = 2 << 20
"""Bytes of a huge page."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise; the mmap module names them from 3.14 on
_COLLAPSE = 25
_FIXED, _NORESERVE = 0x10, 0x4000  # of mmap; the module does not name the first at all
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_shared: weakref.WeakValueDictionary[tuple[int, int], memoryview] = weakref.WeakValueDictionary()
"""What is mapped, by device and inode."""
_mapping = Lock()

T = TypeVar("T")
R = TypeVar("R")


def threads(ranks: int) -> int:
    """How many a rank may use for a copy, where so many ranks share this machine."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


def each(
    work: Callable[[T], R],
    items: Iterable[T],
    count: int,
    enter: Callable[[], None] | None = None,
) -> list[R]:
    """`work` on each item, by so many threads, each of which takes the next once it is done with one;
    results in the items' order. Once one has failed the others take no more, and it is raised.

    enter: what each thread does first; without it, one thread is who calls.
    """
    todo = list(items)
    count = min(count, len(todo))
    if count <= 1 and enter is None:
        return list(map(work, todo))
    results: dict[int, R] = {}
    left, lock = iter(range(len(todo))), Lock()

    def thread() -> None:
        nonlocal left
        try:
            if enter is not None:
                enter()
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                results[number] = work(todo[number])
        except BaseException:
            with lock:
                left = iter(())
            raise

    with ThreadPoolExecutor(max(1, count), thread_name_prefix="elastic-copy") as pool:
        futures: list[Future[None]] = []
        try:
            for _ in range(count):
                futures.append(pool.submit(thread))
        except RuntimeError:  # a script that ends starts no threads any more, and waits for ours
            thread()
        for future in futures:
            future.result()
    return [results[number] for number in range(len(todo))]


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Bytes from one contiguous tensor in host memory into another of the same size."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def shared(fd: int) -> memoryview:
    """All of a memfd, for writing: the same mapping as long as somebody holds it, and one that huge
    pages fit, which needs no setting of the machine. Raises OSError."""
    status = os.fstat(fd)
    with _mapping:
        found = _shared.get((status.st_dev, status.st_ino))
        if found is None:
            found = _map(fd, status.st_size)
            _shared[status.st_dev, status.st_ino] = found
        return found


def _map(fd: int, size: int) -> memoryview:
    """In the place of memory that was taken at an address of our choice, and goes with it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    place = memoryview(mmap.mmap(-1, size + HUGE, flags=flags))
    skip = -address_of(place) % HUGE
    at = ctypes.c_void_p(address_of(place) + skip)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    shared_there = mmap.MAP_SHARED | _FIXED
    if (
        _libc.mmap(at, ctypes.c_size_t(size), protection, shared_there, fd, ctypes.c_long(0))
        != at.value
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return place[skip : skip + size]


def populate(data: memoryview, *, write: bool, huge: bool = False) -> int:
    """Have the pages of a mapping there before they are touched one by one; the kernel's error, or 0.

    huge: in huge pages, where they can be had. They are registered with a device much faster; to copy to
    them is no faster, and on a machine that has been up for a while they take three times as long to get.
    """
    if data.readonly or not data.nbytes:
        return 0
    address = address_of(data)
    start, end = address - address % mmap.PAGESIZE, address + data.nbytes
    if huge:
        _collapse(-(-start // HUGE) * HUGE, end // HUGE * HUGE)
    return _advise(start, end - start, _POPULATE_WRITE if write else _POPULATE_READ)


def _collapse(start: int, end: int) -> None:
    """Make each huge page of one that is there. An error means small ones."""
    for at in range(start, end, HUGE):
        if _advise(at, mmap.PAGESIZE, _POPULATE_WRITE):
            return
    if start < end:
        _advise(start, end - start, _COLLAPSE)


def _advise(start: int, length: int, advice: int) -> int:
    """The error, or 0."""
    failed = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
    return ctypes.get_errno() if failed else 0


def address_of(data: memoryview) -> int:
    """Of memory that may be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))

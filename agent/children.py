"""Processes that are ours by birth or by adoption: how they end, and what they leave behind."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from elastic.agent import tasks

STRAYS_EVERY = 5.0
"""Seconds between looks for strays."""
CLEANING = 6.0
"""Seconds that those who unlink shared memory get at the end. Python's needs none, torch's 3."""

_SHARED = Path("/dev/shm")
_UNLINKS = re.compile(rb"resource_tracker import main|torch_shm_manager")
"""Helpers of multiprocessing's and torch's. When the last process that they serve is gone they unlink
the shared memory that it left, and end; SIGKILL would leave it for ever."""


def watch(pid: int) -> "asyncio.Future[int]":
    """The exit code of our child `pid`, negative for a signal, once it has ended and was reaped."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:  # reaped by somebody else, which nobody does
        ended.set_result(-signal.SIGKILL)
        return ended

    def reap() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        try:
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            forget(pid, status)
        except ChildProcessError:
            code = -signal.SIGKILL
        if not ended.done():
            ended.set_result(code)

    loop.add_reader(pidfd, reap)
    return ended


def ending(pid: int) -> int | None:
    """The exit code of our child, as `watch` has it, where it has failed and no thread of it will run again, though it
    cannot be reaped before the kernel has taken apart all that it had: a GPU's driver may need a second for that. None
    where it runs, ends with 0, or nobody can tell."""
    threads = [one for one in tasks.threads(pid).values() if one != tasks.GONE]
    if not threads or not all(one.exiting for one in threads):
        return None
    status = tasks.stat(pid).status
    failed = os.WIFSIGNALED(status) or os.WIFEXITED(status)
    return (os.waitstatus_to_exitcode(status) or None) if failed else None


async def stuck_at(pid: int) -> str:
    """Where a process that no signal ends sits in the kernel, as far as that is told within a second."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            return await asyncio.to_thread(tasks.in_kernel, pid)
    return "unknown"


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads; to it alone if it leads none yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def orphans(known: Collection[int], *, unlinkers: bool = True) -> list[int]:
    """Our direct children that are not among `known`: what ranks left behind. unlinkers: those too
    who only unlink shared memory before they end by themselves."""
    found = [pid for pid in _children(os.getpid()) if pid not in known]
    return found if unlinkers else [pid for pid in found if not _unlinks(pid)]


async def sweep(
    known: Callable[[], Collection[int]],
    patience: float,
    settled: Callable[[], Awaitable[None]] | None = None,
) -> list[int]:
    """End and reap all orphans with all that descends from them; returns what would not end.

    `known` is asked before each look, since what is ours may change meanwhile; `settled` waits until
    no start is under way, for a process that was just adopted looks like an orphan. Without it this
    is the last sweep. Those who unlink shared memory end by themselves; only the last one waits.
    """
    loop = asyncio.get_running_loop()
    cleaned, deadline = loop.time() + CLEANING, loop.time() + patience
    last = settled is None
    while True:
        if settled is not None:
            await settled()
        found = orphans(known(), unlinkers=last)
        if not found:
            return []
        thorough = last and loop.time() >= cleaned
        for pid in found:
            kill_tree(pid, thorough=thorough)
        left = [pid for pid in found if not reap(pid)]
        if left:
            now = loop.time()
            if now > deadline:
                return left
            await _ended(left[0], (cleaned if last and not thorough else deadline) - now)


async def reap_strays(
    known: Callable[[], Collection[int]], settled: Callable[[], Awaitable[None]]
) -> None:
    """Reap, for ever, what ranks left behind and has ended: to orphans a subreaper is init."""
    while True:
        await asyncio.sleep(STRAYS_EVERY)
        await settled()
        for pid in orphans(known()):
            reap(pid)


def kill_tree(pid: int, *, thorough: bool = False) -> None:
    """SIGKILL for a process and all that descends from it; thorough: also for who unlinks shared memory."""
    for descendant in tree(pid):
        if thorough or not _unlinks(descendant):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)


def _unlinks(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _UNLINKS.search(Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    return False


async def _ended(pid: int, timeout: float) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def reap(pid: int) -> bool:
    """Whether a child of ours has ended; it is gone then."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    if done:
        forget(pid, status)
    return done == pid


def forget(pid: int, status: int) -> None:
    """Unlink what one that was killed had no time to: for each tensor that it shares torch makes a file with its
    maker's pid in the name, which by default it unlinks as soon as it is mapped."""
    if os.WIFSIGNALED(status):
        for file in _SHARED.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):
                file.unlink()


def tree(pid: int) -> list[int]:
    """`pid` and its descendants, parents first."""
    found = [pid]
    for parent in found:
        found.extend(_children(parent))
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found.extend(int(child) for child in (task / "children").read_text().split())
    return found

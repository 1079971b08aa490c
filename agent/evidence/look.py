"""One look at all ranks of a node: what the kernel tells, then their stacks, whatever state they are in."""

import asyncio
import contextlib
import os
import statistics
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from elastic.agent.evidence import dump, proc, spy, tcp
from elastic.agent.evidence.dump import Target
from elastic.agent.tasks import GONE, io_bytes, run_delay, stat, switches
from elastic.proto import looks
from elastic.proto.looks import ENDED, STOPPED, Child, Look, Thread

T = TypeVar("T")

_READING = 0.6
"""Of the time that there is, what reading stacks from outside may take; ranks may be asked for them then."""
_CLOSE_CHILDREN = 8
"""Children of a rank that are looked at closely."""
_COUNTING = 0.5
"""Seconds that a look waits for what sockets moved."""
_ASLEEP = ("S", "D")
_MOMENTS = 3
"""At which a rank that runs is seen in one look, at most."""
_ATTEMPTS = 3
"""A process that runs meanwhile may show py-spy half a stack."""


class Looker:
    """Takes looks; one an agent."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        """Processes of ours, which we reap."""
        self._asleep: dict[int, tuple[int, tuple[Thread, ...]]] = {}
        """By process that slept: how often it had been taken off the processor, and its stacks."""
        self._tcp = tcp.Counter()
        self._counting: asyncio.Future[dict[int, tcp.Moved]] | None = None
        """The last count."""
        self._moved: dict[int, tcp.Moved] = {}
        """What the last count told, by process."""
        self._slots = asyncio.Semaphore(len(os.sched_getaffinity(0)) + 1)

    async def look(
        self,
        ranks: Mapping[int, int],
        *,
        deadline: float,
        native: Collection[int] = (),
    ) -> tuple[Look, ...]:
        """One look at each of `ranks` (rank to pid), in their order; done at `deadline` (the loop's time).

        native: ranks to look at closely: with their libraries' calls, for which they are stopped for
        some tenths of a second, and with their children's stacks.
        """
        self._asleep = {pid: self._asleep[pid] for pid in ranks.values() if pid in self._asleep}
        looking = (self._look(rank, pid, rank in native, deadline) for rank, pid in ranks.items())
        _, found = await asyncio.gather(
            self._count(tuple(ranks.values()), deadline), asyncio.gather(*looking)
        )
        if self._counting is not None and self._counting.done():
            self._moved = self._counting.result()
        return tuple(_with_tcp(one, self._moved.get(one.pid, tcp.Moved())) for one in found)

    async def _count(self, pids: tuple[int, ...], deadline: float) -> None:
        """What their sockets move. One count that hangs is enough; what it tells too late counts at the next look."""
        if self._counting is None or self._counting.done():
            self._counting = _in_thread(partial(self._tcp.count, pids))
        left = deadline - asyncio.get_running_loop().time()
        await asyncio.wait((self._counting,), timeout=min(_COUNTING, left))

    async def _look(self, rank: int, pid: int, close: bool, deadline: float) -> Look:
        loop = asyncio.get_running_loop()
        first = stat(pid)
        found = Look(
            rank=rank, pid=pid, at=loop.time(), state=first.state, cpu_seconds=first.cpu_seconds
        )
        if first.state in ENDED:
            return replace(found, problem="it has ended")
        try:
            async with asyncio.timeout_at(deadline):
                process = await _in_thread(partial(proc.read, pid))
        except TimeoutError:
            return replace(found, problem="the kernel does not tell of it")
        found = _with_process(found, process)
        found = await self._with_stacks(found, deadline)
        if close:
            found = await self._closely(found, deadline)
        return _with_states(found, process)

    async def _with_stacks(self, found: Look, deadline: float) -> Look:
        pid, count = found.pid, switches(found.pid)
        before, threads = self._asleep.pop(pid, (0, ()))
        if count and count == before and found.state in _ASLEEP:  # it has not run since
            found = replace(found, how="py-spy", threads=threads)
        else:
            now = asyncio.get_running_loop().time()
            try:
                found = await self._read(found, now + _READING * (deadline - now))
            except spy.SpyFailed as error:
                return replace(found, problem=str(error))
        if stat(pid).state in _ASLEEP and switches(pid) == count and looks.tells_alone(found):
            self._asleep[pid] = count, found.threads
        return found

    async def _read(self, found: Look, deadline: float) -> Look:
        threads = await self._spy(found.pid, native=False, deadline=deadline)
        found = replace(found, how="py-spy", threads=threads)
        if found.state == "R" or any(thread.gil for thread in threads):
            with contextlib.suppress(spy.SpyFailed):
                return await self._as_mostly(found, deadline)
        return found

    async def _as_mostly(self, found: Look, deadline: float) -> Look:
        """At two of three moments: who calls a library again and again is between two calls now and then, and who does
        not waits for the GIL, and is without it, now and then."""
        moments = [found]
        while len(moments) < _MOMENTS and not (len(moments) == 2 and _alike(*moments)):
            state = stat(found.pid).state
            threads = await self._spy(found.pid, native=False, deadline=deadline)
            moments.append(replace(found, state=state, threads=threads))
        return mostly(moments)

    async def _closely(self, found: Look, deadline: float) -> Look:
        """With its libraries' calls, and with what its children do. Who is stopped or in D state
        cannot be stopped: the next to look at it would wait with it."""
        children = found.children
        if found.how == "py-spy":
            looked = children[:_CLOSE_CHILDREN]
            told = await asyncio.gather(*(self._child(child, deadline) for child in looked))
            children = (*told, *children[_CLOSE_CHILDREN:])
        found = replace(found, children=children)
        if found.how != "py-spy" or stat(found.pid).state not in ("R", "S"):
            return found
        try:
            threads = await self._spy(found.pid, native=True, deadline=deadline)
        except spy.SpyFailed as error:
            return replace(found, problem=str(error))
        return replace(found, threads=threads, native=True)

    async def _child(self, child: Child, deadline: float) -> Child:
        with contextlib.suppress(spy.SpyFailed):
            if child.state not in ENDED:
                threads = await self._spy(child.pid, native=False, deadline=deadline)
                frames = next((t.frames for t in threads if t.tid == child.pid), ())
                return replace(child, frames=looks.cut(frames, _CHILD_FRAMES))
        return child

    async def _spy(self, pid: int, *, native: bool, deadline: float) -> tuple[Thread, ...]:
        loop = asyncio.get_running_loop()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._slots.acquire()
            except TimeoutError as error:
                raise spy.SpyFailed("there was no time for it") from error
            try:
                return await spy.dump(pid, native=native, deadline=deadline, running=self.pids)
            except spy.SpyFailed:
                if attempt == _ATTEMPTS or loop.time() >= deadline or stat(pid).state in ENDED:
                    raise
            finally:
                self._slots.release()
        raise AssertionError("the last attempt returns or raises")


def mostly(moments: Sequence[Look]) -> Look:
    """The last of them that has the GIL, or has not, as most do, in the state of most."""
    gil = statistics.mode(map(_has_gil, moments))
    *_, last = (moment for moment in moments if _has_gil(moment) is gil)
    return replace(last, state=statistics.mode(moment.state for moment in moments))


async def ask(found: Look, target: Target, *, deadline: float) -> Look:
    """A look without stacks with those that the rank writes itself; only where `dump.ask` may be called, so the
    GIL is held."""
    if stat(found.pid).state in (*ENDED, *STOPPED):
        return found
    try:
        text = await dump.ask(found.pid, target, deadline=deadline)
    except dump.Unanswered as error:
        return replace(found, problem=f"{found.problem}; {error}")
    threads = dump.parse(text, found.pid)
    threads = tuple(
        replace(thread, gil=True) if thread.tid == found.pid else thread for thread in threads
    )
    problem = found.problem
    if not any(thread.tid == found.pid for thread in threads):
        problem = f"{problem}; it has too many threads to tell of its main one"
    return replace(found, how="faulthandler", threads=threads, problem=problem)


def _has_gil(found: Look) -> bool:
    """Its main thread does."""
    return any(thread.gil for thread in found.threads if thread.tid == found.pid)


def _alike(first: Look, second: Look) -> bool:
    return first.state == second.state and _has_gil(first) is _has_gil(second)


_CHILD_FRAMES = 40
"""Of one child's stack."""


def _with_process(found: Look, process: proc.Process) -> Look:
    main = process.tasks.get(found.pid, GONE)
    return replace(
        found,
        wchan=process.wchan,
        kernel_stack=process.kernel_stack,
        main_cpu_seconds=main.cpu_seconds,
        main_run_delay=run_delay(found.pid),
        io_bytes=io_bytes(found.pid),
        helpers_cpu_seconds=process.helpers_cpu_seconds,
        helpers_io_bytes=process.helpers_io_bytes,
        children=process.children,
    )


def _with_tcp(found: Look, moved: tcp.Moved) -> Look:
    return replace(
        found,
        io_bytes=found.io_bytes + moved.own,
        helpers_io_bytes=found.helpers_io_bytes + moved.helpers,
    )


def _with_states(found: Look, process: proc.Process) -> Look:
    """The kernel's word on each thread; those in D state are shown even if they run no Python."""
    shown = {thread.tid for thread in found.threads}
    threads = [
        replace(thread, state=process.tasks.get(thread.tid, GONE).state) for thread in found.threads
    ]
    for tid, task in process.tasks.items():
        if task.state == "D" and tid not in shown:
            threads.append(Thread(tid=tid, name=task.name, state="D", frames=()))
    return replace(found, threads=looks.fit(threads, found.pid))


def _in_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Call it in a thread of its own, which may hang there for ever and holds up no exit of ours."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T) -> None:
        if not future.done():
            future.set_result(value)

    def call() -> None:
        value = function()
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, value)

    threading.Thread(target=call, name="look", daemon=True).start()
    return future

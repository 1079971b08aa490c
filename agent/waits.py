"""Inside the user's process: how long its main thread waits for other ranks, summed up on its page.

What Python waits in is timed: `Work.wait`, and the broadcast of buffers that DDP's forward pass begins with. In a
backward pass C++ waits, DDP's reducer for its last buckets, and what that takes is the time in which the kernel did
not want to run the thread: on a CPU whatever it computes keeps it running or waiting for a core. A host of GPUs
waits for no collective; there it is the device whose waits are told (`device_times.py`).

Sends and receives are counted, by whom they are to and from: torch's flight recorder sees none of Gloo's.
"""

import functools
import os
import sys
import threading
import zlib
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from elastic.proto.page import STAGE, WAITED_NS, PageWriter

if TYPE_CHECKING:
    from elastic.proto.looks import Transfers

C10D = "torch._C._distributed_c10d"
MOST_PEERS = 64
"""Of whom it is told."""
ANYBODY = -1
_counts: dict[tuple[str, str, int], int] = {}
"""Calls, by process group, way and the other's number in the group."""
_counting = threading.Lock()


def follow(page: PageWriter) -> None:
    """Begin to time what waits; torch.distributed is imported."""
    clock = _Clock(page)
    library: Any = sys.modules[C10D]
    distributed: Any = sys.modules["torch.distributed"]
    autograd: Any = sys.modules["torch.autograd"]
    library.Work.wait = clock.timed(library.Work.wait)
    distributed._broadcast_coalesced = clock.timed(distributed._broadcast_coalesced)
    autograd._engine_run_backward = clock.asleep(autograd._engine_run_backward)
    for way, rank in (("send", "dstRank"), ("recv", "srcRank")):
        function = getattr(library.ProcessGroup, way)
        setattr(library.ProcessGroup, way, clock.noted(function, way, rank))
    anyones = library.ProcessGroup.recv_anysource
    library.ProcessGroup.recv_anysource = _counted(anyones)


class _Clock:
    """Of one thread, the main one; in others, and in a fork of us, what is wrapped is called and nothing else."""

    def __init__(self, page: PageWriter) -> None:
        self._words = page.words
        self._pid = page.pid
        self._main = threading.main_thread().ident
        self._stage = set[tuple[str, int]]()
        self._schedstat = f"/proc/{page.pid}/task/{page.pid}/schedstat"

    def _counts(self) -> bool:
        return threading.get_ident() == self._main and os.getpid() == self._pid

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """All that `function` takes is waiting. What it returns has a name by which a stack is known to wait
        (master/activity.py)."""

        @functools.wraps(function)
        def wait_for_others(*args: Any, **kwargs: Any) -> Any:
            if not self._counts():
                return function(*args, **kwargs)
            before, began = self._words[WAITED_NS], monotonic_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._words[WAITED_NS] = before + monotonic_ns() - began

        return wait_for_others

    def asleep(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The part of it is in which the thread neither runs nor waits for a core."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._counts() or _has_gpus():
                return function(*args, **kwargs)
            before, awake, began = self._words[WAITED_NS], self._awake_ns(), monotonic_ns()
            try:
                return function(*args, **kwargs)
            finally:
                now, later = monotonic_ns(), self._awake_ns()
                if awake and later:
                    slept = now - began - (later - awake)
                    self._words[WAITED_NS] = max(self._words[WAITED_NS], before + slept)

        return call

    def _awake_ns(self) -> int:
        """That the main thread has run or waited for a core; 0 where that cannot be known. No descriptor is kept, for
        a script may close what it did not open."""
        try:
            fd = os.open(self._schedstat, os.O_RDONLY | os.O_CLOEXEC)
            try:
                ran, waited, _ = os.read(fd, 128).split()
            finally:
                os.close(fd)
            return int(ran) + int(waited)
        except (OSError, ValueError):
            return 0

    def noted(self, function: Callable[..., Any], way: str, rank: str) -> Callable[..., Any]:
        """To whom it sends, and from whom it receives: in a pipeline, that tells stages apart. rank: what the function
        calls the other one."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            peer: int = kwargs[rank] if rank in kwargs else args[2]  # behind group and tensors
            _count(args[0], way, peer)
            found = function(*args, **kwargs)
            if (way, peer) not in self._stage and self._counts():
                self._stage.add((way, peer))
                self._words[STAGE] = zlib.crc32(repr(sorted(self._stage)).encode()) | 1 << 32
            return found

        return call


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """What it takes may be anybody's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _count(args[0], "recv", ANYBODY)
        return function(*args, **kwargs)

    return call


def _count(group: Any, way: str, peer: int) -> None:
    key = (group.group_name, way, peer)
    with _counting:
        _counts[key] = _counts.get(key, 0) + 1


def transfers() -> "tuple[Transfers, ...] | None":
    """All there were; None where it took anybody's, or too many have a part in them."""
    from elastic.proto.looks import Transfers

    module: Any = sys.modules["torch.distributed.distributed_c10d"]
    known = {
        group.group_name: ranks
        for group, ranks in [*module._world.pg_group_ranks.items()]
        if not isinstance(group, int)  # one that it is no member of
    }
    with _counting:
        counts = dict(_counts)
    found: dict[int, dict[str, int]] = {}
    for (name, way, peer), count in counts.items():
        numbers = {in_group: number for number, in_group in known.get(name, {}).items()}
        if numbers and peer not in numbers:
            return None
        if numbers:  # else the group is gone
            one = found.setdefault(numbers[peer], {"send": 0, "recv": 0})
            one[way] += count
    if len(found) > MOST_PEERS:
        return None
    return tuple(
        Transfers(peer=peer, sent=one["send"], received=one["recv"])
        for peer, one in sorted(found.items())
    )


def _has_gpus() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and cuda.is_initialized()

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
import weakref
import zlib
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from elastic.proto.env import process_environment
from elastic.proto.page import STAGE, WAITED_NS, PageWriter

if TYPE_CHECKING:
    from elastic.proto.looks import Transfers

C10D = "torch._C._distributed_c10d"
MOST_PEERS = 64
"""Of whom it is told."""


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
    library.ProcessGroup.recv_anysource = _from_anybody(library.ProcessGroup.recv_anysource)


class _Clock:
    """Of one thread, the main one; in others, and in a fork of us, what is wrapped is called, and nothing is timed."""

    def __init__(self, page: PageWriter) -> None:
        self._words = page.words
        self._pid = page.pid
        self._main = threading.main_thread().ident
        self._stage = set[tuple[str, int]]()
        self._schedstat = f"/proc/{page.pid}/task/{page.pid}/schedstat"

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._main and os.getpid() == self._pid

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """All that `function` takes is waiting. What it returns has a name by which a stack is known to wait
        (master/activity.py)."""

        @functools.wraps(function)
        def wait_for_others(*args: Any, **kwargs: Any) -> Any:
            if not self._is_ours():
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
            if not self._is_ours() or _has_gpus():
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
            found = function(*args, **kwargs)
            peer: int = kwargs[rank] if rank in kwargs else args[2]  # behind group and tensors
            _calls.add(args[0], way, peer)
            if (way, peer) not in self._stage and self._is_ours():
                self._stage.add((way, peer))
                self._words[STAGE] = zlib.crc32(repr(sorted(self._stage)).encode()) | 1 << 32
            return found

        return call


def _from_anybody(function: Callable[..., Any]) -> Callable[..., Any]:
    """What it takes is nobody's in particular."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _calls.add(args[0], "recv", -1)
        return function(*args, **kwargs)

    return call


class _Calls:
    """Sends and receives of a script, of any thread, while its world is the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int], int] = {}
        """By way, and the other's number in the world."""
        self._known = True
        self._world: Callable[[], Any] = lambda: None
        self._numbers = weakref.WeakKeyDictionary[Any, dict[int, int]]()
        """Of a process group's ranks in the world, by those in the group."""

    def add(self, group: Any, way: str, peer: int) -> None:
        """peer: its number in the group. Where torch does not know the two nothing can be told any more."""
        module: Any = sys.modules["torch.distributed.distributed_c10d"]
        with self._lock:
            try:
                if (world := module._world.default_pg) is not self._world():
                    self._counts, self._known, self._world = {}, True, weakref.ref(world)
                if group not in self._numbers:
                    ranks = module._world.pg_group_ranks[group]
                    self._numbers[group] = {in_group: number for number, in_group in ranks.items()}
                key = (way, self._numbers[group][peer])
                self._counts[key] = self._counts.get(key, 0) + 1
            except Exception:  # noqa: BLE001 - the script is to hear of nothing but its own mistakes
                self._known = False

    def told(self) -> "tuple[Transfers, ...] | None":
        from elastic.proto.looks import Transfers

        distributed = sys.modules["torch.distributed"]
        with self._lock:
            same = distributed.group.WORLD is self._world()
            counts, known = (dict(self._counts), self._known) if same else ({}, True)
        if known and not counts:
            return ()
        peers = sorted({peer for _, peer in counts})
        if not known or not of_job() or len(peers) > MOST_PEERS:
            return None
        return tuple(
            Transfers(
                peer=peer, sent=counts.get(("send", peer), 0),
                received=counts.get(("recv", peer), 0),
            )
            for peer in peers
        )  # fmt: skip


_calls = _Calls()


def of_job() -> bool:
    """Whether the script's world has the job's ranks and numbers; it may make another, or several."""
    distributed, variables = sys.modules["torch.distributed"], process_environment()
    ours = str(distributed.get_rank()), str(distributed.get_world_size())
    return ours == (variables.get("RANK"), variables.get("WORLD_SIZE"))


def transfers() -> "tuple[Transfers, ...] | None":
    """With each peer, all there were; None where a receive was from anybody, too many have a part in them, or the script's
    world is not the job's."""
    return _calls.told()


def _has_gpus() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and cuda.is_initialized()

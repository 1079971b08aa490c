"""Inside the user's process: what its steps take on its GPU, by events that nobody waits for.

Where a phase begins, an event is recorded on the stream that the script computes on: at the beginning and the end of
a backward pass, before DDP waits for its last buckets, around what else makes the stream wait for other ranks, and
before and after the optimizer's step. Some steps later all have happened, and the times between them go to the page.
What the stream waits for others is apart from what it computes, so that ranks can be compared, and the host's times
beside the device's tell whether the device or its host is slow.

A step is measured ten times a second at most, and more rarely where it has many marks: what that costs has a bound.
Events are made once. Nothing is recorded or asked while a CUDA graph is captured.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from elastic.agent.device_queries import Asker, Driver
from elastic.proto.page import DEVICE_KEPT, DEVICE_RECORD, DEVICE_RING, DEVICE_STEPS, PageWriter

if TYPE_CHECKING:
    from elastic.proto.looks import OnDevice

FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE = range(4)
"""Phases. Forward is all that is none of the others."""
MOST = 512
"""Marks of a step; one with more is not measured."""
IN_FLIGHT = 4
"""Steps whose events have not all happened, for a host is ahead of its device."""
EVERY_NS, A_MARK_NS = 100_000_000, 4_000_000
"""From the beginning of a step that is measured to that of the next: the longer of the first, and of the second for each
of its marks."""
KEEPS_PACE = 0.8
"""Part of what a pass takes on its device from which its host is taken to determine that."""
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "barrier",
    "all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "all_to_all_single",
)  # fmt: skip
"""Of a process group: those that are not asynchronous run on the stream that is current."""


def by_phase(kinds: Sequence[int], at: Sequence[int]) -> list[int]:
    """What each phase took, by its number. at: when each mark was; of the last, the end, the kind means nothing."""
    found = [0, 0, 0, 0]
    for kind, begin, end in zip(kinds, at, at[1:], strict=False):
        found[kind] += end - begin
    return found


def is_starved(host_ns: int, device_ns: int, *, drained: bool) -> bool:
    """Whether a device waited for its host rather than the other way round. host_ns, device_ns: that a backward pass
    took on each; drained: the device had done it when the host was at the end of the step. A host may be ahead, or
    be held by a full queue, and then it was not drained; or wait for the device later, and then its pass is short."""
    return drained and device_ns > 0 and host_ns >= KEEPS_PACE * device_ns


class _Step:
    """One that is measured."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        """Recorded again for step after step."""
        self.kinds = [0] * MOST
        self.host_ns = [0] * MOST
        self.count = 0
        self.number = 0
        self.drained = False
        self.stream: Any = None
        self.raw = 0
        """The stream's handle."""


class DeviceTimes:
    """Of one process, whose CUDA is initialised. Where anything goes wrong it does nothing any more."""

    def __init__(self, page: PageWriter) -> None:
        self._words, self._pid = page.words, page.pid
        self._main = threading.main_thread().ident
        self._torch: Any = sys.modules["torch"]
        self._cuda: Any = sys.modules["torch.cuda"]
        self._free = [_Step() for _ in range(IN_FLIGHT)]
        self._under_way: list[_Step] = []
        """Ended on the host; oldest first."""
        self._open: _Step | None = None
        self._next_ns = 0
        self._stream: Any = None
        """On which the script computes."""
        self._off = False
        self._captures = int(self._cuda.is_current_stream_capturing())
        self._lock = threading.Lock()
        """Between what another thread asks of the device and the beginning of a capture, which that would break."""
        self._asker: Asker | None = None

    def install(self, leader: Callable[[], int]) -> None:
        """Have torch call us; leader: the id of the optimizer whose steps count."""
        library: Any = sys.modules["torch._C._distributed_c10d"]
        autograd: Any = sys.modules["torch.autograd"]
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        graph = self._cuda.CUDAGraph

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._counts() and id(optimizer) == leader():
                self._enter(OPTIMIZER)

        optimizers.register_optimizer_step_pre_hook(before_step)
        autograd._engine_run_backward = self._around_backward(autograd._engine_run_backward)
        library.Work.wait = self._around_wait(library.Work.wait)
        for name in COLLECTIVES:
            if method := getattr(library.ProcessGroup, name, None):
                setattr(library.ProcessGroup, name, self._around_collective(method))
        self._cuda.Stream.wait_event = self._around_wait_event(self._cuda.Stream.wait_event)
        graph.capture_begin = self._before_capture(graph.capture_begin)
        graph.capture_end = self._after_capture(graph.capture_end)

    # --- steps ---

    def step_ends(self, number: int, now: int) -> None:
        """number: of the step; now: CLOCK_MONOTONIC in nanoseconds."""
        if self._off or self._captures:
            return
        try:
            if self._open is not None:
                self._close(self._open)
            while self._under_way and self._read(self._under_way[0]):
                self._free.append(self._under_way.pop(0))
            if now >= self._next_ns and self._free:
                self._begin(number + 1, now)
        except Exception:  # noqa: BLE001 - of a device that is gone the script hears by itself
            self._off, self._open = True, None

    def _begin(self, number: int, now: int) -> None:
        step = self._free.pop()
        self._stream = step.stream = self._cuda.current_stream()
        step.raw, step.number, step.count = step.stream.cuda_stream, number, 0
        self._next_ns = now + EVERY_NS
        self._open = step
        self._enter(FORWARD)

    def _close(self, step: _Step) -> None:
        self._enter(FORWARD)
        self._open = None
        self._next_ns = max(self._next_ns, step.host_ns[0] + A_MARK_NS * step.count)
        if step.count == MOST:
            self._free.append(step)
            return
        last = step.count - 1
        ends = [n + 1 for n in range(last) if step.kinds[n] == BACKWARD]
        step.drained = bool(ends) and step.events[ends[-1]].query()
        self._under_way.append(step)

    def _read(self, step: _Step) -> bool:
        """Tell of a step all of whose events have happened; False: they have not."""
        last = step.count - 1
        if not step.events[last].query():
            return False
        first, kinds = step.events[0], step.kinds[: step.count]
        at = [0, *(round(first.elapsed_time(step.events[n]) * 1e6) for n in range(1, step.count))]
        took, host = by_phase(kinds, at), by_phase(kinds, step.host_ns[: step.count])
        starved = is_starved(host[BACKWARD], took[BACKWARD], drained=step.drained)
        words, count = self._words, self._words[DEVICE_STEPS] + 1
        place = DEVICE_RING + DEVICE_RECORD * (count % DEVICE_KEPT)
        for offset, value in enumerate((step.number, *took, int(starved))):
            words[place + offset] = value
        words[DEVICE_STEPS] = count
        return True

    def _enter(self, kind: int) -> None:
        """Another phase begins. A step that is full stays as it is, and is none."""
        step = self._open
        if step is None or (count := step.count) == MOST:
            return
        try:
            if count == len(step.events):
                step.events.append(self._cuda.Event(enable_timing=True))
            step.events[count].record(step.stream)
        except Exception:  # noqa: BLE001 - as above
            self._off, self._open = True, None
            return
        step.kinds[count], step.host_ns[count] = kind, monotonic_ns()
        step.count = count + 1

    # --- what is between ---

    def _counts(self) -> bool:
        """A step is measured, in this thread, and in no fork of us."""
        return (
            self._open is not None
            and threading.get_ident() == self._main
            and os.getpid() == self._pid
        )

    def _around_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._counts():
                return function(outputs, *args, **kwargs)
            self._enter(BACKWARD)
            hook = None
            try:
                hook = self._before_last_waits(outputs)
            except Exception:  # noqa: BLE001 - a tensor of the script's own kind, which takes no hooks
                self._off, self._open = True, None
            try:
                return function(outputs, *args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()
                self._enter(FORWARD)

        return call

    def _before_last_waits(self, outputs: Any) -> Any:
        """What is called at the end of a backward pass is called in the order in which it was asked for: DDP, which
        waits there for what it has sent, asks when the last gradient is there, and we before the first."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.compiled_autograd_enabled:
            return None  # it would compile us
        first = outputs[0] if outputs else None
        if not isinstance(first, self._torch.Tensor) or first.grad_fn is None:
            return None
        engine = self._torch.autograd.Variable._execution_engine

        def begun(grad: Any) -> None:
            engine.queue_callback(lambda: self._enter(COLLECTIVE))

        return first.register_hook(begun)

    def _around_wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Which makes the stream that is current wait for other ranks."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._counts() or not self._computes():
                return function(*args, **kwargs)
            return self._apart(function, *args, **kwargs)

        return call

    def _around_collective(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """One that is asynchronous is waited for later."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._counts() or not self._computes():
                return function(*args, **kwargs)
            options = kwargs.get("opts", args[-1])
            if getattr(options, "asyncOp", True):
                return function(*args, **kwargs)
            return self._apart(function, *args, **kwargs)

        return call

    def _around_wait_event(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """FSDP's way to wait, in threads of a backward pass, too."""

        @functools.wraps(function)
        def wait_event(stream: Any, event: Any) -> Any:
            step = self._open
            if step is None or os.getpid() != self._pid or stream.cuda_stream != step.raw:
                return function(stream, event)
            return self._apart(function, stream, event)

        return wait_event

    def _computes(self) -> bool:
        """The stream that is current is the one that is measured."""
        step = self._open
        return step is not None and self._cuda.current_stream().cuda_stream == step.raw

    def _apart(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As a phase of its own, within another."""
        step = self._open
        before = step.kinds[step.count - 1] if step is not None else FORWARD
        self._enter(COLLECTIVE)
        try:
            return function(*args, **kwargs)
        finally:
            self._enter(before)

    # --- captures, and what another thread asks ---

    def _before_capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._captures += 1
            if self._open is not None:
                self._free.append(self._open)
                self._open = None
            try:
                return function(*args, **kwargs)
            except BaseException:
                self._captures -= 1
                raise

        return capture_begin

    def _after_capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self._captures = max(0, self._captures - 1)

        return capture_end

    @contextmanager
    def _quiet(self) -> Iterator[bool]:
        """No capture begins in it; whether nothing must be asked of the device."""
        with self._lock:
            yield self._off or self._captures > 0

    def on_device(self) -> "OnDevice":
        """What the device does, asked from one thread and without waiting for it."""
        from elastic.proto.looks import OnDevice

        if (stream := self._stream) is None:
            return OnDevice.UNKNOWN
        if self._asker is None:
            self._asker = Asker(functools.partial(Driver, stream.device_index), self._quiet)
        return self._asker.ask(stream.cuda_stream)


_ours: DeviceTimes | None = None


def follow(page: PageWriter, leader: Callable[[], int]) -> DeviceTimes | None:
    """Begin to time steps; None where this is no rank of several that compute on a GPU."""
    global _ours
    cuda, distributed = sys.modules.get("torch.cuda"), sys.modules.get("torch.distributed")
    if cuda is None or distributed is None or not cuda.is_initialized():
        return None
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    times = DeviceTimes(page)
    times.install(leader)
    _ours = times
    return times


def on_device() -> "OnDevice":
    """As the method."""
    from elastic.proto.looks import OnDevice

    if _ours is None:
        return OnDevice.UNKNOWN
    try:
        return _ours.on_device()
    except Exception:  # noqa: BLE001 - of a device that is gone the script hears by itself
        return OnDevice.UNKNOWN

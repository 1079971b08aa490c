"""Snapshots that get to host memory behind training's back.

`shadow`: tensors are copied on their device first, which takes milliseconds, and from there to the
host while training goes on. `stream`: no memory for that; they are copied to the host from where they
are, and an optimizer's step waits until what it changes is through. So is what is in host memory
already beside a device's tensors, as an offloaded optimizer's moments are.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from threading import Event, Lock
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.checkpoint.memory import copy_cpu, host, lanes
from elastic.checkpoint.memory.lanes import Lane
from elastic.checkpoint.save.slots import PART, GivenBack, Slots
from elastic.checkpoint.state.collect import memory, modules, optimizers
from elastic.checkpoint.state.image import Image
from elastic.proto import slot, sums
from elastic.proto.sums import Chunk

log = logging.getLogger(__name__)

BUCKET = 64 << 20
"""Bytes that are waited for together, or more."""
SMALL = 64 << 10
"""Bytes in host memory that are sooner cloned than waited for, where the rest is in a shadow: an AdamW's steps."""
_ALIGNED = 512
"""Bytes; more than any dtype needs."""


Move = tuple[int, torch.Tensor]
"""Where bytes begin in the image, and the bytes."""
Run = Mapping[str, torch.Tensor]
"""Tensors of a device whose bytes follow one another in the image."""


class Void(Exception):
    """A snapshot that is none: these tensors were changed while they were copied."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"{', '.join(names)} changed while it was copied")
        self.names = names


@dataclass(slots=True)
class _Bucket:
    moves: list[Move] = field(default_factory=list["Move"])
    bytes: int = 0
    begun: Event = field(default_factory=Event)
    mark: Any = None


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor that is copied from where training has it."""

    name: str
    tensor: torch.Tensor
    version: int
    bucket: int

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.version


class Copy:
    """One snapshot on its way: made by who trains, run by another thread."""

    def __init__(self, lane: Lane, image: Image, values: bytes, moves: Iterable[Move]) -> None:
        """moves: where bytes begin in the image, and the bytes, in order; all that pieces have."""
        self._lane = lane
        self._image = image
        self._values = values
        self._buckets: list[_Bucket] = []
        for start, source in moves:
            if not self._buckets or self._buckets[-1].bytes >= BUCKET:
                self._buckets.append(_Bucket())
            self._buckets[-1].moves.append((start, source))
            self._buckets[-1].bytes += len(source)
        self._watched: list[_Watched] = []
        self._by_memory: dict[int, int] = {}
        self._changed: list[str] = []
        self._lock = Lock()
        self._passed = -1
        """Training waits for the copies up to that bucket, before it goes on."""
        self._start = lane.now()
        self.read = Event()
        """What is copied may be changed again."""

    def watch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """These are copied from training's own memory."""
        starts = [bucket.moves[0][0] for bucket in self._buckets]
        for name, tensor in tensors.items():
            number = bisect_right(starts, self._image.starts[name]) - 1
            self._watched.append(_Watched(name, tensor, tensor._version, number))
            at = tensor.untyped_storage().data_ptr()
            self._by_memory[at] = max(number, self._by_memory.get(at, -1))

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Have training wait before an optimizer changes what is not copied yet."""
        if self.read.is_set() or not self._watched:
            return
        numbers = (self._by_memory.get(memory, -1) for memory in map(memory, _tensors(optimizer)))
        last = max(numbers, default=-1)
        with self._lock:
            if last <= self._passed or self.read.is_set():
                return
            self._look(last)
            self._buckets[last].begun.wait()
            self._lane.hold(self._buckets[last].mark)
            self._passed = last

    def _look(self, last: int) -> None:
        """For what was changed up to that bucket, other than behind our back."""
        self._changed += [
            one.name for one in self._watched if self._passed < one.bucket <= last and one.changed
        ]

    def run(self, out: memoryview, threads: int) -> list[Chunk]:
        """Fill the image but for its table; returns its chunks. In a thread that has entered the lane.
        Raises `Void`."""
        image = self._image
        target = torch.frombuffer(out, dtype=torch.uint8)
        try:
            out[: len(image.header)] = image.header
            out[image.values_at : image.sums_at] = self._values
            self._lane.follow(self._start)
            for bucket in self._buckets:
                for start, source in bucket.moves:
                    self._move(target, start, source)
                bucket.mark = self._lane.mark()
                bucket.begun.set()
        finally:
            self._lane.finish(self._lane.mark())  # nothing is written there once the slot is let go
        with self._lock:
            self._look(len(self._buckets))
            self.read.set()
        if self._changed:
            raise Void(self._changed)

        def chunk(span: tuple[int, int]) -> Chunk:
            return Chunk(span[1], sums.checksum(out[span[0] : span[1]]))

        # after the copies: beside them each had half of the memory's bandwidth
        ends = image.chunk_ends()
        return host.each(chunk, zip([0, *ends], ends, strict=False), threads)

    def over(self) -> None:
        """Nobody waits for it any more, however it went."""
        self.read.set()
        for bucket in self._buckets:
            bucket.begun.set()
            bucket.moves.clear()

    def _move(self, target: torch.Tensor, start: int, source: torch.Tensor) -> None:
        """Not across parts of the slot, each of which is registered alone."""
        at = 0
        while at < len(source):
            stop = min(len(source), at + PART - (slot.PAGE + start + at) % PART)
            self._lane.copy(target[start + at : start + stop], source[at:stop])
            at = stop


class Behind:
    """What is done for one rank's snapshots by threads of their own; what they fail with is raised at
    the next call."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.path: Literal["shadow", "stream", "sync"] = "stream"
        self._shadow: torch.Tensor | None = None
        self._copying = ThreadPoolExecutor(1, "elastic-snapshot", lane.enter)
        self._preparing = ThreadPoolExecutor(1, "elastic-slots")
        self._first: Future[None] = Future()
        self._preparations: list[Future[None]] = []
        self._copies: list[Future[None]] = []
        self._last: Copy | None = None
        self._cloned: set[str] = set()
        """What is changed by more than optimizers."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def take(
        self,
        image: Image,
        values: bytes,
        tensors: Mapping[str, torch.Tensor],
        steady: Callable[[], set[int]],
    ) -> Copy:
        """Have these tensors kept as they are now; waits while the shadow is still read.

        steady: finds the memory (addresses) that only optimizers change.
        """
        if self._last is not None and self._shadow is not None:
            self._last.read.wait()
        named = _in_order(image, tensors)
        runs = _runs(named) if self.path == "shadow" else []
        if not self._make_shadow(runs):
            runs = []
        shadowed = {name for run in runs for name in run}
        left = {name: tensor for name, tensor in named.items() if name not in shadowed}
        least = SMALL if shadowed else 0
        straight = {
            name: tensor
            for name, tensor in left.items()
            if tensor.nbytes >= least and name not in self._cloned and _plain(tensor)
        }
        if straight:
            unchanged = steady()
            straight = {name: one for name, one in straight.items() if memory(one) in unchanged}
        moves = [
            (image.starts[name], _bytes(tensor, clone=name not in straight))
            for name, tensor in left.items()
        ]
        moves += self._to_shadow(image, runs)
        moves.sort(key=lambda move: move[0])
        self._last = Copy(self.lane, image, values, moves)
        self._last.watch(straight)
        return self._last

    def _make_shadow(self, runs: Sequence[Run]) -> bool:
        """Device memory for them, if it can be had; else they are streamed."""
        size = sum(map(_size, runs))
        if not size or (self._shadow is not None and len(self._shadow) >= size):
            return True
        self._shadow = None  # before there is another
        (device,) = {tensor.device for run in runs for tensor in run.values()}
        try:
            self._shadow = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            log.warning("no room for a shadow of %.1f GiB on the device any more", size / (1 << 30))
            self.path = "stream"
        return self._shadow is not None

    def _to_shadow(self, image: Image, runs: Sequence[Run]) -> list[Move]:
        """Copies on the device, each run laid out as in the image, so that it is one move."""
        moves: list[Move] = []
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        at = 0
        for run in runs:
            assert self._shadow is not None
            here = self._shadow[at : at + _size(run)]
            begin = end = image.starts[next(iter(run))]
            for tensor in run.values():
                start, end = end, end + tensor.nbytes
                source = copy_cpu.words(tensor.resolve_conj().resolve_neg())
                target = here[start - begin : end - begin]
                targets, sources = groups.setdefault(source.dtype, ([], []))
                targets.append(target.view(source.dtype).view(source.shape))
                sources.append(source)
            moves.append((begin, here[: end - begin]))
            at += len(here)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
        return moves

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._last is not None:
            self._last.hold(optimizer)

    def submit(self, copy: Copy, work: Callable[[], None]) -> None:
        """Have `work` run the copy, after what was submitted before."""

        def one() -> None:
            try:
                work()
            except Void as error:
                self._cloned.update(error.names)
                log.warning(
                    "a snapshot is left out: %s, by something else than an optimizer's step; from "
                    "now on it is copied on its device first",
                    error,
                )

        future = self._copying.submit(one)
        future.add_done_callback(lambda _: copy.over())  # of a thread that cannot begin, too
        self._copies.append(future)

    def prepare(self, slots: Slots) -> None:
        """Touch and register their memory, one slot after the other."""

        def one(index: int) -> None:
            with suppress(GivenBack):
                slots.prepare(index)

        slots.leave_to_another()
        self._preparations = [self._preparing.submit(one, n) for n in range(slots.count)]
        self._first = self._preparations[0]

    def leave(self, slots: Slots) -> None:
        """Be done with these slots: all copies are over, and what is still prepared is given up."""
        wait(self._copies)
        slots.give_up()
        wait(self._preparations)
        self.lane.close()

    def wait_ready(self, timeout: float | None, *, every: bool) -> None:
        """Wait until one slot can be written, or none can; or until that is known of each."""
        wait([self._first, *(self._preparations if every else ())], timeout)

    def check(self) -> None:
        """Raises what went wrong since, once."""
        for futures in (self._preparations, self._copies):
            for future in [future for future in futures if future.done()]:
                futures.remove(future)
                future.result()

    def forget(self, kind: type[Exception]) -> None:
        """Of what went wrong, all of that kind."""
        for futures in (self._preparations, self._copies):
            for future in [future for future in futures if future.done()]:
                if isinstance(future.exception(), kind):
                    futures.remove(future)

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for all copies; whether they are over. Raises what went wrong."""
        over = not wait(self._copies, timeout).not_done
        self.check()
        return over

    def close(self) -> None:
        """After `leave`. Raises what went wrong."""
        self._copying.shutdown()
        self._preparing.shutdown()
        self._hook.remove()
        self._shadow = None
        self.check()


def steady(state: Mapping[str, Any]) -> set[int]:
    """The memory of what only optimizers change, or torch counts the changes of: parameters, and the
    optimizers' own state. No operation on a DTensor counts as a change of its piece."""
    found = {
        memory(parameter)
        for _, module in modules(state)
        for parameter in module.parameters()
        if not isinstance(parameter, DTensor)
    }
    for optimizer in optimizers(dict(state)):
        found.update(map(memory, _tensors(optimizer)))
    return found


def _tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Those that its step changes."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _in_order(image: Image, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As they lie in the image, without those that have no bytes."""
    some = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    return dict(sorted(some.items(), key=lambda item: image.starts[item[0]]))


def _runs(tensors: Mapping[str, torch.Tensor]) -> list[Run]:
    """The device's tensors; where there are only the host's, they are taken for one's. tensors: in order."""
    device = lanes.device_of(list(tensors.values()))
    grouped = groupby(tensors.items(), key=lambda item: item[1].device == device)
    return [dict(run) for here, run in grouped if here]


def _size(run: Run) -> int:
    """Bytes in a shadow."""
    size = sum(tensor.nbytes for tensor in run.values())
    return size + -size % _ALIGNED


def _plain(tensor: torch.Tensor) -> bool:
    """Its memory is its bytes, and torch counts its changes."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_contiguous() and not lazy and not tensor.is_inference()


def _bytes(tensor: torch.Tensor, *, clone: bool) -> torch.Tensor:
    found = copy_cpu.words(tensor.resolve_conj().resolve_neg())
    if clone:
        found = found.clone(memory_format=torch.contiguous_format)
    return found.reshape(-1).view(torch.uint8)

"""Boxes of images into tensors, chunk by chunk: several threads read, verify and copy.

A chunk is used only once its checksum is found right. Memory that a target's device knows is copied from
where it is. What else is in flight is bounded: a chunk for each thread, and for targets on a device a
ring of two more in pinned memory, so that chunks are verified while those before them are on their way
to the device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import local

import torch

from elastic.checkpoint.load.plan import Box, Read, flat
from elastic.checkpoint.load.source import Source
from elastic.checkpoint.memory import host, lanes
from elastic.checkpoint.memory.copy_cpu import WORDS
from elastic.checkpoint.state.image import CHUNK, SIZES
from elastic.proto import sums
from elastic.proto.errors import CheckpointError

Span = tuple[int, int, int]
"""Of a chunk: start and end in the image, and checksum."""

SPAN = 32 << 20
"""Bytes that a thread takes at a time of what goes as it is."""


@dataclass(frozen=True, slots=True)
class Straight:
    """Bytes that are wanted as they lie in an image, one after the other."""

    start: int
    """In the image."""
    into: torch.Tensor
    """The target's own bytes."""

    def of(self, start: int, end: int) -> tuple[slice, torch.Tensor]:
        """What is wanted of a chunk, and where it goes."""
        first, last = max(start, self.start), min(end, self.start + len(self.into))
        into = self.into[first - self.start : last - self.start]
        return slice(first - start, last - start), into


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a target needs of a chunk, or of several where all go straight."""

    source: "Source"
    read: Read[int]
    target: torch.Tensor
    """The wanted piece, into which the box of `read` goes."""
    tried: frozenset[int]
    """Shards that had this box, damaged."""
    chunks: tuple[Span, ...]
    straight: Straight | None

    @property
    def boxes(self) -> Iterator[tuple[int, Box, Box]]:
        """Of the (first) chunk's elements, those that are wanted: where a run begins in it (bytes), the
        run, and the part of it that is wanted, both in the image's piece."""
        piece, at = self.read.piece, self.source.image.starts[self.read.piece.name]
        size = SIZES[piece.dtype]
        first, last, _ = self.chunks[0]
        start, end = max(first, at), min(last, at + piece.nbytes)
        if (start - at) % size or (end - at) % size or (start - first) % size:
            raise CheckpointError(f"{self.source.where}: its chunks cut through elements")
        wanted = Box(
            tuple(o - p for o, p in zip(self.read.box.offset, piece.offset, strict=True)),
            self.read.box.extent,
        )
        place = start - first
        for run in flat(piece.extent, (start - at) // size, (end - at) // size):
            common = run.meet(wanted)
            if not common.empty:
                yield place, run, common
            place += run.volume * size


def jobs(
    source: "Source", read: Read[int], target: torch.Tensor, tried: frozenset[int]
) -> Iterator[Job]:
    """All that has something of the box."""
    piece = read.piece
    first = last = 0
    for offset, begin, size, extent in zip(
        read.box.offset, piece.offset, read.box.extent, piece.extent, strict=True
    ):
        first = first * extent + offset - begin
        last = last * extent + offset - begin + size - 1
    at, itemsize = source.image.starts[piece.name], SIZES[piece.dtype]
    start, end = at + first * itemsize, at + (last + 1) * itemsize
    straight = _straight(read, target, start)
    chunks = tuple(source.spans(start, end))
    step = 1 if straight is None else SPAN // CHUNK
    for number in range(0, len(chunks), step):
        job = Job(
            source=source, read=read, target=target, tried=tried,
            chunks=chunks[number : number + step], straight=straight,
        )  # fmt: skip
        if straight is not None or any(job.boxes):
            yield job


@torch.no_grad()
def _straight(read: Read[int], target: torch.Tensor, start: int) -> Straight | None:
    """Where the box has no gap in it, neither in the image nor in the target: no tensors need be made
    of its chunks. start: of the box, in the image."""
    box, wanted = read.box, read.wanted
    whole_rows = box.extent[1:] == wanted.extent[1:] == read.piece.extent[1:]
    lazy = target.is_conj() or target.is_neg()
    if lazy or not whole_rows or not target.is_contiguous():
        return None
    itemsize = SIZES[read.piece.dtype]
    skip = (box.offset[0] - wanted.offset[0]) * math.prod(box.extent[1:]) if box.offset else 0
    into = target.reshape(-1).view(torch.uint8)[skip * itemsize :][: box.volume * itemsize]
    return Straight(start, into)


def fetch(wanted: Sequence[Job], threads: int) -> list[tuple[Job, OSError | None]]:
    """Do all of them. Returns a job for each chunk that is not what was written, or why it cannot be
    read."""
    failed: list[tuple[Job, OSError | None]] = []
    ways = [_Way() for _ in range(threads)]
    own, free = local(), iter(ways)

    def enter() -> None:
        own.way = next(free)

    def work(job: Job) -> None:
        for chunk in job.chunks:
            try:
                if not own.way.land(job, chunk):
                    failed.append((replace(job, chunks=(chunk,)), None))
            except OSError as error:
                failed.append((replace(job, chunks=(chunk,)), error))

    for device in {job.target.device for job in wanted if job.target.is_cuda}:
        torch.cuda.synchronize(device)  # what the script has begun to do with the targets
    try:
        host.each(work, wanted, threads, enter)
    finally:
        for way in ways:
            way.wait()
    return failed


class _Way:
    """One thread's, to wherever the targets are."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, _Device] = {}

    def land(self, job: Job, chunk: Span) -> bool:
        """Verify a chunk, and begin to copy what is wanted of it; False where it is damaged."""
        start, end, checksum = chunk
        data = job.source.reader.read(start, end)
        device = job.target.device
        if device.type == "cuda":
            if device not in self._devices:
                self._devices[device] = _Device(device)
            return self._devices[device].land(job, chunk, data)
        if sums.checksum(data) != checksum:
            return False
        if job.straight is not None:
            span, into = job.straight.of(start, end)
            copy = host.copy if into.is_cpu else torch.Tensor.copy_
            copy(into, _tensor(data[span]))
        else:
            _place(job, _tensor(data))
        return True

    def wait(self) -> None:
        for device in self._devices.values():
            device.wait()


class _Device:
    """One thread's way to one device: a stream, and two pinned chunks in turn for what the device does
    not know."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # see `Lane.enter`
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._count = 0

    def land(self, job: Job, chunk: Span, data: memoryview) -> bool:
        start, end, checksum = chunk
        read = None
        if job.straight is None or lanes.registered(data) is None:
            data, read = self._pinned(data, job.source.where)
        if sums.checksum(data) != checksum:
            return False
        with torch.cuda.stream(self._stream):
            if job.straight is not None:
                span, into = job.straight.of(start, end)
                self._copy(into, data[span])
            else:
                _place(job, _tensor(data))
            if read is not None:
                read.record(self._stream)
        return True

    def _pinned(self, data: memoryview, where: str) -> tuple[memoryview, torch.cuda.Event]:
        """The same bytes in pinned memory, which is free again once the event is there."""
        if data.nbytes > CHUNK:
            raise CheckpointError(f"{where}: a chunk has {data.nbytes} bytes")
        if len(self._ring) < 2:
            pinned = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
            self._ring.append((pinned, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        pinned, read = self._ring[self._count % 2]
        self._count += 1
        read.synchronize()
        host.copy(pinned[: data.nbytes], _tensor(data))
        return pinned.numpy().data[: data.nbytes], read

    def _copy(self, into: torch.Tensor, data: memoryview) -> None:
        """Each part by itself, where they were registered so."""
        at = 0
        for part in lanes.registered(data) or [data]:
            into[at : at + len(part)].copy_(_tensor(part), non_blocking=True)
            at += len(part)

    def wait(self) -> None:
        self._stream.synchronize()


@torch.no_grad()
def _place(job: Job, chunk: torch.Tensor) -> None:
    """What is wanted of a chunk's bytes into the target."""
    target, piece = job.target, job.read.piece
    dtype = getattr(torch, piece.dtype)
    lazy = target.is_conj() or target.is_neg()  # its memory holds other bits than it has
    words = dtype if lazy else WORDS.get(target.itemsize, dtype)
    target = target if lazy else target.view(words)
    size = SIZES[piece.dtype]
    for place, run, common in job.boxes:
        source = chunk[place : place + run.volume * size].view(words).view(run.extent)
        into = target
        for dim, (start, length) in enumerate(zip(common.offset, common.extent, strict=True)):
            into = into.narrow(dim, start + piece.offset[dim] - job.read.wanted.offset[dim], length)
        if common == run and into.is_contiguous() and not lazy:
            into.copy_(source, non_blocking=True)
            continue
        source = source.to(target.device, non_blocking=True)
        for dim, (start, length) in enumerate(zip(common.offset, common.extent, strict=True)):
            source = source.narrow(dim, start - run.offset[dim], length)
        for dim, stride in enumerate(into.stride()):
            if stride == 0 and into.shape[dim] > 1:  # expanded: it is one element in memory
                one = source.narrow(dim, 0, 1)
                if not torch.equal(one.expand_as(source), source):
                    raise CheckpointError(
                        f"{piece.name} is expanded in dim {dim} here, and not in the checkpoint"
                    )
                into, source = into.narrow(dim, 0, 1), one
        into.copy_(source)


def _tensor(data: memoryview) -> torch.Tensor:
    """Those bytes; in the same memory unless that is to be read only, which torch does not take."""
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)

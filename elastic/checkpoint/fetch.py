"""Boxes of images into tensors, chunk by chunk: several threads read, verify and copy.

A chunk is used only once its checksum is found right. What is in flight is bounded: a chunk for each
thread, and for targets on a device a ring of two more in pinned memory, so that chunks are verified
while those before them are on their way to the device.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import torch

from elastic.checkpoint import host
from elastic.checkpoint.copy_cpu import WORDS
from elastic.checkpoint.image import CHUNK, SIZES
from elastic.checkpoint.plan import Box, Read, flat
from elastic.proto import sums
from elastic.proto.errors import CheckpointError

if TYPE_CHECKING:
    from elastic.checkpoint.restore import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a target needs of one chunk."""

    source: "Source"
    read: Read[int]
    target: torch.Tensor
    """The wanted piece, into which the box of `read` goes."""
    tried: frozenset[int]
    """Shards that had this box, damaged."""
    start: int
    end: int
    """Of the chunk, in the image."""
    checksum: int

    @property
    def boxes(self) -> Iterator[tuple[int, Box, Box]]:
        """Of the chunk's elements, those that are wanted: where a run begins in it (bytes), the run,
        and the part of it that is wanted, both in the image's piece."""
        piece, at = self.read.piece, self.source.image.starts[self.read.piece.name]
        size = SIZES[piece.dtype]
        start, end = max(self.start, at), min(self.end, at + piece.nbytes)
        if (start - at) % size or (end - at) % size or (start - self.start) % size:
            raise CheckpointError(f"{self.source.where}: its chunks cut through elements")
        wanted = Box(
            tuple(o - p for o, p in zip(self.read.box.offset, piece.offset, strict=True)),
            self.read.box.extent,
        )
        place = start - self.start
        for run in flat(piece.extent, (start - at) // size, (end - at) // size):
            common = run.meet(wanted)
            if not common.empty:
                yield place, run, common
            place += run.volume * size


def jobs(
    source: "Source", read: Read[int], target: torch.Tensor, tried: frozenset[int]
) -> Iterator[Job]:
    """One for each chunk that has something of the box."""
    piece = read.piece
    first = last = 0
    for offset, begin, size, extent in zip(
        read.box.offset, piece.offset, read.box.extent, piece.extent, strict=True
    ):
        first = first * extent + offset - begin
        last = last * extent + offset - begin + size - 1
    at = source.image.starts[piece.name]
    itemsize = SIZES[piece.dtype]
    for start, end, checksum in source.spans(at + first * itemsize, at + (last + 1) * itemsize):
        job = Job(
            source=source, read=read, target=target, tried=tried, start=start, end=end,
            checksum=checksum,
        )  # fmt: skip
        if any(job.boxes):
            yield job


def fetch(wanted: Sequence[Job], threads: int) -> list[tuple[Job, str]]:
    """Do all of them. Returns those whose chunk is not what was written, and what is wrong with it."""
    left, lock = iter(wanted), Lock()
    failed: list[tuple[Job, str]] = []

    def work(_: int) -> None:
        job: Job | None
        landings: dict[torch.device, Callable[[Job], bool]] = {}
        devices: list[_Device] = []
        try:
            while True:
                with lock:
                    job = next(left, None)
                if job is None:
                    break
                device = job.target.device
                if device not in landings:
                    if device.type == "cuda":
                        devices.append(_Device(device))
                        landings[device] = devices[-1].land
                    else:
                        landings[device] = _land
                try:
                    if not landings[device](job):
                        failed.append((job, "is damaged"))
                except OSError as error:
                    failed.append((job, f"cannot be read: {error}"))
        except BaseException:
            with lock:
                deque(left, maxlen=0)  # the others need not go on
            raise
        finally:
            for one in devices:
                one.wait()

    for device in {job.target.device for job in wanted if job.target.is_cuda}:
        torch.cuda.synchronize(device)  # what the script has begun to do with the targets
    host.each(work, range(min(threads, len(wanted))), threads)
    return failed


def _land(job: Job) -> bool:
    """Into host memory."""
    data = job.source.reader.read(job.start, job.end)
    if sums.checksum(data) != job.checksum:
        return False
    _place(job, _tensor(data), host.copy if job.target.is_cpu else torch.Tensor.copy_)
    return True


class _Device:
    """One thread's way to one device: a stream, and two pinned chunks in turn."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ring = [
            (torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        self._count = 0

    def land(self, job: Job) -> bool:
        pinned, free = self._ring[self._count % 2]
        self._count += 1
        free.synchronize()
        data = _tensor(job.source.reader.read(job.start, job.end))
        if data.nbytes > CHUNK:
            raise CheckpointError(f"{job.source.where}: a chunk has {data.nbytes} bytes")
        pinned = pinned[: data.nbytes]
        host.copy(pinned, data)
        if sums.checksum(pinned.numpy().data) != job.checksum:
            return False
        with torch.cuda.stream(self._stream):
            _place(job, pinned, lambda target, source: target.copy_(source, non_blocking=True))
            free.record(self._stream)
        return True

    def wait(self) -> None:
        self._stream.synchronize()


@torch.no_grad()
def _place(
    job: Job, chunk: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    """What is wanted of a chunk's bytes into the target; `copy` takes what is contiguous."""
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
            copy(into, source)
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

"""CPU tensors into a slot with their checksums, beside memcpy of the same memory by as many threads.

Both in turn, so that what else the machine does is in both. Nothing is paged in while they are timed.
"""

import mmap
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.table import Row, Sample
from elastic.checkpoint.memory import copy_cpu, host
from elastic.checkpoint.state.image import Piece, lay_out
from elastic.proto import slot

TENSORS = 16
THREADS = (1, 2)


def rows(gib: float, n: int) -> list[Row]:
    """`n` copies of that much by each of us and memcpy, with one thread and with two."""
    share = int(gib * (1 << 30)) // TENSORS // 4
    tensors = {f"layer.{k}": torch.full((share,), float(k)) for k in range(TENSORS)}
    pieces = [
        Piece(name=name, dtype="float32", shape=(share,), offset=(0,), extent=(share,))
        for name in tensors
    ]
    image = lay_out(pieces, {}, 0)
    fd = slot.create(slot.bytes_for(image.nbytes))
    out = memoryview(mmap.mmap(fd, 0))[slot.PAGE :][: image.nbytes]
    found: list[Row] = []
    for threads in THREADS:
        copied, plain = (
            Sample(launcher=name, unit="MB/s") for name in ("copy and checksum", "memcpy")
        )
        ratio = Sample(launcher="copy and checksum", unit="%")
        ways = (
            (copied, partial(copy_cpu.write, image, tensors, b"", out, threads)),
            (plain, partial(_memcpy, tensors, out, threads)),
        )
        for _, way in ways:
            way()  # the pages are there, and the threads' code
        for _ in range(n):
            for sample, way in ways:
                sample.add(image.nbytes / _seconds(way) / 1e6)
            ratio.add(100 * copied.values[-1] / plain.values[-1])
        what = f"{gib:g} GiB of CPU tensors to a slot, {threads} thread{'s' * (threads > 1)}"
        found.append(Row(measure=what, ours=copied, peers=[plain]))
        found.append(Row(measure="the same, of memcpy's", ours=ratio, peers=[]))
    return found


def _memcpy(tensors: dict[str, torch.Tensor], out: memoryview, threads: int) -> None:
    """Each tensor by one call a thread, as large as may be."""
    target = torch.frombuffer(out, dtype=torch.uint8)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    at = 0
    for tensor in tensors.values():
        for source in tensor.view(torch.uint8).chunk(threads):
            parts.append((target[at : at + len(source)], source))
            at += len(source)
    for _ in host.each(lambda part: host.copy(*part), parts, threads):
        pass


def _seconds(way: Callable[[], object]) -> float:
    began = time.monotonic()
    way()
    return time.monotonic() - began

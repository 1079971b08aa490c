"""A flush to local disk beside `dd` with direct writes: bandwidth, and what others feel of it.

The flusher is the real program; its slot a memfd. A writer of the master's journal kind (SQLite, WAL,
synchronous=FULL, one event each 20 ms) and a loop that multiplies matrices run all along, so that
their figures beside a flush, beside dd and beside nothing are of the same run.
"""

import mmap
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.jobs import ROOT
from benchmarks.table import Row, Sample
from elastic.proto import datagrams, flusher, slot, sums
from elastic.proto.sums import Chunk

CHUNK = 8 << 20
EVENT_S = 0.02
SETTLE_S = 3.0
"""Seconds over which others are timed without a flush."""


def rows(gib: float, n: int, folder: Path) -> list[Row]:
    """`n` flushes of that size and as many of dd's, in turn, each with the same beside it."""
    flushed, direct = (
        Sample(launcher=name, unit="MB/s") for name in ("elastic", "dd oflag=direct")
    )
    ratio, slower = (Sample(launcher="elastic", unit="%") for _ in range(2))
    journal = {
        name: Sample(launcher=name, unit="ms")
        for name in ("beside elastic", "beside dd", "beside nothing")
    }
    fd, size = _slot(int(gib * (1 << 30)))
    with tempfile.TemporaryDirectory(prefix="bench_flush_", dir=folder) as where, _flusher() as end:
        _flush(end, 0, Path(where), _slot(CHUNK)[0])  # it has started
        for number in range(1, n + 1):
            with _others(Path(where)) as timed:
                time.sleep(SETTLE_S)
                alone = timed()
                began = time.monotonic()
                _flush(end, number, Path(where), fd)
                seconds = time.monotonic() - began
                during = timed()
                shutil.rmtree(Path(where, "run"))  # or it is found there the next time
                time.sleep(SETTLE_S)
                timed()
                direct.add(size / _dd(Path(where, "dd"), fd, size) / 1e6)
                beside = timed()
            for sample, (events, _) in zip(journal.values(), (during, beside, alone), strict=True):
                sample.values += [1000 * s for s in events]
            slower.add(100 * (_mean(during[1]) / _mean(alone[1]) - 1))
            flushed.add(size / seconds / 1e6)
            ratio.add(100 * flushed.values[-1] / direct.values[-1])
    ours, *others = journal.values()
    return [
        Row(measure=f"flush of {gib:g} GiB", ours=flushed, peers=[direct]),
        Row(measure="the same, of dd's", ours=ratio, peers=[]),
        Row(measure="journal's event", ours=ours, peers=others),
        Row(measure="training loop slower by", ours=slower, peers=[]),
    ]


def _slot(size: int) -> tuple[int, int]:
    """A slot with a snapshot of that size; its descriptor, and the bytes of its file."""
    part = random.Random(0).randbytes(CHUNK)
    digest = sums.checksum(part)
    chunks = [Chunk(at, digest) for at in range(CHUNK, size + 1, CHUNK)]
    image_bytes = chunks[-1].end + sums.ENTRY * len(chunks)
    fd = slot.create(slot.bytes_for(image_bytes))
    stamp = slot.Stamp(job="job", step=1, round=1, rank=0, world_size=1, generation=1)
    writing = slot.Writing(memoryview(mmap.mmap(fd, 0)), stamp, image_bytes, len(chunks))
    for chunk in chunks:
        writing.image[chunk.end - CHUNK : chunk.end] = part
    writing.commit(chunks, ())
    return fd, image_bytes


@contextmanager
def _flusher() -> Iterator[socket.socket]:
    end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with end:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "elastic.checkpoint.storage.flusher", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )
        yield end
    process.wait()


def _flush(end: socket.socket, number: int, where: Path, fd: int) -> None:
    message = flusher.Write(
        id=number, checkpoint=str(where / "run"), job="job", round=1, step=1, file="shard"
    )
    datagrams.send(end, message, (fd,))
    while True:
        received = datagrams.receive(end, flusher.ToAgent, 0)
        match received[0] if received else None:
            case flusher.Done():
                return
            case flusher.Progress():
                continue
            case answer:
                raise RuntimeError(f"the flusher says {answer}")


def _dd(file: Path, fd: int, size: int) -> float:
    """Seconds of dd for as many bytes of the same memory."""
    began = time.monotonic()
    subprocess.run(
        ("dd", f"if=/proc/{os.getpid()}/fd/{fd}", f"of={file}", "bs=16M", f"count={size >> 24}",
         "oflag=direct", "conv=fsync"),
        check=True, capture_output=True,
    )  # fmt: skip
    seconds = time.monotonic() - began
    file.unlink()
    return seconds * size / (size >> 24 << 24)


@contextmanager
def _others(where: Path) -> Iterator["Timed"]:
    timed = Timed(where)
    yield timed
    timed.over.set()
    for thread in timed.threads:
        thread.join()


class Timed:
    """A journal and a training loop; calling it takes the seconds of both since the last call."""

    def __init__(self, where: Path) -> None:
        self.over = threading.Event()
        self._events: list[float] = []
        self._steps: list[float] = []
        self.threads = [
            threading.Thread(target=self._journal, args=(where / "journal.db",)),
            threading.Thread(target=self._train),
        ]
        for thread in self.threads:
            thread.start()

    def __call__(self) -> tuple[list[float], list[float]]:
        found = self._events, self._steps
        self._events, self._steps = [], []
        return found

    def _journal(self, path: Path) -> None:
        journal = sqlite3.connect(path, isolation_level=None)
        journal.executescript("pragma journal_mode=wal; pragma synchronous=full;")
        journal.execute("create table if not exists events (body text not null)")
        while not self.over.wait(EVENT_S):
            began = time.monotonic()
            journal.execute("insert into events values (?)", ("x" * 200,))
            self._events.append(time.monotonic() - began)
        journal.close()

    def _train(self) -> None:
        torch.set_num_threads(1)
        weights = torch.randn(512, 512)
        while not self.over.is_set():
            began = time.monotonic()
            for _ in range(4):
                weights = (weights @ weights).tanh()
            self._steps.append(time.monotonic() - began)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

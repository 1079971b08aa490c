"""Slots: what is committed is read, nothing else ever is, and a lock goes with its holder."""

import mmap
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto import slot, sums
from elastic.proto.errors import ProtocolMismatch, SlotError
from elastic.proto.sums import Chunk
from tests.proto.chunks import damaged

ROOT = Path(__file__).parents[2]
STAMP = slot.Stamp(job="job", step=7, round=2, rank=1, world_size=4, generation=3, persist=True)
UNITS = (5, 2**64 - 1)
BELIEFS = (slot.Belief(2**64 - 1, 2), slot.Belief(1, 8))


@contextmanager
def mapped(fd: int) -> Iterator[memoryview]:
    memory = mmap.mmap(fd, 0)
    view = memoryview(memory)
    yield view  # what was cut from it may live on


def with_table(image: bytes, size: int = 1000) -> tuple[bytes, list[Chunk]]:
    """An image whose data is `image`, its table at its end, and its chunks."""
    starts = range(0, len(image), size)
    parts = [image[at : at + size] for at in starts]
    chunks = [
        Chunk(at + len(part), sums.checksum(part)) for at, part in zip(starts, parts, strict=True)
    ]
    return image + sums.pack(chunks), chunks


def write(view: memoryview, data: bytes, stamp: slot.Stamp = STAMP) -> None:
    image, chunks = with_table(data)
    writing = slot.Writing(view, stamp, len(image), len(chunks))
    writing.image[: len(data)] = data
    writing.commit(chunks, UNITS, BELIEFS)


def memory_for(data: bytes) -> memoryview:
    return memoryview(bytearray(slot.bytes_for(len(with_table(data)[0]))))


@given(st.binary(max_size=9000), st.integers(0, 2**40), st.integers(1, 2**40))
def test_what_is_committed_is_read(image: bytes, step: int, generation: int) -> None:
    view = memory_for(image)
    stamp = slot.Stamp(job="jöb", step=step, round=0, rank=0, world_size=1, generation=generation)
    write(view, image, stamp)
    snapshot = slot.read(view)
    assert (snapshot.stamp, snapshot.units, snapshot.beliefs) == (stamp, UNITS, BELIEFS)
    assert slot.look(view) == slot.parse(view)
    assert snapshot.image == with_table(image)[0]
    assert damaged(snapshot.image, snapshot.chunks) == []


def test_an_image_of_several_chunks_is_verified_chunk_by_chunk() -> None:
    image = random.Random(0).randbytes(2017)
    view = memory_for(image)
    write(view, image)
    snapshot = slot.read(view)
    assert len(snapshot.chunks) == 3
    snapshot.image[1005] ^= 1
    snapshot.image[2016] ^= 1
    assert damaged(snapshot.image, snapshot.chunks) == [1, 2]


def test_a_smaller_image_fits_into_the_slot_of_a_larger_one() -> None:
    view = memory_for(bytes(5 * slot.PAGE))
    write(view, bytes(5 * slot.PAGE))
    write(view, b"small")
    assert bytes(slot.read(view).image[:5]) == b"small"


def test_what_is_whole_is_marked_so_until_it_is_written_over() -> None:
    view = memory_for(b"x")
    write(view, b"x")
    assert slot.read(view).all_units == 0
    slot.mark_whole(view, 7)
    assert slot.read(view).all_units == 7
    assert slot.read(view).stamp == STAMP
    write(view, b"x")
    assert slot.read(view).all_units == 0


def test_what_is_not_committed_is_not_read() -> None:
    view = memory_for(b"first")
    with pytest.raises(SlotError, match="empty"):
        slot.read(view)
    write(view, b"first")
    again = slot.Stamp(job="job", step=8, round=2, rank=1, world_size=4, generation=4)
    writing = slot.Writing(view, again, 21, 1)
    with pytest.raises(SlotError, match="was not finished"):
        slot.read(view)
    writing.image[:5] = b"other"
    struct.pack_into("=HH", view, 8, 0, 0)  # killed in the midst of its version
    with pytest.raises(SlotError, match="was not finished"):
        slot.read(view)


@given(st.data())
def test_damage_to_the_header_or_checksums_is_found(data: st.DataObject) -> None:
    image = b"some bytes"
    view = memory_for(image)
    write(view, image)
    table = slot.PAGE + len(image)
    covered = [*range(80), *range(256, 384), *range(512, 528), *range(table, table + 16)]
    at = data.draw(st.sampled_from(covered))
    view[at] ^= data.draw(st.integers(1, 255))
    try:
        snapshot = slot.read(view)
    except (SlotError, ProtocolMismatch):
        return
    assert at in (10, 11), "only a neighbouring minor version may still be read"
    assert snapshot.stamp == STAMP


@given(st.integers(0, 2**32), st.integers(4096, 8192))
def test_hostile_bytes_are_refused(seed: int, size: int) -> None:
    view = memoryview(bytearray(random.Random(seed).randbytes(size)))
    view[:8] = slot.MAGIC
    struct.pack_into("=HHI", view, 8, 1, 0, 1)
    view[16:24] = view[24:32]  # a commit word that matches
    with pytest.raises(SlotError):
        slot.read(view)


def test_another_major_version_is_refused_in_a_sentence() -> None:
    view = memory_for(b"x")
    write(view, b"x")
    struct.pack_into("=H", view, 8, 2)
    with pytest.raises(ProtocolMismatch, match=r"the slot speaks version 2\.1"):
        slot.read(view)


def test_what_does_not_fit_is_refused() -> None:
    view = memory_for(b"x" * 100)
    with pytest.raises(SlotError, match="does not fit"):
        slot.Writing(view, STAMP, len(view), 1)
    with pytest.raises(SlotError, match="128 bytes"):
        slot.Writing(
            view,
            slot.Stamp(job="j" * 129, step=0, round=0, rank=0, world_size=1, generation=1),
            1,
            1,
        )
    with pytest.raises(SlotError, match="up to 256 units, not 257"):
        slot.Writing(view, STAMP, 0, 0).commit([], range(257))
    with pytest.raises(SlotError, match="1 chunks were announced, 0 came"):
        slot.Writing(view, STAMP, 1, 1).commit([], ())


# --- whose turn it is ----------------------------------------------------------------------------


def test_one_writer_or_many_readers() -> None:
    fd = slot.create(slot.bytes_for(10))
    writer = slot.claim(fd, exclusive=True)
    assert writer is not None
    assert slot.claim(fd, exclusive=False) is None
    assert slot.claim(fd, exclusive=True) is None
    os.close(writer)
    readers = [slot.claim(fd, exclusive=False) for _ in range(2)]
    assert None not in readers
    assert slot.claim(fd, exclusive=True) is None


def test_nobody_can_shrink_a_slot_under_its_reader() -> None:
    fd = slot.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


HOLDER = """
import os, sys
from elastic.proto import slot
assert slot.claim(int(sys.argv[1]), exclusive=sys.argv[2] == "True") is not None
executed, held = os.pipe()  # closed on exec
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "1000"])  # a child that outlives it
os.close(held)
os.read(executed, 1)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_lock_goes_with_its_holder(exclusive: bool) -> None:
    fd = slot.create(8192)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(fd), str(exclusive)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"\n"
            assert slot.claim(fd, exclusive=True) is None
            holder.kill()
            holder.wait()
            assert slot.claim(fd, exclusive=True) is not None
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


WRITER = """
import itertools, mmap, os, sys
from elastic.proto import slot, sums
from elastic.proto.sums import Chunk
fd = int(sys.argv[1])
view = memoryview(mmap.mmap(fd, 0))
for first in map(int, sys.stdin):  # a fork for each death
    if (pid := os.fork()) == 0:
        claim = slot.claim(fd, exclusive=True)
        print(os.getpid(), flush=True)
        for n in itertools.count(first):
            stamp = slot.Stamp(job="job", step=n, round=0, rank=0, world_size=1, generation=n)
            image = n.to_bytes(8, "little") * (n % 4096)
            chunks = [Chunk(len(image), sums.checksum(image))]
            writing = slot.Writing(view, stamp, len(image) + 16, 1)
            writing.image[:-16] = image
            writing.commit(chunks, (n,))
    os.waitpid(pid, 0)
    print(flush=True)
"""


@pytest.mark.parametrize("kills", [40, pytest.param(300, marks=pytest.mark.soak)])
def test_a_writer_killed_at_any_moment_leaves_nothing_torn(kills: int) -> None:
    """What it left is whole, or no snapshot; never the bytes of two."""
    moments = random.Random(0)
    tries, whole, step = 0, 0, 0
    fd = slot.create(slot.bytes_for(8 * 4096 + 16))
    with (
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as forks,
        mapped(fd) as view,
    ):  # fmt: skip
        assert forks.stdin is not None
        assert forks.stdout is not None
        while tries < kills or not 0 < whole < tries:  # until both have been seen
            tries += 1
            print(step + 1, file=forks.stdin, flush=True)
            pid = int(forks.stdout.readline())
            written = step + 1 + moments.randrange(4)  # by its own progress: it may get no core
            while struct.unpack_from("=q", view, 32) < (written,):
                os.sched_yield()
            for _ in range(moments.randrange(100)):
                os.sched_yield()
            assert slot.claim(fd, exclusive=False) is None, "nobody reads what is written"
            os.kill(pid, signal.SIGKILL)
            assert forks.stdout.readline() == "\n"
            (step,) = struct.unpack_from("=q", view, 32)
            try:
                snapshot = slot.read(view)
            except SlotError:
                pass
            else:
                whole += 1
                assert (snapshot.stamp.step, snapshot.units) == (step, (step,))
                assert damaged(snapshot.image, snapshot.chunks) == []
                assert snapshot.image[:-16] == step.to_bytes(8, "little") * (step % 4096)
    os.close(fd)

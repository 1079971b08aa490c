"""A slot: one snapshot of one rank, in memory that outlives the rank and its agent.

A slot is a memfd that the guardian holds. Its image is, byte by byte, the safetensors file that a
flush writes and a peer receives, so a checksum is made once, in the copy, and travels with the bytes.
All numbers are native (one host, one byte order). Version 1.1; in 1.0 what is from 104 on was reserved:

| offset | size | type   | field       | meaning                                                   |
|-------:|-----:|--------|-------------|-----------------------------------------------------------|
|      0 |    8 | bytes  | magic       | `ELASTICS`                                                |
|      8 |    2 | uint16 | major       | version of the layout                                     |
|     10 |    2 | uint16 | minor       |                                                           |
|     12 |    4 | uint32 | chunks      | of the image that have a checksum each (`proto/sums.py`)  |
|     16 |    8 | uint64 | commit      | `generation`, once all else is written; 0 before, in each version |
|     24 |    8 | uint64 | generation  | grows each time that the slot is written                  |
|     32 |    8 | int64  | step        | finished optimizer steps                                  |
|     40 |    8 | int64  | round       | of the job, in which it was written                       |
|     48 |    4 | uint32 | rank        | global, of the writer                                     |
|     52 |    4 | uint32 | world_size  | of that round                                             |
|     56 |    8 | uint64 | image_bytes | the table of checksums, its last bytes, included          |
|     64 |    4 | uint32 | flags       | 1: to be written to storage                               |
|     68 |    4 | uint32 | units       | how many there are at 512, up to 256                      |
|     72 |    8 | uint64 | digest      | xxh3 of bytes 8 to 16, 24 to 72, 88 to 104, job, units and table |
|     80 |    8 | uint64 | all_units   | of the whole job's state; the keeper writes it, 0 before  |
|     88 |    4 | uint32 | local_rank  | of the writer                                             |
|     92 |    4 | uint32 | local_world_size | ranks of the writer's node                           |
|     96 |    8 | double | value       | what the script gave with it; no number: nothing          |
|    104 |    4 | uint32 | beliefs     | how many there are at 2560, up to 96                      |
|    108 |    4 |        |             | reserved, zero                                            |
|    112 |    8 | uint64 | believed    | xxh3 of the beliefs                                       |
|    120 |    8 | uint64 | later       | 1: to be written to storage too, as was said later        |
|    128 |  128 |        |             | reserved, zero                                            |
|    256 |  128 | bytes  | job         | UTF-8, filled up with zeros                               |
|    384 |  128 |        |             | reserved, zero                                            |
|    512 | 2048 | uint64 | units       | digests of what the image holds: equal ones, equal bytes  |
|   2560 | 1536 | uint64 | beliefs     | two each: a digest of what is divided among ranks of this |
|        |      |        |             | node, and how many ranks                                  |
|   4096 |      | bytes  | image       |                                                           |

**Who may touch it.** A writer holds an exclusive lock on the memfd, a reader a shared one, each on an
open file description of its own (`claim`). The kernel drops a lock with its holder, so no death
leaves a slot locked, and nothing changes under a reader.
"""

import fcntl
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from elastic.proto import claims, sums, version
from elastic.proto.errors import SlotError
from elastic.proto.moment import Moment
from elastic.proto.sums import Chunk

MAGIC = b"ELASTICS"
PAGE = 4096
JOB_BYTES = 128
MOST_UNITS = 256
MOST_BELIEFS = 96

_VERSION = struct.Struct("=HHI")  # at 8
_STAMP = struct.Struct("=QqqIIQII")  # at 24: generation to units
_WORD = struct.Struct("=Q")
_MORE = struct.Struct("=IId")  # at 88: local_rank to value
_BELIEFS = struct.Struct("=I4xQ")  # at 104: how many, and their digest
_BELIEF = struct.Struct("=QQ")
_COMMIT, _STAMP_AT, _UNIT_COUNT, _DIGEST, _ALL_UNITS, _MORE_AT, _LATER = 16, 24, 68, 72, 80, 88, 120
_BELIEFS_AT, _JOB, _UNITS, _BELIEFS_TABLE = 104, 256, 512, 2560
_PERSIST = 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Whose snapshot it is, and of when."""

    job: str
    step: int
    round: int
    rank: int
    world_size: int
    generation: int
    local_rank: int = 0
    local_world_size: int = 1
    persist: bool = False
    """It is to be written to storage."""
    value: float | None = None
    """What the script gave with it, by which the best are kept."""

    @property
    def node(self) -> range:
        """The ranks of the writer's node, who share out what they hold equal among their images."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


class Belief(NamedTuple):
    """Of the writer: it and other ranks of its node hold the same, and each writes a share of that."""

    digest: int
    """Of what they hold, and of who they are: the same for all of them, if it is true."""
    ranks: int
    """How many they are, the writer included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a committed slot holds. Its chunks are not verified yet."""

    stamp: Stamp
    image: memoryview
    chunks: tuple[Chunk, ...]
    units: tuple[int, ...]
    """Digests of what the image holds, up to `MOST_UNITS`; whoever holds the same has the same."""
    all_units: int
    """How many different units the whole job's state has; 0: not known to be whole."""
    beliefs: tuple[Belief, ...] = ()
    """Up to `MOST_BELIEFS`: it holds its share of what each is about, and no more."""

    @property
    def moment(self) -> Moment:
        return Moment(self.stamp.round, self.stamp.step)


def create(size: int) -> int:
    """A new empty slot of `size` bytes; returns its descriptor (close-on-exec). No page is touched."""
    fd = os.memfd_create("elastic-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def bytes_for(image_bytes: int) -> int:
    """Of memory that a slot for such an image needs."""
    return PAGE + -(-image_bytes // PAGE) * PAGE


def claim(fd: int, *, exclusive: bool) -> int | None:
    """Lock the slot behind `fd` for writing or for reading, if that can be had at once.

    Returns a new descriptor that holds the lock until it is closed, or None. Raises `OSError`.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if claims.claim(own, exclusive=exclusive):
            return own
    except BaseException:
        os.close(own)
        raise
    os.close(own)
    return None


class Writing:
    """A snapshot that is being written: nobody takes it for one until `commit`.

    `slot` is all of the memfd, mapped for writing, and claimed. What it held is gone from here on.
    Raises `SlotError` where the image or the job's name does not fit, or no moment has such numbers.
    """

    def __init__(self, slot: memoryview, stamp: Stamp, image_bytes: int, chunks: int) -> None:
        job = stamp.job.encode()
        if len(job) > JOB_BYTES:
            raise SlotError(f"a job's name has up to {JOB_BYTES} bytes in a slot, not {len(job)}")
        if bytes_for(image_bytes) > len(slot):
            raise SlotError(
                f"an image of {image_bytes} bytes does not fit into {len(slot)} of slot"
            )
        if not _sensible(stamp):
            raise SlotError(f"no rank takes a snapshot of step {stamp.step}, round {stamp.round}")
        self._slot = slot
        self._words = slot[:PAGE].cast("Q")
        self._generation = stamp.generation
        self._count = chunks
        self._words[_COMMIT // 8] = 0
        slot[0:8] = MAGIC
        _VERSION.pack_into(slot, 8, *version.SLOT, chunks)
        _STAMP.pack_into(
            slot, _STAMP_AT, stamp.generation, stamp.step, stamp.round, stamp.rank,
            stamp.world_size, image_bytes, _PERSIST * stamp.persist, 0,
        )  # fmt: skip
        value = math.nan if stamp.value is None else stamp.value
        _MORE.pack_into(slot, _MORE_AT, stamp.local_rank, stamp.local_world_size, value)
        self._words[_ALL_UNITS // 8] = self._words[_LATER // 8] = 0
        _BELIEFS.pack_into(slot, _BELIEFS_AT, 0, 0)
        slot[_JOB : _JOB + JOB_BYTES] = job.ljust(JOB_BYTES, b"\0")
        self.image = slot[PAGE : PAGE + image_bytes]

    def commit(
        self, chunks: Sequence[Chunk], units: Sequence[int], beliefs: Sequence[Belief] = ()
    ) -> None:
        """The image is whole but for its table, of these chunks. Raises `SlotError` where they are
        not as many as announced, or there are too many units or beliefs."""
        if len(chunks) != self._count:
            raise SlotError(f"{self._count} chunks were announced, {len(chunks)} came")
        if len(units) > MOST_UNITS:
            raise SlotError(f"a slot has up to {MOST_UNITS} units, not {len(units)}")
        if len(beliefs) > MOST_BELIEFS:
            raise SlotError(f"a slot has up to {MOST_BELIEFS} beliefs, not {len(beliefs)}")
        struct.pack_into("=I", self._slot, _UNIT_COUNT, len(units))
        struct.pack_into(f"={len(units)}Q", self._slot, _UNITS, *units)
        told = b"".join(_BELIEF.pack(*belief) for belief in beliefs)
        _BELIEFS.pack_into(self._slot, _BELIEFS_AT, len(beliefs), xxhash.xxh3_64_intdigest(told))
        self._slot[_BELIEFS_TABLE : _BELIEFS_TABLE + len(told)] = told
        table = sums.pack(chunks)
        at = len(self.image) - len(table)
        self.image[at:] = table
        self._words[_DIGEST // 8] = _digest(self._slot, self.image[at:])
        self._words[_COMMIT // 8] = self._generation


class Copying:
    """A snapshot of another node that is being copied into a slot, as it is: nobody takes it for one
    until `commit`.

    `slot` is all of the memfd, mapped for writing, and claimed; page: the other slot's first `PAGE`
    bytes. Raises `SlotError` where it does not fit, or holds nothing.
    """

    def __init__(self, slot: memoryview, page: memoryview) -> None:
        head = parse(page)
        if bytes_for(head.image_bytes) > len(slot):
            raise SlotError(
                f"an image of {head.image_bytes} bytes does not fit into {len(slot)} of slot"
            )
        self._slot = slot
        self._generation = head.stamp.generation
        words = slot[:PAGE].cast("Q")
        words[_COMMIT // 8] = 0
        slot[:_COMMIT] = page[:_COMMIT]
        slot[_COMMIT + 8 : PAGE] = page[_COMMIT + 8 : PAGE]
        self.image = slot[PAGE : PAGE + head.image_bytes]
        self.head = head

    def commit(self) -> None:
        """All of the image is there, verified against its table."""
        self._slot[:PAGE].cast("Q")[_COMMIT // 8] = self._generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a slot's first page says, before it is verified: `chunks`."""

    stamp: Stamp
    image_bytes: int
    chunk_count: int
    units: tuple[int, ...]
    all_units: int
    beliefs: tuple[Belief, ...]

    @property
    def table_at(self) -> int:
        """Of the image, where the table of its checksums begins."""
        return self.image_bytes - sums.ENTRY * self.chunk_count


def parse(page: memoryview) -> Head:
    """The head of a committed slot, by its first `PAGE` bytes or more.

    Raises `SlotError` where there is none, whole, and `ProtocolMismatch` where the version is too far.
    """
    if len(page) < PAGE or bytes(page[:8]) != MAGIC:
        raise SlotError("the slot is empty")
    (commit,) = _WORD.unpack_from(page, _COMMIT)
    if not commit:  # before its version, which may be half written
        raise SlotError("the slot's snapshot was not finished")
    major, minor, count = _VERSION.unpack_from(page, 8)
    version.check("the slot", version.Version(major, minor), version.SLOT)
    generation, step, round_, rank, world_size, length, flags, units = _STAMP.unpack_from(
        page, _STAMP_AT
    )
    if commit != generation:
        raise SlotError("the slot's header is damaged: it is of two snapshots")
    local_rank, local_world_size, value = _MORE.unpack_from(page, _MORE_AT)
    if not sums.ENTRY * count <= length or units > MOST_UNITS:
        raise SlotError("the slot's header is damaged: its sizes make no sense")
    stamp = Stamp(
        job=bytes(page[_JOB : _JOB + JOB_BYTES]).rstrip(b"\0").decode(errors="replace"),
        step=step,
        round=round_,
        rank=rank,
        world_size=world_size,
        generation=generation,
        local_rank=local_rank,
        local_world_size=local_world_size,
        persist=bool(flags & _PERSIST or _WORD.unpack_from(page, _LATER)[0]),
        value=value if math.isfinite(value) else None,
    )
    if not _sensible(stamp):
        raise SlotError("the slot's header is damaged: no rank takes such a snapshot")
    return Head(
        stamp=stamp,
        image_bytes=length,
        chunk_count=count,
        units=struct.unpack_from(f"={units}Q", page, _UNITS),
        all_units=_WORD.unpack_from(page, _ALL_UNITS)[0],
        beliefs=_beliefs(page),
    )


def _beliefs(page: memoryview) -> tuple[Belief, ...]:
    count, digest = _BELIEFS.unpack_from(page, _BELIEFS_AT)
    told = page[_BELIEFS_TABLE : _BELIEFS_TABLE + _BELIEF.size * min(count, MOST_BELIEFS)]
    if count and (count > MOST_BELIEFS or xxhash.xxh3_64_intdigest(told) != digest):
        raise SlotError("the slot's header is damaged: its beliefs are not those that were written")
    return tuple(map(Belief._make, _BELIEF.iter_unpack(told)))


def chunks(page: memoryview, table: memoryview) -> tuple[Chunk, ...]:
    """The checksums of an image, by its slot's first page and their table. Raises `SlotError` where
    either is damaged."""
    head = parse(page)
    _check(page, table)
    return sums.unpack(table, head.image_bytes)


def _check(page: memoryview, table: memoryview) -> None:
    if _WORD.unpack_from(page, _DIGEST)[0] != _digest(page, table):
        raise SlotError("the slot's header is damaged: its checksum does not match")


def read(slot: memoryview) -> Snapshot:
    """The snapshot in a slot; all sizes are checked, and all but the image's bytes is verified.

    Raises `SlotError` where there is none, whole, and `ProtocolMismatch` where the version is too far.
    """
    head = look(slot)
    image = slot[PAGE : PAGE + head.image_bytes]
    return Snapshot(
        stamp=head.stamp,
        image=image,
        chunks=sums.unpack(image[head.table_at :], head.image_bytes),
        units=head.units,
        all_units=head.all_units,
        beliefs=head.beliefs,
    )


def look(slot: memoryview) -> Head:
    """As `read`, for who does not need the chunks."""
    page = memoryview(bytes(slot[:PAGE]))  # what is checked is what was read: it may be written now
    head = parse(page)
    if head.image_bytes > len(slot) - PAGE:
        raise SlotError("the slot's header is damaged: its sizes make no sense")
    _check(page, slot[PAGE + head.table_at : PAGE + head.image_bytes])
    return head


def mark_whole(slot: memoryview, all_units: int) -> None:
    """Note in a committed slot that its moment is whole, with so many units in all."""
    slot[:PAGE].cast("Q")[_ALL_UNITS // 8] = all_units


def mark_persist(slot: memoryview) -> None:
    """Note in a committed slot that it is to be written to storage."""
    slot[:PAGE].cast("Q")[_LATER // 8] = 1


def _sensible(stamp: Stamp) -> bool:
    """The numbers are those of a moment, and of a rank on its node."""
    return (
        min(stamp.step, stamp.round, stamp.local_rank) >= 0
        and stamp.local_rank < stamp.local_world_size
        and 0 <= stamp.node.start <= stamp.rank < stamp.node.stop <= stamp.world_size
    )


def _digest(slot: memoryview, table: memoryview) -> int:
    digest = xxhash.xxh3_64()
    units = _STAMP.unpack_from(slot, _STAMP_AT)[-1]
    for start, end in (
        (8, _COMMIT),
        (_STAMP_AT, _DIGEST),
        (_MORE_AT, _MORE_AT + _MORE.size),
        (_JOB, _JOB + JOB_BYTES),
        (_UNITS, _UNITS + 8 * units),
    ):
        digest.update(slot[start:end])
    digest.update(table)
    return digest.intdigest()

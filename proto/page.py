"""A rank's progress page: 4096 bytes of memory that the rank writes and its agent reads.

The page is a sealed memfd, so neither side can shrink it under the other. All numbers are native
(one host, one byte order); every field of 8 bytes lies on an 8-byte boundary and is stored and
loaded whole, so a reader never sees half of one. Version 1.1; 1.0 had no device steps:

| offset | size | type   | field       | meaning                                                   |
|-------:|-----:|--------|-------------|-----------------------------------------------------------|
|      0 |    8 | bytes  | magic       | `ELASTICP`                                                |
|      8 |    2 | uint16 | major       | version of the layout                                     |
|     10 |    2 | uint16 | minor       |                                                           |
|     12 |    4 | uint32 | size        | of the page, in bytes: 4096                               |
|     16 |    8 | int64  | owner       | pid of the process that writes; 0: nobody yet             |
|     24 |    8 | int64  | ticks       | signs of life: optimizers' steps; told ones where none is |
|     32 |    8 | int64  | tick_ns     | CLOCK_MONOTONIC at the last tick; 0: none                 |
|     40 |    8 | int64  | step        | last step that the script told + 1; 0: it never told      |
|     48 |    8 | int64  | step_ns     | CLOCK_MONOTONIC when it told                              |
|     56 |    8 | int64  | claims      | processes that have owned the page                        |
|     64 |    8 | int64  | changes     | changes of phase; the current one is record `changes % 2` |
|     72 |   56 |        |             | reserved, zero                                            |
|    128 |    8 | int64  | phase_ns    | record 0: CLOCK_MONOTONIC at the change                   |
|    136 |   56 | bytes  | phase       | record 0: name, UTF-8, filled up with zeros               |
|    192 |   64 |        |             | record 1, as record 0                                     |
|    256 |    8 | int64  | beats       | steps of the optimizer that stepped first                 |
|    264 |    8 | int64  | waited_ns   | that the main thread has waited for other ranks, in all   |
|    272 |    8 | int64  | stage       | key of whom it sends to and receives from; 0: nobody      |
|    280 |    8 | int64  | device      | steps that were measured on the rank's device             |
|    288 |  224 |        |             | reserved, zero                                            |
|    512 | 2048 |        | ring        | 128 records, of beat n at n % 128:                        |
|        |    8 | int64  | end_ns      | CLOCK_MONOTONIC                                           |
|        |    8 | int64  | waited_ns   | what that was then                                        |
|   2560 | 1536 |        | device ring | 32 records, of measured step n at n % 32, in nanoseconds: |
|        |    8 | int64  | number      | beats at the step's end                                   |
|        |    8 | int64  | forward     | all but what follows; waits for the host are in each      |
|        |    8 | int64  | backward    |                                                           |
|        |    8 | int64  | optimizer   |                                                           |
|        |    8 | int64  | collectives | that the stream waited for other ranks                    |
|        |    8 | int64  | starved     | 1: the device waited for its host, 0: the host was ahead  |

A beat writes its record, then `beats`; a measured step its own, then `device`. A change of phase writes the record that is not current, then adds one to `changes`: a writer killed
at any point leaves the old phase whole.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass

from elastic.proto import version
from elastic.proto.errors import PageError

MAGIC = b"ELASTICP"
SIZE = 4096
OWNER_OFFSET = 16
PHASE_BYTES = 56

_HEADER = struct.Struct("=8sHHI")
_STAMP = struct.Struct("=q")
_OWNER, TICKS, TICK_NS, _STEP, _STEP_NS, _CLAIMS, _CHANGES = range(2, 9)  # in words of 8 bytes
BEATS, WAITED_NS, STAGE, DEVICE_STEPS = range(32, 36)
RING, KEPT = 64, 128
"""Where the ring begins, and how many beats it keeps."""
DEVICE_RING, DEVICE_KEPT, DEVICE_RECORD = 320, 32, 6
"""The same of the device's, and the words of a record."""
_RECORD = 128
_RECORD_SIZE = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a page says; stamps are CLOCK_MONOTONIC in nanoseconds, 0 where nothing happened yet."""

    owner: int
    """Pid of the process that writes the page; 0: none yet."""
    claims: int
    """How many processes have owned it, one after the other."""
    phase: str
    """What the script says it is doing; empty: it said nothing."""
    phase_ns: int
    step: int | None
    """The last step that the script told, or None."""
    step_ns: int
    ticks: int
    """Signs of life: they grow while it trains, but are no step number."""
    tick_ns: int


def create() -> int:
    """A new empty page; returns its descriptor (close-on-exec)."""
    fd = os.memfd_create("elastic-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, _HEADER.pack(MAGIC, *version.PAGE, SIZE), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def open_page(fd: int, *, write: bool = False) -> mmap.mmap:
    """Map the page behind `fd`, which may be closed then.

    Raises `PageError` where it is no page and `ProtocolMismatch` where its version is too far off.
    """
    try:
        if os.fstat(fd).st_size != SIZE:
            raise PageError(f"descriptor {fd} is no progress page: its size is not {SIZE} bytes")
        page = mmap.mmap(fd, SIZE, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise PageError(f"descriptor {fd} is no progress page: {error}") from error
    _check(page)
    return page


def read(page: mmap.mmap | bytes) -> Progress:
    """What the page says now; safe while the rank writes, and after it was killed."""
    _check(page)
    with memoryview(page) as raw, raw.cast("q") as words:
        for _ in range(8):  # while no change has finished, only the other record can be written to
            changes = words[_CHANGES]
            at = _RECORD + _RECORD_SIZE * (changes % 2)
            record = bytes(raw[at : at + _RECORD_SIZE])
            if words[_CHANGES] == changes:
                break
        return Progress(
            owner=words[_OWNER],
            claims=words[_CLAIMS],
            phase=record[8:].rstrip(b"\0").decode(errors="replace"),
            phase_ns=_STAMP.unpack_from(record)[0],
            step=words[_STEP] - 1 if words[_STEP] else None,
            step_ns=words[_STEP_NS],
            ticks=words[TICKS],
            tick_ns=words[TICK_NS],
        )


def ticks(page: mmap.mmap) -> tuple[int, int, int]:
    """Signs of life, when the last was, and when the phase changed last; of a page that was opened,
    so not checked."""
    with memoryview(page) as raw, raw.cast("q") as words:
        changed = words[(_RECORD + _RECORD_SIZE * (words[_CHANGES] % 2)) // 8]
        return words[TICKS], words[TICK_NS], changed


@dataclass(frozen=True, slots=True)
class Beat:
    """The end of a step."""

    number: int
    end_ns: int
    """CLOCK_MONOTONIC."""
    waited_ns: int
    """That the main thread had waited for other ranks by then, in all."""


def beats(page: mmap.mmap, after: int) -> list[Beat]:
    """Those after number `after` that are still kept, oldest first; of a page that was opened, so not checked."""
    with memoryview(page) as raw, raw.cast("q") as words:
        newest = words[BEATS]
        found = []
        for number in range(max(after + 1, newest - KEPT + 2, 1), newest + 1):
            at = RING + 2 * (number % KEPT)
            found.append(Beat(number, words[at], words[at + 1]))
        whole = words[BEATS] - KEPT + 1  # what was written over meanwhile is none
    return [beat for beat in found if beat.number > whole]


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What a step took on its rank's device, in nanoseconds."""

    number: int
    """Beats at its end."""
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    collectives_ns: int
    starved: bool
    """The device waited for its host."""

    @property
    def compute_ns(self) -> int:
        return self.forward_ns + self.backward_ns + self.optimizer_ns


def device_steps(page: mmap.mmap, after: int) -> tuple[list[DeviceStep], int]:
    """Those measured after the first `after`, as far as they are kept, oldest first, and how many there were in all."""
    with memoryview(page) as raw, raw.cast("q") as words:
        newest = words[DEVICE_STEPS]
        found = []
        for count in range(max(after + 1, newest - DEVICE_KEPT + 2, 1), newest + 1):
            at = DEVICE_RING + DEVICE_RECORD * (count % DEVICE_KEPT)
            step, forward, backward, optimizer, collectives, starved = words[
                at : at + DEVICE_RECORD
            ]
            took = DeviceStep(step, forward, backward, optimizer, collectives, bool(starved))
            found.append((count, took))
        whole = words[DEVICE_STEPS] - DEVICE_KEPT + 1  # what was written over meanwhile is none
    return [step for count, step in found if count > whole], newest


def stage(page: mmap.mmap) -> int:
    """Key of those whom the rank sends to and receives from; 0: nobody."""
    with memoryview(page) as raw, raw.cast("q") as words:
        return words[STAGE]


def _check(page: mmap.mmap | bytes) -> None:
    if len(page) != SIZE:
        raise PageError(f"a progress page has {SIZE} bytes, not {len(page)}")
    magic, major, minor, size = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise PageError("the bytes are no progress page: they begin with something else")
    version.check("the progress page", version.Version(major, minor), version.PAGE)
    if size != SIZE:
        raise PageError(f"the progress page says it has {size} bytes, not {SIZE}")


class PageWriter:
    """The one process that writes a page. Its methods cost about a microsecond and never block.

    `words` is the page in words of 8 bytes, for the one caller that cannot afford a method.
    """

    def __init__(self, page: mmap.mmap, pid: int) -> None:
        self._page = page
        self.words = memoryview(page).cast("q")
        self.pid = pid
        self._ticked = 0
        """`TICKS` at the last step that the script told."""

    @classmethod
    def claim(cls, fd: int, pid: int) -> "PageWriter | None":
        """Own the page behind `fd`, or None while another process that lives owns it.

        Raises what `open_page` raises.
        """
        page = open_page(fd, write=True)
        fcntl.lockf(fd, fcntl.LOCK_EX)  # between two processes that claim at the same moment
        try:
            writer = cls(page, pid)
            owner = writer.words[_OWNER]
            if owner not in (0, pid) and lives(owner):
                return None
            if owner != pid:
                writer.words[_CLAIMS] += 1
                writer.words[_OWNER] = pid
            return writer
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN)

    def tick(self) -> None:
        """One more sign of life."""
        words = self.words
        words[TICK_NS] = time.monotonic_ns()
        words[TICKS] += 1

    def step(self, number: int) -> None:
        """The script has finished step `number` (0 or more); a sign of life where no optimizer gave one."""
        if not 0 <= number < 2**62:
            raise ValueError(f"a step is 0 or more, not {number}")
        self.words[_STEP_NS] = time.monotonic_ns()
        self.words[_STEP] = number + 1
        if self.words[TICKS] == self._ticked:
            self.tick()
        self._ticked = self.words[TICKS]

    def progress(self) -> Progress:
        """What it has said."""
        return read(self._page)

    def phase(self, name: str) -> None:
        """The script is now doing `name`; what is beyond 56 bytes of UTF-8 is cut off."""
        text = name.encode(errors="replace")[:PHASE_BYTES]
        text = text.decode(errors="ignore").encode()  # no half of a character at the end
        changes = self.words[_CHANGES] + 1
        at = _RECORD + _RECORD_SIZE * (changes % 2)
        self.words[at // 8] = time.monotonic_ns()
        self._page[at + 8 : at + _RECORD_SIZE] = text.ljust(PHASE_BYTES, b"\0")
        self.words[_CHANGES] = changes


def lives(pid: int) -> bool:
    """Whether a process of that number exists (a zombie does)."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True

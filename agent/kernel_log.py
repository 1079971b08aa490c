"""What the kernel has just logged that may have ended a rank: faults of our GPUs and of this machine, and processes
that it killed for want of memory. Where we may not read its log, as in most containers, the Xids that NVML tells of."""

import asyncio
import errno
import os
import re
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from elastic.agent.oom import AGE
from elastic.agent.visible_devices import visible_devices
from elastic.agent.xids import Xids

KERNEL_LOG = "/dev/kmsg"
GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU that we may see, named by its PCI address."""
MOST_RECORDS = 1000
"""That are read at once."""
PATIENCE = 0.5
"""Seconds that the driver has to say which GPUs are ours."""
LINES, LENGTH = 8, 300
"""That are told of one failure, and characters of each."""

_OOM = re.compile(r"oom-kill:|out of memory: kill", re.IGNORECASE)
_VICTIM = re.compile(r"\bpid=(\d+)|Killed process (\d+)")
_GPU = re.compile(r"NVRM: .*?\b([\da-f]{4,8}:[\da-f]{2}:[\da-f]{2})\b", re.IGNORECASE)
_FAULT = re.compile(
    r"NVRM: .*(?:\bXid\b|fallen off the bus)|\bSXid\b|\[Hardware Error\]|Memory failure: 0x|EDAC .*\bUE\b"
)


_DETAIL = re.compile(r"\[Hardware Error\](?!.*(?:uncorrect|fatal))", re.IGNORECASE)
"""A record of firmware's has many lines."""


class KernelLog:
    """From now on."""

    def __init__(self, visible: str | None = None) -> None:
        """visible: CUDA_VISIBLE_DEVICES of the ranks; other GPUs may be other jobs'."""
        self._visible = visible
        self._gpus: frozenset[str] | None = None
        self._asking: threading.Thread | None = None
        self._fd = -1
        self._heard = deque[tuple[float, str]](maxlen=64)
        """Lines that may matter, and when they came, in the loop's time: the kernel's own clock goes its own way."""
        self._xids: Xids | None = None
        try:
            self._fd = open_log()
            os.lseek(self._fd, 0, os.SEEK_END)
            asyncio.get_running_loop().add_reader(self._fd, self._hear)
        except OSError:
            self.close()
            self._xids = None if self._visible == "" else Xids()

    def _hear(self) -> None:
        now = asyncio.get_running_loop().time()
        try:
            self._heard += (
                (now, line)
                for record in islice(records(self._fd), MOST_RECORDS)
                if (line := text(record)) and (_OOM.search(line) or _FAULT.search(line))
            )
        except OSError:
            self.close()

    def lines(self, pids: Collection[int], *, struck: bool) -> list[str]:
        """What may have to do with a rank's end, the most telling first; pids: our ranks'; struck: the OOM killer ended one of our
        cgroup, whose number the kernel may have otherwise."""
        since = asyncio.get_running_loop().time() - AGE
        if self._xids is not None:
            lines = self._xids.lines(since)
        elif self._fd >= 0:
            self._hear()
            lines = [line for at, line in self._heard if at >= since]
        else:
            lines = []
        if not lines:
            return []
        gpus = self._ours()
        if self._xids is not None:
            return [x for x in lines if not gpus or concerns(x, gpus, pids, struck=struck)][:LINES]
        return telling(x for x in lines if concerns(x, gpus, pids, struck=struck))

    def _ours(self) -> frozenset[str] | None:
        """As `usable`; None: the driver does not say, as it may be what hangs."""
        if self._asking is None:
            self._asking = threading.Thread(target=self._ask, daemon=True, name="gpus")
            self._asking.start()
        self._asking.join(PATIENCE)
        return self._gpus

    def _ask(self) -> None:
        self._gpus = usable(self._visible)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._xids is not None:
            self._xids.close()


def telling(lines: Iterable[str]) -> list[str]:
    """As many as are told, oldest first, but details of errors that may have been corrected last."""
    return sorted(lines, key=lambda line: bool(_DETAIL.search(line)))[:LINES]


def usable(visible: str | None, folder: Path = GPUS, dev: Path = Path("/dev")) -> frozenset[str]:
    """PCI addresses, without their function, of the GPUs that CUDA_VISIBLE_DEVICES shows; of all that we may use where
    it is not set or shows none of them whole, as with MIG; of none where it is empty. A cgroup may keep others from us,
    which have no number then."""
    if visible == "":
        return frozenset()
    try:
        told = {
            gpu.name: (gpu / "information").read_text(errors="replace") for gpu in folder.iterdir()
        }
    except OSError:
        return frozenset()
    there = sorted(name for name, about in told.items() if _may_use(about, dev))
    names = visible_devices(visible, [_uuid(told[name]) for name in there])
    shown = [there[int(name)] for name in names if name.isdecimal()]
    return frozenset(name.lower().partition(".")[0] for name in shown or there)


def _uuid(about: str) -> str:
    """about: what the driver tells of a GPU."""
    found = re.search(r"^GPU UUID:\s*(\S+)", about, re.MULTILINE)
    return found[1] if found else ""


def _may_use(about: str, dev: Path) -> bool:
    minor = re.search(r"^Device Minor:\s*(\d+)", about, re.MULTILINE)
    if minor is None:
        return True
    try:
        os.close(os.open(dev / f"nvidia{minor[1]}", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def concerns(
    line: str, gpus: Collection[str] | None, pids: Collection[int], *, struck: bool
) -> bool:
    """Other jobs' processes and GPUs are in the same log. gpus: ours; None: nobody knows which are."""
    if _OOM.search(line):
        found = _VICTIM.search(line)
        return struck or (found is not None and int(found[1] or found[2]) in pids)
    gpu = _GPU.search(line)
    return gpu is None or gpus is None or gpu[1].lower() in gpus


def open_log() -> int:
    """A descriptor that stands at the oldest record. Raises OSError."""
    return os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def records(fd: int) -> Iterator[str]:
    """Those that nobody has read by this descriptor, `level,sequence,microseconds since boot,...;text`. Raises OSError."""
    while True:
        try:
            record = os.read(fd, 8192)
        except BlockingIOError:
            return
        except BrokenPipeError:  # overwritten while we read: go on with the next
            continue
        if not record:  # some containers have /dev/null or a console in its place
            raise OSError(errno.ENODATA, "it has an end, and is no kernel's log")
        yield record.decode(errors="replace")


def text(record: str) -> str:
    """What the kernel itself says in one; empty for what a program wrote there."""
    head, _, said = record.partition(";")
    level = head.partition(",")[0]
    by_kernel = level.isdecimal() and int(level) >> 3 == 0
    return said.partition("\n")[0][:LENGTH] if by_kernel else ""

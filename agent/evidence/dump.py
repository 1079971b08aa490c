"""Stacks that a rank's own interpreter writes when it is asked by a signal, where nobody may read its memory.

At its start the rank has called `faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)`
with a memfd in append mode that we hold, too: writing there never blocks. The handler is C code, so it
runs in a loop that holds the GIL as well; not while the rank is stopped or in D state.

The handler walks frames that may change under it: an interpreter that runs Python meanwhile can die of it, of some
hundred signals where threads are busy. So only a rank is asked that holds the GIL in a call of C code.

The text has no end mark. The kernel has one: while a handler runs, its thread blocks the signal.
"""

import asyncio
import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from elastic.proto import looks
from elastic.proto.looks import DUMP_SIGNAL, Frame, Thread

_LONGEST = 1 << 20
"""Bytes of a text that are read."""
_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
"""Seconds between looks at whether it is whole."""
_BIT = 1 << (DUMP_SIGNAL - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a rank writes."""

    fd: int
    """Our descriptor of it."""
    number: int
    """The rank's."""


class Unanswered(Exception):
    """Why there is no text."""


async def ask(pid: int, target: Target, *, deadline: float) -> str:
    """What the rank says of its threads. Raises Unanswered, at `deadline` (of the loop's time) at the latest.

    A rank that has no handler (it did not get that far, or runs another program by now), or whose
    descriptor means another file by now, is not asked: the one would end it, the other write to
    that file. One that has not answered the last time is not asked again, but waited for.
    """
    _check(pid, target)
    loop = asyncio.get_running_loop()
    deaf = {tid for tid, mask in _masks(pid, "SigBlk").items() if mask & _BIT}
    if not _is_pending(pid):
        try:
            os.ftruncate(target.fd, 0)
            os.kill(pid, DUMP_SIGNAL)
        except OSError as error:
            raise Unanswered(f"it cannot be asked: {error.strerror}") from error
    pause = _PAUSE
    while True:
        whole = not _is_pending(pid) and not _is_writing(pid, deaf)
        if whole and (text := _written(target)):
            return text.decode(errors="replace")
        if not _masks(pid, "SigCgt"):
            raise Unanswered("it ended meanwhile")
        if loop.time() >= deadline:
            raise Unanswered("it did not answer a signal")
        await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _written(target: Target) -> bytes:
    try:
        return os.pread(target.fd, _LONGEST, 0)
    except OSError as error:  # its round is over
        raise Unanswered(f"what it wrote is gone: {error.strerror}") from error


def _check(pid: int, target: Target) -> None:
    caught = _masks(pid, "SigCgt")
    if not caught:
        raise Unanswered("it is gone")
    if not all(mask & _BIT for mask in caught.values()):
        raise Unanswered("it has no handler for the signal that asks")
    try:
        theirs, ours = os.stat(f"/proc/{pid}/fd/{target.number}"), os.fstat(target.fd)
    except OSError as error:
        raise Unanswered(f"where it would write is not known: {error.strerror}") from error
    if (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
        raise Unanswered("it has closed what it would write to")


def _masks(pid: int, name: str) -> dict[int, int]:
    """One of the sets of signals in /proc, by thread."""
    found = {}
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{tid}/status").read_text(errors="replace")
                if match := re.search(rf"^{name}:\s*([0-9a-f]+)$", text, re.MULTILINE):
                    found[int(tid)] = int(match[1], 16)
    return found


def _is_pending(pid: int) -> bool:
    return any(mask & _BIT for name in ("ShdPnd", "SigPnd") for mask in _masks(pid, name).values())


def _is_writing(pid: int, deaf: set[int]) -> bool:
    """Whether a thread is in the handler; deaf: threads that block the signal anyhow."""
    return any(mask & _BIT for tid, mask in _masks(pid, "SigBlk").items() if tid not in deaf)


_HEADER = re.compile(
    r"(?:(?:Current t|T)hread 0x[0-9a-f]+(?: \[(?P<name>.*)\])?|Stack)"
    r" \(most recent call first\):"
)
_FRAME = re.compile(r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_MORE = re.compile(r"  \.\.\.|plus \d+ frames")
"""Up to 3.13, and since."""


def parse(text: str, pid: int) -> tuple[Thread, ...]:
    """faulthandler's text, as Python 3.11 to 3.14 write it: the main thread first, the others without a
    number. 100 threads at most, the newest, so without the main one where there are more; of 100 frames
    each, the innermost."""
    found: list[tuple[str, list[Frame]]] = []
    whole = True
    for line in text.splitlines():
        if match := _HEADER.fullmatch(line):
            found.append((match["name"] or "", []))
        elif line == "...":
            whole = False
        elif found and (match := _FRAME.fullmatch(line)):
            number = int(match["line"]) if match["line"].isdecimal() else 0
            found[-1][1].append(looks.frame(match["name"], match["file"] or "???", number))
        elif found and _MORE.fullmatch(line):
            found[-1][1].append(Frame(function="<more>", file=""))
    # The oldest comes last: the main thread, or of a fork the one that forked, which is main there.
    main = len(found) - 1 if whole else None
    threads = (
        Thread(tid=pid if i == main else 0, name=looks.text(name), frames=looks.cut(frames))
        for i, (name, frames) in enumerate(found)
    )
    return looks.fit(threads, pid)

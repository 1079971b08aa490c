"""Inside the user's process: what it does, told to its agent from a thread of its own.

Which collective each of its process groups has issued last, or its device is at, torch's flight recorder knows, also of what DTensor and
compiled code issue, and only this process can read it. Its stacks are told for an agent that may not read
our memory. The thread waits without the GIL, costs nothing meanwhile, and where it does not answer, the
process is stopped or something holds the GIL, which is an answer, too. It begins with the first process
group, which has threads of its own, so no script gets its first thread by us.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import socket

    from elastic.agent.hook import Attachment
    from elastic.proto.looks import Collective, Frame, Thread, Told

C10D = "torch.distributed.distributed_c10d"
NCCL = "_dump_nccl_trace_json"
DATAGRAM = 1 << 16
"""Bytes of an answer at most."""
_TRIES, _NAP = 5, 0.001
"""Waits for the GIL that are measured, after as many seconds without it."""
_RAN = 0.0002
"""Seconds of the processor, more than a thread needs to begin to wait for the GIL."""
MOST_GROUPS = 64
"""Whose last collective is told."""


def follow(attachment: "Attachment") -> None:
    """Offer the agent to be asked, once the script makes a process group. torch.distributed is imported."""
    module: Any = sys.modules[C10D]
    make = module._new_process_group_helper

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        if module._new_process_group_helper is made:
            module._new_process_group_helper = make
        with contextlib.suppress(Exception):
            _offer(attachment)
        return group

    module._new_process_group_helper = made


def _offer(attachment: "Attachment") -> None:
    import socket

    from elastic.proto.link import RecorderOffered

    if attachment.page.pid != os.getpid():
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if attachment.send(RecorderOffered(), (theirs.fileno(),)):
            threading.Thread(
                target=_serve, args=(ours,), name="elastic-recorder", daemon=True
            ).start()


def _serve(end: "socket.socket") -> None:
    with contextlib.suppress(OSError), end:
        encoded(told())  # all that it needs is imported now, and not while a loop has the GIL
        while end.recv(1):
            end.send(encoded(told()))


def encoded(said: "Told") -> bytes:
    """As a datagram: without its stacks where it is too long for one, since paths may be of any letters."""
    from dataclasses import replace

    from elastic.proto import codec

    whole = codec.dumps(said).encode()
    return whole if len(whole) <= DATAGRAM else codec.dumps(replace(said, threads=())).encode()


def told() -> "Told":
    """Its collectives, its transfers, its stacks and its device. What torch keeps for itself may be another thing some day."""
    from elastic.agent.device_times import on_device
    from elastic.agent.waits import transfers
    from elastic.proto.looks import OnDevice, Told

    issued, counted, device = None, None, OnDevice.UNKNOWN
    with contextlib.suppress(Exception):
        issued = tuple(current_collectives())
    with contextlib.suppress(Exception):
        counted = transfers()
    with contextlib.suppress(Exception):
        device = on_device()
    return Told(collectives=issued, threads=stacks(), on_device=device, transfers=counted)


def current_collectives() -> Iterator["Collective"]:
    """Of each process group of each library."""
    library = sys.modules.get("torch._C._distributed_c10d")
    for name in (NCCL, "_dump_fr_trace_json"):
        if dump := getattr(library, name, None):
            entries = json.loads(dump(True, False)).get("entries", ())
            yield from current_of_each(entries, device=name == NCCL)


class _Work(NamedTuple):
    """One that torch waits for: a collective, a send or a receive, or some of them at once."""

    group: str
    p2p: bool
    number: tuple[int, int]
    """Among the group's collectives, and among its transfers."""
    op: str
    sizes: str
    state: str
    retired: bool
    """Torch's watchdog has seen its end."""


class _At(NamedTuple):
    work: _Work
    over: bool
    before: _Work | None
    """Of the same group, as far as it is recorded."""


def current_of_each(entries: Sequence[dict[str, Any]], *, device: bool) -> Iterator["Collective"]:
    """Of each process group the collective and the send or receive issued last; on a device the first collective that is
    not over, for its host runs ahead of it as it likes. entries: of torch's flight recorder, oldest first."""
    works = _works(entries)
    complete = not entries or not entries[0].get("record_id")
    # Torch reads the end of what is still being issued, which is not recorded yet, as one that has come.
    issuing = works[-1] if device and any(work.retired for work in works) else None
    current: dict[tuple[str, bool], _At] = {}
    newest: dict[tuple[str, bool], _Work] = {}
    for work in works:
        key = work.group, work.p2p
        over = work.retired or (work.state == "completed" and work is not issuing)
        if not device or work.p2p or over or key not in current or current[key].over:
            current.pop(key, None)  # the newest come last
            current[key] = _At(work, over, newest.get(key))
        newest[key] = work
    for at in list(current.values())[-MOST_GROUPS:]:
        reaches_back = complete or at.before is not None or at.work.number[0] <= 1
        yield _told(at, device, known=not device or at.work.p2p or at.over or reaches_back)


def _told(at: _At, device: bool, *, known: bool) -> "Collective":
    """known: what was before it is over; else the device may be at one that is forgotten, and that this waits is all
    that is told."""
    from elastic.proto.collectives import kind
    from elastic.proto.looks import Collective

    work, before = at.work, at.before
    first, stride, count = row(_members(work.group))
    return Collective(
        group=work.group[:64],
        seq=work.number[0] if known else 0,
        op=work.op[:64] if known else "",
        sizes=work.sizes[:128] if known else "",
        p2p=work.p2p,
        device=device,
        started=not at.over and work.state != "scheduled",
        done=at.over,
        before=kind(before.op[:64], before.sizes[:128]) if known and before else "",
        first=first,
        stride=stride,
        count=count,
    )


def _members(group: str) -> Collection[int]:
    """The job's ranks of a process group, which is called so here; none where there is no such group, or it is not known
    which they are."""
    from elastic.agent.waits import of_job

    module: Any = sys.modules.get(C10D)
    names = {} if module is None else module._world.pg_names
    found = next((one for one, name in names.items() if name == group), None)
    return () if found is None or not of_job() else module._world.pg_group_ranks[found]


def row(ranks: Collection[int]) -> tuple[int, int, int]:
    """The first, how far they are apart, and how many; of no such row none."""
    ordered = sorted(ranks)
    stride = ordered[1] - ordered[0] if len(ordered) > 1 else 1
    row = range(ordered[0], ordered[-1] + 1, stride) if ordered else range(0)
    return (row.start, stride, len(row)) if list(row) == ordered and ordered else (0, 1, 0)


def _works(entries: Iterable[dict[str, Any]]) -> list[_Work]:
    """Of what is issued at once torch records each part, which has no end, and then all of it, which has."""
    works: dict[tuple[str, tuple[int, int]], _Work] = {}
    for entry in entries:
        group = str(entry["process_group"][0])
        number = int(entry["collective_seq_id"]), int(entry.get("p2p_seq_id") or 0)
        part = works.get((group, number))
        works[group, number] = _Work(
            group=group,
            p2p=bool(entry.get("is_p2p")) or (part is not None and part.p2p),
            number=number,
            op=str(entry["profiling_name"]),
            sizes=str(entry["input_sizes"]),
            state=str(entry.get("state")),
            retired=bool(entry.get("retired")),
        )
    return list(works.values())


def stacks() -> tuple["Thread", ...]:
    """Of the main thread and of the deepest others but this one; nothing moves meanwhile, for we hold the GIL."""
    from elastic.proto.looks import TOLD_FRAMES, Thread, cut, fit

    main, pid = threading.main_thread().ident, os.getpid()
    wanted = None
    with contextlib.suppress(OSError):
        wanted = _gil_is_wanted()
    found = []
    for ident, frame in sys._current_frames().items():
        frames = cut([*_frames(frame)], TOLD_FRAMES)
        if ident == main:
            found.append(Thread(tid=pid, frames=frames, gil=wanted))
        elif ident != threading.get_ident():
            found.append(Thread(tid=0, frames=frames))
    found.sort(key=lambda thread: -len(thread.frames))
    return fit(found, pid, 2 * TOLD_FRAMES)


def _gil_is_wanted() -> bool | None:
    """Whether the main thread runs Python and nothing else: it keeps the GIL for as long as an interpreter lets it, most
    times, for others may want it, too. None: it did not run."""
    main = threading.main_thread().ident
    assert main is not None
    clock = time.pthread_getcpuclockid(main)
    kept = []
    with _scheduling() as ready:
        for _ in range(_TRIES):
            waited, ran = _wait_for_gil(clock, ready)
            if ran > _RAN:
                kept.append(waited > sys.getswitchinterval() / 2)
            if 2 * max(sum(kept), len(kept) - sum(kept)) > _TRIES:
                break  # the others would change nothing
    return 2 * sum(kept) > len(kept) if kept else None


def _wait_for_gil(clock: int, ready: Callable[[], float]) -> tuple[float, float]:
    """Seconds that nobody gave it back, and those of `clock` meanwhile."""
    ran, began = time.clock_gettime(clock), time.monotonic()
    before = ready()  # a file's reading gives the GIL back, too
    time.sleep(_NAP)  # noqa: TID251 - it is how the GIL is given back
    waited = time.monotonic() - began - (ready() - before) - _NAP
    return waited, time.clock_gettime(clock) - ran


@contextlib.contextmanager
def _scheduling() -> Iterator[Callable[[], float]]:
    """What tells the seconds that this thread could have run in, had it had a processor, as far as the kernel does. By
    one call each time: each gives the GIL back, and waits for it again."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield lambda: 0.0
        return

    def ready() -> float:
        try:
            return int(os.pread(file, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    try:
        yield ready
    finally:
        os.close(file)


def _frames(frame: FrameType | None) -> Iterator["Frame"]:
    from elastic.proto.looks import Frame

    while frame is not None:
        code = frame.f_code
        yield Frame(
            function=code.co_qualname[:64], file=code.co_filename[-120:], line=frame.f_lineno or 0
        )
        frame = frame.f_back

"""Inside the user's process: what it does, told to its agent from a thread of its own.

Which collective each of its process groups has issued last torch's flight recorder knows, also of what DTensor and
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
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

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
        issued = tuple(last_collectives())
    with contextlib.suppress(Exception):
        counted = transfers()
    with contextlib.suppress(Exception):
        device = on_device()
    return Told(collectives=issued, threads=stacks(), on_device=device, transfers=counted)


def last_collectives() -> Iterator["Collective"]:
    """Of each process group of each library."""
    library = sys.modules.get("torch._C._distributed_c10d")
    for name in (NCCL, "_dump_fr_trace_json"):
        if dump := getattr(library, name, None):
            entries = json.loads(dump(True, False)).get("entries", ())
            yield from last_of_each(entries, device=name == NCCL)


def last_of_each(entries: Sequence[dict[str, Any]], *, device: bool) -> Iterator["Collective"]:
    """Of each process group the collective and the send or receive issued last; on a device the first collective that is
    not over, which it is at, for its host may run ahead as it likes. entries: of torch's flight recorder, oldest first.
    Raises LookupError where they do not reach back to what the device is at."""
    from elastic.proto.looks import Collective

    over = [_is_done(entry) for entry in entries]
    if device and entries and not entries[-1].get("retired"):
        over[-1] = (
            False  # while it is issued its end is not recorded, which reads as if it had come
        )
    if device and not _reaches_back(entries):
        raise LookupError("a host runs ahead of its device by more than is recorded")
    last: dict[tuple[str, bool], tuple[dict[str, Any], bool]] = {}
    begun = set[tuple[str, bool]]()
    for entry, done in zip(entries, over, strict=True):
        key = (str(entry["process_group"][0]), bool(entry.get("is_p2p")))
        p2p, (_, before) = key[1], last.get(key, (None, True))
        if before or p2p or not device:
            last[key] = entry, done
        if not done and entry.get("state") != "scheduled":
            begun.add(key)
    for (group, p2p), (entry, done) in list(last.items())[-MOST_GROUPS:]:
        yield Collective(
            group=group[:64],
            seq=int(entry["collective_seq_id"]),
            op=str(entry["profiling_name"])[:64],
            sizes=str(entry["input_sizes"])[:128],
            p2p=p2p,
            device=device,
            started=(group, p2p) in begun,
            done=done,
        )


def _is_done(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _reaches_back(entries: Sequence[dict[str, Any]]) -> bool:
    """The oldest that is left, of what every rank has a part in, is over, and so is what was forgotten."""
    oldest = next((entry for entry in entries if not entry.get("is_p2p")), None)
    return oldest is None or not oldest.get("record_id") or _is_done(oldest)


def stacks() -> tuple["Thread", ...]:
    """Of the main thread and of the deepest others but this one; nothing moves meanwhile, for we hold the GIL."""
    from elastic.proto.looks import TOLD_FRAMES, Thread, cut, fit

    main, pid = threading.main_thread().ident, os.getpid()
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
    """Whether a thread runs Python and nothing else: most times it keeps the GIL for as long as an interpreter lets it,
    unless others wait for it, too. Where it is given back early the main thread has run, and so had it; None: nobody was
    seen to have it."""
    main = threading.main_thread().ident
    assert main is not None
    clock = time.pthread_getcpuclockid(main)
    kept = shared = 0
    for _ in range(_TRIES):
        waited, ran = _wait_for_gil(clock)
        if waited > sys.getswitchinterval() / 2:
            kept += 1
        elif ran > _RAN:
            shared += 1
    return kept > shared if kept or shared else None


def _wait_for_gil(clock: int) -> tuple[float, float]:
    """Seconds that it took, and that of `clock` meanwhile."""
    began, ran = time.monotonic(), time.clock_gettime(clock)
    time.sleep(_NAP)  # noqa: TID251 - it is how the GIL is given back
    return time.monotonic() - began - _NAP, time.clock_gettime(clock) - ran


def _frames(frame: FrameType | None) -> Iterator["Frame"]:
    from elastic.proto.looks import Frame

    while frame is not None:
        code = frame.f_code
        yield Frame(
            function=code.co_qualname[:64], file=code.co_filename[-120:], line=frame.f_lineno or 0
        )
        frame = frame.f_back

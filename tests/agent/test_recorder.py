"""What a rank tells of itself, in processes of its kind."""

import socket
import subprocess
import sys

import pytest

from elastic.agent import recorder
from elastic.agent.recorder import DATAGRAM
from elastic.proto import codec, looks
from elastic.proto.looks import Told

SERVES = """
import os, re, socket, sys, threading
from elastic.agent import recorder
end = socket.socket(fileno=int(sys.argv[1]))
threading.Thread(target=recorder._serve, args=(end,), daemon=True).start()
def deep(n):
    if n:
        deep(n - 1)
def busy():
    while True:
        deep(50)
        exec("def f(x):\\n    return [i for i in range(5)]\\nf(1)", {})
def hold():
    re.match(r"(a+)+$", "a" * 64 + "b")
"""
BUSY = "recorder._TRIES = 1\nfor _ in range(3): threading.Thread(target=busy, daemon=True).start()\nbusy()\n"
DEEP = """
sys.setrecursionlimit(100_000)
def waits(n):
    waits(n - 1) if n else (os.write(1, b"."), sys.stdin.read())
for _ in range(30): threading.Thread(target=waits, args=(500,), daemon=True).start()
waits(5000)
"""


def asked(code: str, times: int, *, patience: float = 60.0, written: int = 0) -> list[Told]:
    """What it answers, once it has written so many bytes; TimeoutError where it does not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVES + code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        assert process.stdout is not None
        ours.settimeout(patience)
        try:
            assert len(process.stdout.read(written)) == written, f"it is gone: {process.wait()}"
            found = []
            for _ in range(times):
                ours.send(b"?")
                said = ours.recv(DATAGRAM)
                assert said, f"it is gone: {process.wait()}"
                found.append(codec.loads(Told, said))
            return found
        finally:
            process.kill()
            process.communicate()


def entry(group: str, seq: int, state: str, **more: object) -> dict[str, object]:
    """As torch 2.11 writes them."""
    return {
        "process_group": [group, "default_pg"], "collective_seq_id": seq, "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 4]], "state": state, "retired": False, "is_p2p": False, **more,
    }  # fmt: skip


def told_of(entries: list[dict[str, object]], *, device: bool) -> list[tuple[object, ...]]:
    return [
        (one.group, one.p2p, one.seq, one.started, one.done)
        for one in recorder.last_of_each(entries, device=device)
    ]


def test_what_the_device_is_at_is_told_of_each_group() -> None:
    """Its host issues more than the device has begun, as much as it likes."""
    entries = [
        entry("0", 4, "completed", retired=True),
        entry("0", 5, "started"),
        entry("1", 9, "scheduled"),
        entry("1", 9, "scheduled", is_p2p=True, profiling_name="nccl:send 0->1"),
        entry("1", 9, "scheduled", is_p2p=True, profiling_name="nccl:recv 0<-1"),
        entry("0", 6, "scheduled"),
        entry("2", 1, "completed"),
        entry("2", 2, "completed", retired=True),
    ]
    assert told_of(entries, device=True) == [
        ("0", False, 5, True, False),
        ("1", False, 9, False, False),
        ("1", True, 9, False, False),
        ("2", False, 2, False, True),
    ]
    assert told_of(entries, device=False)[0] == ("0", False, 6, True, False)


def test_what_is_being_issued_is_not_over() -> None:
    """Its end is not recorded yet, and torch takes that for one that has come: seen where NCCL waits for its peers to
    connect."""
    entries = [entry("0", 4, "completed", retired=True), entry("0", 5, "completed")]
    assert told_of(entries, device=True) == [("0", False, 5, True, False)]
    assert told_of(entries, device=False) == [("0", False, 5, False, True)]
    retired = [*entries[:1], entry("0", 5, "completed", retired=True)]
    assert told_of(retired, device=True) == [("0", False, 5, False, True)]
    older = [*entries, entry("1", 1, "completed", retired=True)]
    assert told_of(older, device=True)[0] == ("0", False, 5, False, True), "a group that is gone"


def test_a_host_that_runs_ahead_by_more_than_is_recorded_does_not_know() -> None:
    """Ranks run ahead by different numbers: whoever compared these would blame anybody."""
    ahead = [entry("0", seq, "scheduled", record_id=seq) for seq in range(300, 556)]
    with pytest.raises(LookupError):
        told_of(ahead, device=True)
    over = entry("0", 299, "completed", record_id=299)
    assert told_of([over, *ahead], device=True) == [("0", False, 300, False, False)]
    young = [entry("0", seq, "scheduled", record_id=seq) for seq in range(3)]
    assert told_of(young, device=True) == [("0", False, 0, False, False)]


def test_one_that_is_busy_answers_and_lives() -> None:
    """A signal that is handled in C would end it, some hundred times in."""
    found = asked(BUSY, 200)
    mains = [told.threads[0] for told in found]
    assert all(main.frames[-1].function == "<module>" for main in mains)
    assert sum(any(frame.function == "busy" for frame in main.frames) for main in mains) > 190
    assert len(found[-1].threads) == 4


def test_an_answer_fits_whatever_the_stacks() -> None:
    told = asked(DEEP, 20, written=31)[-1]
    assert [frame.function for frame in (told.threads[0].frames[0], told.threads[0].frames[-1])] == [
        "waits", "<module>",
    ]  # fmt: skip
    assert sum(len(thread.frames) for thread in told.threads) <= 2 * looks.TOLD_FRAMES


def test_an_answer_in_any_letters_fits() -> None:
    frame = looks.Frame(function="f", file="/данные/" + "й" * 112, line=1)
    told = Told(collectives=(), threads=(looks.Thread(tid=1, frames=(frame,) * 120),))
    assert len(codec.dumps(told)) > DATAGRAM
    assert codec.loads(Told, recorder.encoded(told)) == Told(collectives=())


def test_who_cannot_read_its_collectives_tells_the_rest() -> None:
    spoil = "recorder.last_of_each = None\nsys.modules['torch._C._distributed_c10d'] = recorder\n"
    spoil += "recorder._dump_fr_trace_json = lambda *_: '{\"entries\": [1]}'\nsys.stdin.read()\n"
    for told in asked(spoil, 2):
        assert told.collectives is None
        assert told.threads


FUNCTIONAL = """
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
functional.all_reduce(torch.ones(3), "sum", [0]).sum()
os.write(1, b".")
sys.stdin.read()
"""


def test_what_compiled_code_and_dtensor_issue_is_seen_too() -> None:
    (told,) = asked(FUNCTIONAL, 1, written=1)
    assert told.collectives is not None
    assert [(one.op, one.sizes) for one in told.collectives] == [("gloo:all_reduce", "[[3]]")]


def endless() -> str:
    return "number = 0\nwhile True:\n    number += 1\n"


def calls_a_library() -> str:
    """Which gives the GIL back for some tens of microseconds each time."""
    return "import hashlib\ndata = bytes(1 << 15)\nwhile True:\n    hashlib.sha256(data)\n"


def test_it_is_told_whether_the_main_thread_gives_the_gil_back_by_itself() -> None:
    kept = {told.threads[0].gil for told in asked(endless(), 20)}
    assert kept in ({True}, {True, None})
    assert False in {told.threads[0].gil for told in asked(calls_a_library(), 20)}


def test_one_that_holds_the_gil_does_not_answer() -> None:
    with pytest.raises(TimeoutError):
        asked("hold()", 2, patience=1.0)

"""What a rank tells of itself, in processes of its kind."""

import socket
import subprocess
import sys
from collections.abc import Sequence

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
        "process_group": [group, "default_pg"], "collective_seq_id": seq, "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 4]], "state": state,
        "retired": state == "completed", "is_p2p": False, **more,
    }  # fmt: skip


def told_of(entries: list[dict[str, object]], *, device: bool = True) -> list[tuple[object, ...]]:
    return [
        (one.group, one.p2p, one.seq, one.started, one.done)
        for one in recorder.current_of_each(entries, device=device)
    ]


def test_what_the_device_is_at_is_told_of_each_group() -> None:
    """Its host issues more than the device has begun, as much as it likes."""
    entries = [
        entry("0", 4, "completed"),
        entry("0", 5, "started"),
        entry("1", 9, "scheduled"),
        entry("0", 6, "scheduled"),
        entry("2", 1, "completed"),
        entry("2", 2, "completed"),
    ]
    assert told_of(entries) == [
        ("0", False, 5, True, False),
        ("1", False, 9, False, False),
        ("2", False, 2, False, True),
    ]
    assert ("0", False, 6, False, False) in told_of(entries, device=False)


def test_what_is_being_issued_is_not_over() -> None:
    """Its end is not recorded yet, and torch takes that for one that has come: seen where NCCL waits for its peers to
    connect."""
    before, issued = entry("0", 4, "completed"), entry("0", 5, "completed", retired=False)
    assert told_of([before, issued]) == [("0", False, 5, True, False)]
    assert told_of([before, issued], device=False) == [("0", False, 5, False, True)]
    assert told_of([before, entry("0", 5, "completed")]) == [("0", False, 5, False, True)]
    of_a_group_that_is_gone = told_of([before, issued, entry("1", 1, "completed")])
    assert ("0", False, 5, False, True) in of_a_group_that_is_gone
    nobody_retires = [entry("0", seq, "completed", retired=False) for seq in (4, 5)]
    assert told_of(nobody_retires) == [("0", False, 5, False, True)]
    stuck_before = [before, entry("0", 5, "scheduled"), entry("0", 6, "completed", retired=False)]
    assert told_of(stuck_before) == [("0", False, 5, False, False)]


PARTS = ("nccl:_broadcast_oop", "nccl:_broadcast_oop", "nccl:ALLGATHER_coalesced")
SENDS = ("nccl:send 0->1", "nccl:recv 0<-1", "nccl:coalesced")


def at_once(names: Sequence[str], seq: int, transfer: int, state: str) -> list[dict[str, object]]:
    """As an H200 told of `all_gather` of uneven sizes, and of `batch_isend_irecv`: parts never end, all of it does."""
    *parts, whole = names
    return [
        *(
            entry(
                "0", seq, "scheduled", p2p_seq_id=transfer, profiling_name=name, is_p2p=bool(transfer)
            )
            for name in parts
        ),
        entry("0", seq, state, p2p_seq_id=transfer, profiling_name=whole, input_sizes=[]),
    ]  # fmt: skip


def test_what_is_issued_at_once_ends_as_one() -> None:
    done = [
        entry("0", 2, "completed"),
        *at_once(PARTS, 3, 0, "completed"),
        *at_once(SENDS, 3, 1, "completed"),
        entry("0", 4, "completed", p2p_seq_id=1),
    ]
    assert told_of(done) == [("0", True, 3, False, True), ("0", False, 4, False, True)]
    (waits,) = recorder.current_of_each([*done[:1], *at_once(PARTS, 3, 0, "started")], device=True)
    assert (waits.op, waits.done, waits.before) == (PARTS[-1], False, "nccl:all_reduce [[4, 4]]")
    pending = told_of([*done[:4], *at_once(SENDS, 3, 1, "started")])
    assert pending == [("0", False, 3, False, True), ("0", True, 3, True, False)]


def test_a_host_that_runs_ahead_by_more_than_is_recorded_says_only_that_it_waits() -> None:
    """Ranks run ahead by different numbers: whoever compared these would blame anybody."""
    ahead = [entry("0", seq, "scheduled", record_id=seq) for seq in range(300, 556)]
    assert told_of(ahead) == [("0", False, 0, False, False)]
    others = [entry("1", seq, "completed", record_id=seq) for seq in range(100, 200)]
    assert ("0", False, 0, False, False) in told_of(others + ahead)
    over = entry("0", 299, "completed", record_id=299)
    assert told_of([over, *ahead]) == [("0", False, 300, False, False)]
    young = [entry("0", seq, "scheduled", record_id=seq) for seq in range(3)]
    assert told_of(young) == [("0", False, 0, False, False)]


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
    spoil = (
        "recorder.current_of_each = None\nsys.modules['torch._C._distributed_c10d'] = recorder\n"
    )
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


GROUPS = """
os.environ.update({{"TORCH_FR_BUFFER_SIZE": "100", "RANK": "{rank}", "WORLD_SIZE": "{world}"}})
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
alone = dist.new_group([0])
dist.all_reduce(torch.ones(3)), dist.all_reduce(torch.ones(2), group=alone)
os.write(1, b".")
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("rank", "world", "row"),
    [(0, 1, (0, 1, 1)), (0, 2, (0, 1, 0)), (1, 1, (0, 1, 0))],
)
def test_a_collective_s_group_is_told_with_its_ranks_where_the_world_is_the_job_s(
    rank: int, world: int, row: tuple[int, int, int]
) -> None:
    (told,) = asked(GROUPS.format(rank=rank, world=world), 1, written=1)
    assert told.collectives is not None
    assert [(one.first, one.stride, one.count) for one in told.collectives] == [row] * 2


@pytest.mark.parametrize(
    ("ranks", "row"),
    [
        ((), (0, 1, 0)),
        ((3,), (3, 1, 1)),
        ((0, 1, 2, 3), (0, 1, 4)),
        ((12, 4, 8), (4, 4, 3)),
        ((0, 1, 3), (0, 1, 0)),
    ],
)
def test_ranks_are_told_as_a_row(ranks: tuple[int, ...], row: tuple[int, int, int]) -> None:
    assert recorder.row(ranks) == row


def endless() -> str:
    return "number = 0\nwhile True:\n    number += 1\n"


def calls_a_library() -> str:
    """Which gives the GIL back for most of the time."""
    return "import hashlib\ndata = bytes(1 << 20)\nwhile True:\n    hashlib.sha256(data)\n"


def test_it_is_told_whether_the_main_thread_gives_the_gil_back_by_itself() -> None:
    kept = {told.threads[0].gil for told in asked(endless(), 20)}
    assert kept in ({True}, {True, None})
    assert False in {told.threads[0].gil for told in asked(calls_a_library(), 20)}


def test_one_that_holds_the_gil_does_not_answer() -> None:
    with pytest.raises(TimeoutError):
        asked("hold()", 2, patience=1.0)

"""torch's countdown timers, told through a pipe that anybody among the ranks may write to."""

import asyncio
import json
import os
import select
import signal
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.file_timer import MOST, Server, Timer, Timers, parse, pipe
from elastic.proto.errors import UsageError

USUAL = {"version": 1, "pid": 7, "scope_id": "s", "expiration_time": 5.0, "signal": 9}


def line(**changed: Any) -> bytes:
    return json.dumps(USUAL | changed).encode()


def fed(*lines: bytes) -> Timers:
    timers = Timers()
    timers.feed(b"".join(one + b"\n" for one in lines), ahead=0.0)
    return timers


def pids(expired: list[Timer]) -> list[int]:
    return [timer.pid for timer in expired]


@pytest.mark.parametrize(
    ("environ", "given"),
    [
        ({}, None),
        ({"TORCHELASTIC_TIMER_FILE": "/p"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "true"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "/p"}, "/p"),
    ],
)
def test_who_asks_for_timers(environ: Mapping[str, str], given: str | None) -> None:
    assert pipe(environ) == given


def test_a_pipe_that_nobody_named_is_the_launchers_own() -> None:
    assert (pipe({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}) or "").endswith(f"-{os.getpid()}")


@pytest.mark.parametrize(
    "wrong",
    [
        b"", b"\xff", b"[" * 4000, b"[]", b"{}", b"null", b"1" * 4000,
        line(pid=0), line(pid=-1), line(pid=2**31), line(pid=True), line(pid="7"), line(pid=None),
        line(scope_id=3), line(expiration_time="soon"), line(expiration_time=[]),
        line(expiration_time=float("nan")), line(expiration_time=float("inf")),
        line(expiration_time=10**400), line(signal=65), line(signal=True), line(signal=9.0),
    ],
)  # fmt: skip
def test_what_is_no_timer_is_passed_over(wrong: bytes) -> None:
    assert parse(wrong) is None
    timers = fed(wrong, line(pid=8), wrong)
    assert pids(timers.expired(5.0)) == [8]


def test_one_that_is_given_back_never_ends() -> None:
    assert fed(line(), line(expiration_time=-1, signal=0)).next is None
    assert fed(line(), line(scope_id="other", expiration_time=-1)).next == 5.0


def test_the_first_that_ends_a_process_is_what_ended_it() -> None:
    told = (
        line(scope_id="c", expiration_time=3, signal=15),
        line(scope_id="b", expiration_time=2),
        line(scope_id="a", expiration_time=1, signal=0),
        line(scope_id="d", expiration_time=90),
        line(pid=8, expiration_time=4),
        line(pid=9, expiration_time=2, signal=-1),
    )
    timers = fed(*told)
    assert (timers.next, timers.expired(0.5)) == (1, [])
    assert [(t.pid, t.scope, t.signal) for t in timers.expired(3.0)] == [(7, "b", 9)]
    assert timers.next == 4, "the others of a process that is ended are gone with it"


def test_a_clock_that_is_ahead() -> None:
    timers = Timers()
    timers.feed(line(expiration_time=1000.0) + b"\n", ahead=990.0)
    assert timers.next == 10.0


def test_what_is_kept_is_bounded() -> None:
    timers = fed(*(line(scope_id=str(n), expiration_time=n) for n in range(MOST + 1)))
    timers.feed(line(scope_id="5", expiration_time=-1) + b"\n", ahead=0.0)
    assert timers.next == 0
    timers.feed(b"x" * (1 << 20), ahead=0.0)
    assert len(timers._rest) <= select.PIPE_BUF


@given(st.lists(st.one_of(st.binary(), st.just(line()), st.just(b"\n"))), st.integers(1, 50))
def test_any_bytes_in_any_pieces(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    whole, pieces = Timers(), Timers()
    whole.feed(data, ahead=0.0)
    for start in range(0, len(data), size):
        pieces.feed(data[start : start + size], ahead=0.0)
    assert whole.expired(5.0) == pieces.expired(5.0)


def test_torchs_client_is_understood(tmp_path: Path) -> None:
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerClient

    path = str(tmp_path / "pipe")

    async def run() -> tuple[list[Timer], float]:
        expired: list[Timer] = []
        over = asyncio.Event()

        def end_it(timer: Timer) -> None:
            expired.append(timer)
            over.set()

        server = Server(path, end_it)
        client = FileTimerClient(path, signal.SIGTERM)
        client.acquire("given back", time.time())  # both before the server has a look
        client.release("given back")
        end = time.time() + 0.3
        await asyncio.to_thread(client.acquire, "kept", end)
        await asyncio.wait_for(over.wait(), 60)
        late = time.time() - end
        server.close()
        return expired, late

    expired, late = asyncio.run(run())
    assert [(t.pid, t.scope, t.signal) for t in expired] == [(os.getpid(), "kept", signal.SIGTERM)]
    assert late > -0.01
    assert not os.path.lexists(path)


def test_a_pipe_of_an_earlier_life_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    async def serve(path: Path) -> None:
        server = Server(str(path), print)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        server.close()

    path = tmp_path / "pipe"
    os.mkfifo(path, 0o666)
    asyncio.run(serve(path))
    path.write_text("precious")
    with pytest.raises(UsageError, match=r"TORCHELASTIC_TIMER_FILE .*: File exists"):
        asyncio.run(serve(path))
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match="No such file"):
        asyncio.run(serve(tmp_path / "nowhere" / "pipe"))

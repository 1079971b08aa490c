"""What an agent asks its ranks."""

import asyncio
import os
import socket
from types import SimpleNamespace

import pytest

from elastic.agent import watching
from elastic.agent.ranks import Rank
from elastic.proto import page
from elastic.proto.looks import Look, Thread, Told


def test_who_has_closed_its_end_is_asked_no_more() -> None:
    """Else it would be taken for one that holds the GIL."""

    async def ask() -> None:
        rank = Rank(0, 0)
        rank.recorder, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank.recorder.setblocking(False)
        with theirs:
            assert await watching._ask(rank) is None
            assert rank.recorder is not None, "it is only late"
        assert await watching._ask(rank) is None
        assert rank.recorder is None

    asyncio.run(ask())


def test_steps_are_counted_though_nobody_asks_who_is_quiet() -> None:
    """With --hang-action ignore stragglers are looked for all the same."""
    fd = page.create()
    rank = Rank(0, 0)
    rank.page = page.open_page(fd)
    writer = page.PageWriter.claim(fd, os.getpid())
    assert writer is not None
    of_a_round = SimpleNamespace(round=1, running=lambda: [rank])
    watcher = watching.Watching(lambda: None, lambda _: None, lambda: None)
    for _ in range(2):
        writer.tick()
        assert watcher._listen(of_a_round) == watching.EVERY  # type: ignore[arg-type]
    assert rank.rhythm.take() > 0
    os.close(fd)


@pytest.mark.parametrize(
    ("seen", "said", "gil"),
    [
        (True, False, False),
        (True, True, True),
        (True, None, True),
        (False, True, False),
    ],
)
def test_a_rank_keeps_the_gil_where_nothing_shows_that_it_gives_it_back(
    seen: bool, said: bool | None, gil: bool
) -> None:
    """seen: at the moments of a look; said: by its own thread, which has waited for it."""
    threads = (Thread(tid=1, frames=(), gil=seen), Thread(tid=2, frames=(), gil=False))
    look = Look(rank=0, pid=1, at=0.0, state="R", how="py-spy", threads=threads)
    told = Told(threads=(Thread(tid=1, frames=(), gil=said), Thread(tid=0, frames=())))
    assert watching._agreed(look, told) == (Thread(tid=1, frames=(), gil=gil), threads[1])


@pytest.mark.parametrize(
    ("state", "kept", "shown"),
    [("S", True, "R"), ("S", False, "S"), ("S", None, "S"), ("R", None, "R"), ("D", True, "D")],
)
def test_who_keeps_the_gil_runs_though_it_waits_for_who_tells_of_it(
    state: str, kept: bool | None, shown: str
) -> None:
    """Where no memory may be read; it was seen in the moment in which its other thread had the GIL."""
    look = Look(rank=0, pid=1, at=0.0, state=state)
    told = Told(threads=(Thread(tid=1, frames=(), gil=kept), Thread(tid=0, frames=(), gil=True)))
    assert watching._running(look, told) == shown

"""What an agent asks its ranks."""

import asyncio
import socket

import pytest

from elastic.agent import watching
from elastic.agent.ranks import Rank
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

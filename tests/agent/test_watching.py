"""What an agent asks its ranks."""

import asyncio
import socket

from elastic.agent import watching
from elastic.agent.ranks import Rank


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

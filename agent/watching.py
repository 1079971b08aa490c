"""Watches this node's ranks for the master, which decides: tells at once of one that is quiet, and looks at
all of them when asked."""

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from elastic.agent.evidence.look import Looker, ask
from elastic.agent.ranks import Rank, Ranks
from elastic.agent.recorder import DATAGRAM
from elastic.proto import codec
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import CodecError
from elastic.proto.looks import Look, Thread, Told, brief

log = logging.getLogger(__name__)

EVERY = 0.5
"""Seconds between looks at the pages, at most."""
ANSWER = 0.2
"""Seconds that a rank has to answer what it does."""
BUSY_ANSWERING = 0.05
"""Seconds that are left to it before it is looked at: what answers takes the GIL from what is looked for."""
DEAF = 2
"""Looks in a row without a word of it, after which it is taken to hold the GIL in C code."""
DEADLINE = 5.0
"""Seconds that a look at a node's ranks may take."""


class Watching:
    """One agent's."""

    def __init__(
        self,
        ranks: Callable[[], Ranks | None],
        send: Callable[[pb.FromAgent], None],
        beat: Callable[[], None],
    ) -> None:
        """ranks: those of the round that runs; beat: sends a heartbeat."""
        self._ranks = ranks
        self._send = send
        self._beat = beat
        self._looker = Looker()
        self._order = pb.Watch()
        self._measure = pb.Measure()
        self._told: set[int] = set()
        """Ranks that were quiet when a heartbeat last said so."""
        self._unanswered = Counter[int]()
        """Looks in a row, by process."""

    @property
    def pids(self) -> set[int]:
        """Processes of ours that look."""
        return self._looker.pids

    def obey(self, order: pb.Watch) -> None:
        if order.round >= self._order.round:
            self._order = order

    def measure(self, order: pb.Measure) -> None:
        if order.round >= self._measure.round:
            self._measure = order

    async def run(self) -> None:
        pause = EVERY
        while True:
            await asyncio.sleep(pause)
            pause = EVERY
            if (ranks := self._ranks()) is not None:
                pause = min(EVERY, self._listen(ranks))

    def _listen(self, ranks: Ranks) -> float:
        """Seconds until the next rank may be quiet."""
        now, limit = time.monotonic_ns(), self._order.quiet
        running = ranks.running()
        interval = self._measure.steps if self._measure.round == ranks.round else 0
        for rank in running:
            rank.interval = interval
            rank.listen()
        if not limit or self._order.round != ranks.round:
            return EVERY  # nobody wants to know who is quiet
        quiet, soonest = set[int](), limit
        for rank in running:
            since = rank.rhythm.quiet(now)
            if since >= limit:
                quiet.add(rank.number)
            else:
                soonest = min(soonest, limit - since)
        news, self._told = quiet - self._told, quiet
        if news:
            self._beat()
        return soonest

    async def examine(self, order: pb.Examine) -> None:
        """Look at all ranks of the round, and tell; nothing of it stops or hurts one."""
        ranks = self._ranks()
        if ranks is None or ranks.round != order.round:
            return
        running = ranks.running()
        deadline = asyncio.get_running_loop().time() + DEADLINE
        asked = [asyncio.create_task(_ask(rank)) for rank in running]
        heard = [
            task
            for rank, task in zip(running, asked, strict=True)
            if self._unanswered[rank.pid] < DEAF
        ]
        if heard:
            await asyncio.wait(heard, timeout=BUSY_ANSWERING)
        pids = {rank.number: rank.pid for rank in running}
        try:
            looks = await self._looker.look(pids, deadline=deadline, native=order.close)
        except (OSError, RuntimeError) as error:  # no descriptor or thread is left
            log.warning("ranks cannot be looked at: %s", error)
            looks = ()
        answers = await asyncio.gather(*asked)
        told = {rank.number: said for rank, said in zip(running, answers, strict=True)}
        self._unanswered = Counter(
            {
                rank.pid: self._unanswered[rank.pid] + 1
                for rank in running
                if told[rank.number] is None
            }
        )
        by_number = {rank.number: rank for rank in running}
        whole = await asyncio.gather(
            *(self._whole(one, by_number[one.rank], told[one.rank], deadline) for one in looks)
        )
        if self._ranks() is ranks:
            self._listen(ranks)
            self._beat()  # what moved meanwhile is heard first
            whole = [replace(one, ticks=by_number[one.rank].rhythm.ticks) for one in whole]
            seen = pb.Examined(
                round=order.round, number=order.number, looks=map(codec.dumps, whole),
                kernel_log=ranks.kernel_log(struck=False),
            )  # fmt: skip
            self._send(pb.FromAgent(examined=seen))

    async def _whole(self, look: Look, rank: Rank, told: Told | None, deadline: float) -> Look:
        """What the rank itself has told, beside what was seen of it."""
        if look.how == "none" and told is not None:
            look = replace(look, how="told", threads=told.threads, state=_running(look, told))
        deaf = rank.recorder is not None and self._unanswered[rank.pid] >= DEAF
        if look.how == "none" and deaf and rank.stacks is not None:
            look = await ask(look, rank.stacks, deadline=deadline)
        look = brief(look)
        if told is not None:
            look = replace(
                look, threads=_agreed(look, told), collectives=told.collectives,
                on_device=told.on_device, transfers=told.transfers,
            )  # fmt: skip
        return look


def _running(look: Look, told: Told) -> str:
    """The state of its main thread. Who does not give the GIL back runs, though it waits for that while it is told of."""
    kept = any(thread.tid == look.pid and thread.gil for thread in told.threads)
    return "R" if kept and look.state == "S" else look.state


def _agreed(look: Look, told: Told) -> tuple[Thread, ...]:
    """Who could take the GIL from the main thread at once has seen that this gives it back now and then."""
    shared = any(thread.tid == look.pid and thread.gil is False for thread in told.threads)
    return tuple(
        replace(thread, gil=False) if shared and thread.tid == look.pid else thread
        for thread in look.threads
    )


async def _ask(rank: Rank) -> Told | None:
    """What the rank itself says, at least since it was asked the last time; None: it has no recorder, or has said
    nothing since."""
    end = rank.recorder
    if end is None:
        return None
    loop = asyncio.get_running_loop()
    said = _late(end)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER):
            await loop.sock_sendall(end, b"?")
            said = await loop.sock_recv(end, DATAGRAM)
    if rank.recorder is end and _is_closed(end):
        rank.close_recorder()  # nothing holds it up: it will never answer again
    try:
        found: Told = codec.loads(Told, said)
        return found
    except CodecError:
        return None


def _is_closed(end: socket.socket) -> bool:
    try:
        return not end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _late(end: socket.socket) -> bytes:
    """The newest answer that came too late; empty where none did."""
    said = b""
    with contextlib.suppress(OSError):
        while more := end.recv(DATAGRAM):
            said = more
    return said

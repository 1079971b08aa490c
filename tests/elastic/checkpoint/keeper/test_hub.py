"""Rank 0's keeper and strangers, late comers and broken connections."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from elastic.checkpoint.keeper.hub import Hub
from elastic.proto import codec, keeper_process, version
from elastic.proto import master_pb2 as pb
from elastic.proto.keeper_process import Greeting, Refused, Start, Welcome
from elastic.proto.limits import MAX_ANSWER

DEADLINE = 150.0
SECRET = "0123456789abcdef"
OURS = Greeting(version=str(version.WIRE), secret=SECRET, rank=1, local_world_size=1)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await test

    asyncio.run(bounded())


class Served:
    """A hub of two nodes with a rank each, and what its own node was ordered."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.orders: list[pb.SnapshotOrders] = []
        self.writers: list[asyncio.StreamWriter] = []
        start = Start(
            checkpoint="/run", job="job", round=1, rank=0, local_world_size=1, world_size=2,
            timeout=DEADLINE, listener=-1, peers=self.listener.detach(), secret=SECRET,
        )  # fmt: skip
        self.news = asyncio.Event()
        self.hub = Hub(start, self.orders.append, self.news.set)

    async def greet(self, line: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        self.writers.append(writer)
        writer.write(line)
        return reader, writer

    async def told(self, moment: pb.Moment) -> None:
        """Until our own node has heard that it is whole."""
        while not any(order.whole == moment for order in self.orders):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    made = Served()
    task = asyncio.create_task(made.hub.run())
    try:
        yield made
    finally:
        for writer in made.writers:
            writer.close()
        task.cancel()


def holding(rank: int, moment: pb.Moment) -> pb.Snapshots:
    held = pb.Holding(moment=moment, world_size=2, ranks=[rank], units=[rank])
    return pb.Snapshots(checkpoint="/run", holdings=[held])


@pytest.mark.parametrize(
    "line",
    [
        keeper_process.line(Greeting(version="1.0", secret="", rank=1, local_world_size=1)),
        keeper_process.line(
            Greeting(version="1.0", secret=f"{SECRET}0", rank=1, local_world_size=1)
        ),
        keeper_process.line(Greeting(version="1.0", secret=SECRET, rank=0, local_world_size=1)),
        keeper_process.line(
            Greeting(version="1.0", secret=SECRET, rank=1, local_world_size=1 << 40)
        ),
        b"{}\n",
        b"\x80\x04.\n",
        b"x" * (keeper_process.DATAGRAM * 4),
    ],
    ids=["no secret", "wrong secret", "our rank", "too many ranks", "no greeting", "bytes", "long"],
)
def test_a_stranger_is_answered_nothing(line: bytes) -> None:
    async def test() -> None:
        async with served() as here:
            reader, _ = await here.greet(line)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert here.hub.missing() == {1}
            reader, _ = await here.greet(keeper_process.line(OURS))
            assert codec.loads(keeper_process.Answer, await reader.readline()) == Welcome(job="job")

    run(test())


def test_a_version_too_far_is_refused_in_a_sentence() -> None:
    async def test() -> None:
        async with served() as here:
            far = Greeting(version="9.0", secret=SECRET, rank=1, local_world_size=1)
            reader, _ = await here.greet(keeper_process.line(far))
            answer = codec.loads(keeper_process.Answer, await reader.readline())
            assert isinstance(answer, Refused)
            assert "speaks version 9.0" in answer.reason

    run(test())


def test_what_two_nodes_hold_is_whole_until_one_is_lost() -> None:
    async def test() -> None:
        async with served() as here:
            reader, writer = await here.greet(keeper_process.line(OURS))
            await reader.readline()
            first, second = pb.Moment(round=1, step=1), pb.Moment(round=1, step=2)
            here.hub.say(holding(0, first))
            writer.write(keeper_process.frame(pb.FromAgent(snapshots=holding(1, first))))
            await here.told(first)
            other = pb.ToAgent.FromString(await keeper_process.read_frame(reader))
            assert other.snapshots.checkpoint == "/run"
            here.news.clear()
            writer.write((MAX_ANSWER + 1).to_bytes(4, "big"))  # ends the connection
            await here.news.wait()
            here.hub.say(holding(0, second))
            here.hub.leave()
            while not here.hub.over:
                await asyncio.sleep(0)
            here.hub.end()
            assert not here.orders[-1].pending, "half of a step is not written"
            assert not here.orders[-1].flush

    run(test())


def test_at_the_end_each_node_writes_its_part_of_the_newest() -> None:
    async def test() -> None:
        async with served() as here:
            reader, writer = await here.greet(keeper_process.line(OURS))
            await reader.readline()
            moment = pb.Moment(round=1, step=3)
            here.hub.say(holding(0, moment))
            writer.write(keeper_process.frame(pb.FromAgent(snapshots=holding(1, moment))))
            writer.write(keeper_process.frame(pb.FromAgent(leaving=pb.Leaving())))
            await here.told(moment)
            assert not here.orders[-1].pending
            here.hub.leave()
            while not here.hub.over:
                await asyncio.sleep(0)
            here.hub.end()
            assert here.orders[-1].flush == [pb.Flush(moment=moment, ranks=[0])]
            order = pb.SnapshotOrders()
            while not order.flush:
                order = pb.ToAgent.FromString(await keeper_process.read_frame(reader)).snapshots
            assert order.flush == [pb.Flush(moment=moment, ranks=[1])]

    run(test())

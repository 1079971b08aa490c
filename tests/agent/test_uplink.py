"""The agent's stream to its master."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from elastic.agent.uplink import Uplink
from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.security import Security


class BusyMaster(master_pb2_grpc.MasterServicer):
    """Welcomes an agent, and reads on only when it is told to."""

    def __init__(self, *, answers: bool = False) -> None:
        self.answers = answers
        self.reads = asyncio.Event()
        self.heard: list[str | None] = []

    async def Attach(self, requests: Any, context: Any) -> None:
        await context.read()
        ours = pb.Version(major=version.WIRE.major, minor=version.WIRE.minor)
        await context.write(pb.ToAgent(welcome=pb.Welcome(version=ours, epoch=1)))
        await self.reads.wait()
        while (message := await context.read()) is not grpc.aio.EOF:
            self.heard.append(message.WhichOneof("body"))
            if self.answers and self.heard[-1] == "sync":
                await context.write(pb.ToAgent(synced=pb.Synced()))


@contextlib.asynccontextmanager
async def attached(master: BusyMaster) -> AsyncIterator[Uplink]:
    server = grpc.aio.server()
    master_pb2_grpc.add_MasterServicer_to_server(master, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    uplink = Uplink(f"127.0.0.1:{port}", Security(), pb.Hello, lambda message: None)
    run = asyncio.create_task(uplink.run(lambda: 60.0))
    async with asyncio.timeout(60.0):
        await uplink.attached.wait()
        yield uplink
        await run  # no other stream is opened after the last
    await server.stop(None)


def test_a_goodbye_waits_until_a_busy_master_has_read_it_all() -> None:
    async def test() -> None:
        master = BusyMaster()
        async with attached(master) as uplink:
            uplink.send(pb.FromAgent(heartbeat=pb.Heartbeat()))
            uplink.send(pb.FromAgent(report=pb.NodeReport()))
            uplink.leave("its launcher got SIGTERM")
            goodbye = asyncio.create_task(uplink.goodbye(30.0))
            _, waits = await asyncio.wait({goodbye}, timeout=0.2)
            assert waits, "it did not wait for the master"
            master.reads.set()
            await goodbye
            assert master.heard == ["heartbeat", "report", "leaving"]

    asyncio.run(test())


def test_the_masters_last_orders_are_waited_for_until_it_says_that_they_are_out() -> None:
    async def test() -> None:
        master = BusyMaster(answers=True)
        async with attached(master) as uplink:
            synced = asyncio.create_task(uplink.synced(600.0))
            _, waits = await asyncio.wait({synced}, timeout=0.2)
            assert waits, "it did not wait for the master"
            master.reads.set()
            await synced
            assert uplink.attached.is_set()
            uplink.leave("its launcher got SIGTERM")
            await uplink.goodbye(30.0)
            assert master.heard == ["sync", "leaving"]

    asyncio.run(test())


def test_no_orders_are_waited_for_where_no_stream_can_bring_them() -> None:
    async def test() -> None:
        master = BusyMaster()
        async with attached(master) as uplink:
            uplink.last()
            synced = asyncio.create_task(uplink.synced(30.0))
            _, waits = await asyncio.wait({synced}, timeout=0.2)
            assert waits, "it did not wait for the master"
            master.reads.set()
            await uplink.goodbye(30.0)
            await synced
            assert master.heard == ["sync"]
            async with asyncio.timeout(5.0):
                await uplink.synced(30.0)

    asyncio.run(test())

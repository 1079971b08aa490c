"""A master without the wire: its streams, on a real shell and a real journal, and agents that speak to them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from elastic.master.journal import Journal
from elastic.master.policy import Policy
from elastic.master.shell import Shell
from elastic.master.streams import Streams
from elastic.proto import master_pb2 as pb
from elastic.proto import version
from tests.master.serving import REFUSES, RUN_ID

RUN, EXIT = pb.Directive.RUN, pb.Directive.EXIT
RUNS = pb.NodeReport(round=1, phase=pb.NodeReport.RUNNING)


@dataclass
class Stream:
    """An agent's stream as grpc hands it to the master, without the wire."""

    streams: Streams
    node: str
    report: pb.NodeReport = field(default_factory=pb.NodeReport)
    knock_address: str = REFUSES
    said: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    heard: asyncio.Queue[pb.ToAgent] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.say(
            hello=pb.Hello(
                version=pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
                run_id=RUN_ID,
                node_id=self.node,
                incarnation=1,
                slots=1,
                knock_address=self.knock_address,
                spare_store=f"{self.node}:1",
                report=self.report,
            )
        )
        self.handler = asyncio.create_task(self.streams.Attach(None, self))

    async def read(self) -> Any:
        return await self.said.get()

    async def write(self, message: pb.ToAgent) -> None:
        self.heard.put_nowait(message)

    def say(self, **body: Any) -> None:
        self.said.put_nowait(pb.FromAgent(**body))

    async def ordered(self, kind: int) -> pb.Directive:
        while True:
            message = await self.heard.get()
            if message.HasField("directive") and message.directive.kind == kind:
                return message.directive

    async def end(self) -> None:
        self.said.put_nowait(grpc.aio.EOF)
        await self.handler


@contextlib.asynccontextmanager
async def serving(folder: Path, policy: Policy) -> AsyncIterator[tuple[Shell, Streams]]:
    """folder: the job's."""
    journal = Journal(folder / "journal.db")
    shell = Shell(journal, policy, "launch")
    streams = Streams(shell, RUN_ID, folder)
    await shell.begin(streams.act, None, asyncio.Event())
    try:
        yield shell, streams
    finally:
        journal.close()

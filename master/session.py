"""One agent's stream, as the master holds it."""

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc

from elastic.master.directive import Directive
from elastic.master.events import Incarnation, NodeId
from elastic.proto import master_pb2 as pb


async def abort(context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
    """End a call with a status; who called may have gone away, and then it is cancelled."""
    try:
        await context.abort(code, text)
    except grpc.aio.AbortError:
        raise  # the one that grpc waits for
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError(text) from error
    raise AssertionError("an abort raises")


class Session:
    """Lives as long as the stream. Writing never blocks who calls `push`."""

    def __init__(self, hello: pb.Hello, context: Any) -> None:
        self.node_id = NodeId(hello.node_id)
        self.incarnation = Incarnation(hello.incarnation)
        self.heard = asyncio.get_running_loop().time()
        self.progress: Sequence[pb.RankProgress] = ()
        self.metrics = ""
        """Of the newest step, JSON, where its node has rank 0."""
        self.told: Directive | None = None
        """The directive pushed last."""
        self.idle = not hello.report.round and hello.report.phase == pb.NodeReport.IDLE
        """The agent was told nothing in all its life: it waits already."""
        self.snapshots: dict[str, pb.SnapshotOrders] = {}
        """By checkpoint, the orders pushed last."""
        self.watches = 0
        """The round whose ranks' quiet it was told to tell."""
        self.measures = (0, 0)
        """The round whose ranks' times it was told to tell, and how many steps are an interval."""
        self.left = False
        """It said goodbye, so it needs to hear of nothing more."""
        self._context = context
        self._handler = asyncio.current_task()
        self.closed = False
        self._outbox: list[pb.ToAgent] = []
        self._writer: asyncio.Task[None] | None = None

    def push(self, message: pb.ToAgent) -> None:
        self._outbox.append(message)
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._outbox:
                await self._context.write(self._outbox.pop(0))
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.BaseError):
            self._outbox.clear()  # the stream ended; its reader says so
        finally:
            self._writer = None

    def close(self) -> None:
        """Have the stream's handler end it: grpc's context offers no way from outside."""
        if self._handler is not None and not self.closed:
            self.closed = True
            self._handler.cancel()

"""Ranks' logs for whoever asked the master for them."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from elastic.agent.logs.reader import log_file, read
from elastic.agent.uplink import Uplink
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import ElasticError


class LogReads:
    """Those under way, by the master's number of the request."""

    def __init__(
        self,
        run_dir: Path | None,
        uplink: Uplink,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._run_dir = run_dir
        self._uplink = uplink
        self._spawn = spawn
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, request: pb.ReadLogRequest) -> None:
        """Begin one, or end it."""
        number = request.request
        if request.cancel:
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        task = self._tasks[number] = self._spawn(self._send(request))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def end(self) -> None:
        """End them all: who asked is told by the master that this stream broke."""
        for task in self._tasks.values():
            task.cancel()

    async def _send(self, request: pb.ReadLogRequest) -> None:
        end = pb.LogChunk(request=request.request, end=True)
        try:
            attempt = request.attempt if request.HasField("attempt") else None
            path = log_file(self._run_dir, request.rank, attempt, request.stream)
            async for data in read(path, request.tail_bytes, request.follow):
                chunk = pb.LogChunk(request=request.request, data=data)
                self._uplink.send(pb.FromAgent(log=chunk))
                await self._uplink.room()
        except (ElasticError, OSError) as error:
            end.error = str(error)
        self._uplink.send(pb.FromAgent(log=end))

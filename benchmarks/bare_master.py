"""What grpc.aio alone costs: a master that decides nothing, one stream an agent, one queue each.

`python -m benchmarks.bare_master PORT NODES`. It tells everyone once NODES agents said Hello, and
again each time that a stream breaks.
"""

import asyncio
import sys
from typing import Any

import grpc.aio

from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc
from elastic.proto.client import open_server
from elastic.proto.security import Security


class BareMaster(master_pb2_grpc.MasterServicer):
    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._round = 0
        self._queues: list[asyncio.Queue[pb.ToAgent]] = []

    async def Attach(self, requests: Any, context: Any) -> None:
        await context.read()
        queue: asyncio.Queue[pb.ToAgent] = asyncio.Queue()
        self._queues.append(queue)
        writer = asyncio.create_task(self._write(queue, context))
        if len(self._queues) == self._nodes and not self._round:
            self._tell()
        try:
            while await context.read() is not grpc.aio.EOF:
                pass
        finally:
            writer.cancel()
            self._queues.remove(queue)
            self._tell()

    async def _write(self, queue: asyncio.Queue[pb.ToAgent], context: Any) -> None:
        while True:
            await context.write(await queue.get())

    def _tell(self) -> None:
        self._round += 1
        order = pb.Directive(kind=pb.Directive.RUN, round=self._round, store="10.0.0.1:29500")
        for queue in self._queues[: self._nodes]:
            queue.put_nowait(pb.ToAgent(directive=order))


async def main(port: int, nodes: int) -> None:
    server = open_server(f"127.0.0.1:{port}", Security())
    master_pb2_grpc.add_MasterServicer_to_server(BareMaster(nodes), server)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))

"""`python -m elastic.checkpoint.keeper.process FD`: keeps a node's snapshots without `elastic-run`.

It takes the agent's part for one `Checkpointer` of each rank of its node, and ends by itself: once these
ranks are gone, however they went, and the newest snapshot of the whole job is on storage. In a
session of its own and deaf to signals, for what ends ranks must not end it. Needs no torch.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from setproctitle import setproctitle

from elastic.agent import children
from elastic.agent.settings import AgentSettings, LogSettings, Workload
from elastic.agent.snapshots.snapshots import PERSIST_TIMEOUT, Snapshots
from elastic.agent.snapshots.vault import Kept
from elastic.checkpoint.keeper.hub import Hub, Link
from elastic.proto import codec, env, keeper_process
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import CodecError
from elastic.proto.keeper_process import (
    DATAGRAM,
    Answer,
    Await,
    Join,
    Refused,
    Request,
    Start,
    Welcome,
)
from elastic.proto.limits import lift_open_files
from elastic.proto.security import Security

log = logging.getLogger(__name__)

KILL_TIMEOUT = 10.0
"""Seconds that a flusher may take to end, at the end."""


def main(args: list[str]) -> None:
    """Be the keeper of the `Start` in the descriptor `args[0]`."""
    fd = int(args[0])
    start = codec.loads(Start, os.pread(fd, os.fstat(fd).st_size, 0))
    os.close(fd)
    if os.fork():
        os._exit(0)  # nobody's child: no script waits for it, or finds it where it waits for any
    setproctitle(f"elastic-keeper {start.checkpoint}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="elastic-keeper: %(message)s")
    lift_open_files()  # the rank's limit may be low, and each slot takes some
    asyncio.run(_run(start))


async def _run(start: Start) -> None:
    await KeeperProcess(start).run()


class KeeperProcess:
    """One node's."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._listener = socket.socket(fileno=start.listener)
        self._listener.setblocking(False)
        self._news = asyncio.Event()
        self._ends: dict[int, socket.socket] = {}
        """Of the ranks that have come."""
        self._closed: dict[int, asyncio.Future[None]] = {}
        """By rank, done when it is gone."""
        self._waiting: list[socket.socket] = []
        """Of later starts, which see our end by theirs."""
        self._snapshots = Snapshots(_settings(start), Kept(), lambda: start.job, self._say)
        side = Hub if start.rank == 0 else Link
        self._side: Hub | Link = side(start, self._snapshots.obey, self._news.set)

    def _say(self, told: pb.Snapshots | pb.Stand) -> None:
        if isinstance(told, pb.Snapshots):  # nobody has these ranks leave
            self._side.say(told)

    @property
    def _gone(self) -> bool:
        """All ranks that have come."""
        return bool(self._closed) and all(closed.done() for closed in self._closed.values())

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def run(self) -> None:
        try:
            await self._keep()
        finally:
            self._snapshots.kill()
            await children.sweep(set, KILL_TIMEOUT)

    async def _keep(self) -> None:
        loop, serving = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        # Not `sock_accept`, which fails where somebody comes just as it is cancelled.
        loop.add_reader(self._listener, self._accept, serving)
        side = asyncio.create_task(self._side.run())
        try:
            async with asyncio.timeout(self._start.timeout):
                await self._until(lambda: self._gone or self._side.over or not self._missing())
        except TimeoutError:
            self._refuse()
            return
        if self._missing():
            return  # who came is gone again
        self._tell(Welcome(job=self._start.job))
        await self._until(lambda: self._gone or self._side.over)
        if self._gone:
            await self._finish()
        else:
            log.error(
                "checkpoint %s: the keeper of rank 0 is gone, and with it these snapshots' keeping: "
                "start the job again",
                self._start.checkpoint,
            )
        loop.remove_reader(self._listener)
        side.cancel()

    async def _finish(self) -> None:
        """No rank is here any more; have what is whole written, with the other nodes."""
        for told in self._snapshots.statements():
            self._say(told)
        self._side.leave()
        await self._until(lambda: self._side.over)
        if isinstance(self._side, Hub):
            self._side.end()
            await self._snapshots.persisted(PERSIST_TIMEOUT)

    # --- ranks -------------------------------------------------------------------------------

    def _accept(self, serving: set[asyncio.Task[None]]) -> None:
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # who came is gone again
        end.setblocking(False)
        if keeper_process.peer_uid(end) != os.getuid():
            end.close()
            return
        task = asyncio.create_task(self._serve(end))
        serving.add(task)
        task.add_done_callback(serving.discard)

    async def _serve(self, end: socket.socket) -> None:
        try:
            data = await asyncio.get_running_loop().sock_recv(end, DATAGRAM)
            message = codec.loads(Request, data)
        except (OSError, CodecError):
            end.close()
            return
        if isinstance(message, Join) and message.rank in self._missing_here() and not self._gone:
            self._ends[message.rank] = end
            self._closed[message.rank] = closed = self._snapshots.open(end, self._start.round)
            closed.add_done_callback(lambda _: self._news.set())
            self._news.set()
        elif isinstance(message, Await) and self._gone:
            self._waiting.append(end)
        else:  # also a rank of a later start, which has found our name where its keeper's will be
            end.close()

    def _missing_here(self) -> set[int]:
        first = self._start.rank
        return set(range(first, first + self._start.local_world_size)) - self._closed.keys()

    def _missing(self) -> set[int]:
        return self._missing_here() | self._side.missing()

    def _tell(self, answer: Answer) -> None:
        for end in self._ends.values():
            try:
                end.send(codec.dumps(answer).encode(), socket.MSG_NOSIGNAL)
            except OSError:
                continue  # it is gone, as its future says

    def _refuse(self) -> None:
        ranks = ", ".join(map(str, sorted(self._missing())[:8]))
        answer = Refused(
            reason=f"{self._start.checkpoint}: rank {ranks} made no Checkpointer within "
            f"{self._start.timeout:g} s: every rank of the job must make one of the same path"
        )
        self._tell(answer)
        self._side.refuse(answer)


def _settings(start: Start) -> AgentSettings:
    """What of an agent's is asked for here."""
    work = Workload(
        kind="script", entry="", python=sys.executable, environ=env.process_environment(), cwd="/"
    )
    return AgentSettings(
        run_id=start.job,
        node_id=str(start.rank),
        slots=start.local_world_size,
        master="",
        host="",
        workload=work,
        logs=LogSettings(run_dir=None),
        security=Security(),
    )


if __name__ == "__main__":
    main(sys.argv[1:])

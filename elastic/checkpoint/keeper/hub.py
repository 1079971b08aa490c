"""How the keepers of a job's nodes hang together: rank 0's decides, in the master's place.

What is decided is `master/checkpoints.py`'s; what is said is what agents and a master say.
"""

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from elastic.master import checkpoints, messages
from elastic.master.checkpoints import Checkpoint
from elastic.master.events import Incarnation, NodeId
from elastic.master.holdings import Member
from elastic.proto import codec, keeper_process, version
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import CodecError, ProtocolMismatch
from elastic.proto.keeper_process import Greeting, Refused, Start, Welcome

log = logging.getLogger(__name__)

GREETING_TIMEOUT = 10.0
"""Seconds that who connects has to say who it is."""
_LIFE = Incarnation(1)
"""A keeper has one."""
_BROKEN = (OSError, EOFError, ValueError, CodecError, DecodeError)
"""How a connection ends that does not end well."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    """A node's keeper, as rank 0's knows it."""

    ranks: range
    tell: Callable[[pb.SnapshotOrders], None]
    writer: asyncio.StreamWriter | None = None
    """None: it is rank 0's own."""
    told: pb.SnapshotOrders = field(default_factory=pb.SnapshotOrders)
    """The last."""
    left: bool = False
    """Its ranks are gone."""

    @property
    def id(self) -> NodeId:
        return NodeId(f"{self.ranks.start:010}")


class Hub:
    """In rank 0's keeper. `obey` takes orders for its own node; `changed` is called when there is news
    of the others."""

    def __init__(
        self, start: Start, obey: Callable[[pb.SnapshotOrders], None], changed: Callable[[], None]
    ) -> None:
        self._start = start
        self._changed = changed
        self._own = _Node(ranks=range(start.local_world_size), tell=obey)
        self._nodes = {self._own.id: self._own}
        self._state = Checkpoint()
        self._ending = False

    async def run(self) -> None:
        """Serve the others."""
        if self._start.peers is not None:
            listener = socket.socket(fileno=self._start.peers)
            server = await asyncio.start_server(
                self._serve, sock=listener, limit=keeper_process.DATAGRAM
            )
            await server.serve_forever()

    def missing(self) -> set[int]:
        """Ranks whose node is not here yet."""
        here = {rank for node in self._nodes.values() for rank in node.ranks}
        return set(range(self._start.world_size)) - here

    @property
    def over(self) -> bool:
        """No rank of the job is left."""
        return all(node.left for node in self._nodes.values())

    # --- what nodes say ----------------------------------------------------------------------

    def say(self, told: pb.Snapshots) -> None:
        """Of our own node; heard in its turn, for what follows from it comes back to who said it."""
        asyncio.get_running_loop().call_soon(self._hear, self._own, told)

    def leave(self) -> None:
        """Our own ranks are gone, and all of them was said."""
        asyncio.get_running_loop().call_soon(self._leave, self._own)

    def _leave(self, node: _Node) -> None:
        node.left = True
        self._changed()

    def end(self) -> None:
        """All ranks are gone: have the newest snapshot that is whole written."""
        self._ending = True
        self._decide()

    def _hear(self, node: _Node, told: pb.Snapshots) -> None:
        if told.checkpoint == self._start.checkpoint:
            said = messages.said(told, node.id, _LIFE)
            self._state = checkpoints.hear(self._state, said)
            self._decide()

    def _decide(self) -> None:
        ordered = [self._nodes[node_id] for node_id in sorted(self._nodes)]
        members = [] if self._ending else [Member(node.id, node.ranks) for node in ordered]
        self._state, orders = checkpoints.decide(
            self._state, self._start.round, members, ending=self._ending
        )
        for node in ordered:
            order = messages.snapshot_orders(self._start.checkpoint, orders)
            messages.own_part(node.id, orders, self._state.said, order)
            if order != node.told:
                node.told = order
                node.tell(order)

    # --- other nodes -------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = None
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                node = self._greeted(codec.loads(Greeting, await reader.readline()), writer)
            keep_alive(writer.get_extra_info("socket"))
            while node is not None:
                message = pb.FromAgent.FromString(await keeper_process.read_frame(reader))
                if message.HasField("snapshots"):
                    self._hear(node, message.snapshots)
                elif message.HasField("leaving"):
                    self._leave(node)
        except _BROKEN:
            pass
        finally:
            writer.close()
        if node is not None:
            self._lost(node)

    def _greeted(self, greeting: Greeting, writer: asyncio.StreamWriter) -> _Node | None:
        """A node that was missing; None for whoever else has found our address."""
        if not hmac.compare_digest(greeting.secret.encode(), self._start.secret.encode()):
            return None
        try:
            theirs = version.parse(greeting.version) or version.FIRST
            version.check("another node's keeper", theirs, version.WIRE)
        except ProtocolMismatch as error:
            writer.write(keeper_process.line(Refused(reason=str(error))))
            return None
        ranks = range(greeting.rank, greeting.rank + greeting.local_world_size)
        missing = self.missing()
        if not ranks or not all(rank in missing for rank in ranks):
            return None

        def tell(order: pb.SnapshotOrders) -> None:
            writer.write(keeper_process.frame(pb.ToAgent(snapshots=order)))

        node = _Node(ranks=ranks, tell=tell, writer=writer)
        self._nodes[node.id] = node
        if not self.missing():
            self._answer(Welcome(job=self._start.job))
            self._changed()
        return node

    def _answer(self, answer: Welcome | Refused) -> None:
        for node in self._nodes.values():
            if node.writer is not None:
                node.writer.write(keeper_process.line(answer))

    def refuse(self, answer: Refused) -> None:
        self._answer(answer)

    def _lost(self, node: _Node) -> None:
        """Its connection ended."""
        if self.missing():
            del self._nodes[node.id]  # it may come again
            return
        if not node.left and not self._ending:
            log.error(
                "checkpoint %s: the keeper of ranks %d to %d is gone, and no snapshot becomes whole "
                "without them: start the job again",
                self._start.checkpoint,
                node.ranks[0],
                node.ranks[-1],
            )
        self._state = checkpoints.forget(self._state, node.id, _LIFE)
        self._leave(node)
        self._decide()


class Link:
    """In the keeper of another node: its connection to rank 0's."""

    def __init__(
        self, start: Start, obey: Callable[[pb.SnapshotOrders], None], changed: Callable[[], None]
    ) -> None:
        assert start.peers is not None
        self._end = socket.socket(fileno=start.peers)
        self._obey = obey
        self._changed = changed
        self._writer: asyncio.StreamWriter | None = None
        self.over = False
        """The connection ended: rank 0's keeper has ended, well or not."""

    async def run(self) -> None:
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._end)
            keep_alive(self._end)
            self._changed()
            while True:
                message = pb.ToAgent.FromString(await keeper_process.read_frame(reader))
                self._obey(message.snapshots)
        except _BROKEN:
            pass
        finally:
            self.over = True
            self._changed()

    def missing(self) -> set[int]:
        """Where there is a connection, all nodes are here."""
        return {0} if self._writer is None else set()

    def refuse(self, answer: Refused) -> None:
        """Nobody is served here."""

    def say(self, told: pb.Snapshots) -> None:
        self._send(pb.FromAgent(snapshots=told))

    def leave(self) -> None:
        self._send(pb.FromAgent(leaving=pb.Leaving()))

    def _send(self, message: pb.FromAgent) -> None:
        if self._writer is not None:
            self._writer.write(keeper_process.frame(message))


def keep_alive(end: socket.socket) -> None:
    """Have a host that is lost noticed in half a minute."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 4),
    ):
        end.setsockopt(socket.IPPROTO_TCP, option, value)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)

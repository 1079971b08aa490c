"""The master's face towards agents: their streams in, directives out."""

import asyncio
import contextlib
import functools
import logging
from pathlib import Path
from typing import Any

import grpc

from elastic.master import directive as orders
from elastic.master import events as ev
from elastic.master import messages
from elastic.master.boundary import Boundary
from elastic.master.events import Effect, Incarnation, KnockAnswer, NodeId
from elastic.master.gathering import Gathering
from elastic.master.health import Health
from elastic.master.knock import LONGEST as LONGEST_KNOCK
from elastic.master.knock import knock
from elastic.master.log_relay import LogRelay
from elastic.master.nodes import Node, NodeState
from elastic.master.pacing import Pacing
from elastic.master.session import Session, abort
from elastic.master.shell import Shell
from elastic.master.snapshots import Snapshots
from elastic.master.state import is_stale
from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.errors import ProtocolMismatch
from elastic.proto.job_folder import MOST_METRICS
from elastic.proto.limits import LONGEST_NAME, MOST_SLOTS

log = logging.getLogger(__name__)

KNOCK_EVERY = 1.0
"""Seconds between knocks at a node that stays unreachable."""
KNOCKS_A_SECOND, BURST = 500, 64
"""Beyond a burst; after a master's restart thousands are away, and attach while they wait for it."""
HELLO_TIMEOUT = 60.0
"""Seconds in which a stream must begin with Hello: many, for thousands may begin at once."""


class Streams(master_pb2_grpc.MasterServicer):
    """Translates between streams and the shell. One event loop, no locks, no thread a stream."""

    def __init__(self, shell: Shell, run_id: str, folder: Path | None = None) -> None:
        self.over = asyncio.Event()
        """Set when the job has a result."""
        self.sessions: dict[NodeId, Session] = {}
        self.logs = LogRelay()
        self.stale = 0
        """Messages that a fence dropped, of a life or a round that is over, since this master began."""
        self._shell = shell
        self._run_id = run_id
        self.snapshots = Snapshots(shell, self.sessions)
        self._boundary = Boundary(shell, self.sessions, self.snapshots)
        self._health = Health(shell, self.sessions, folder)
        self._pacing = Pacing(shell, self.sessions)
        self._news = Gathering(shell.fold)
        self._places = orders.places(None)
        self._placed: tuple[int, bool] = (0, False)
        self._knocking: dict[tuple[NodeId, Incarnation], asyncio.Event] = {}
        """Lives that are knocked at; set, the next knock does not wait."""
        self._turn = asyncio.Lock()
        """Of who may knock next."""
        self._next_knock = 0.0
        """When one more may go out, in the loop's time, as if there were no bursts."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._away: dict[NodeId, float] = {}
        """Nodes that may not have heard of the job's end, and until when they may come back for it."""

    @property
    def heartbeat_interval(self) -> float:
        """Seconds; longer for thousands of nodes, so that they cost one core at most."""
        return max(1.0, self._shell.policy.max_nodes / 1000)

    @property
    def metrics(self) -> str:
        """What the script said of its newest step."""
        current = self._shell.job.round
        head = None if current is None else self.sessions.get(current.seats[0].node_id)
        return "" if head is None else head.metrics

    # --- agents ---------------------------------------------------------------------------

    async def Attach(self, requests: Any, context: Any) -> None:
        session = self._open(await self._hello(context), context)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                session.heard = asyncio.get_running_loop().time()
                self._receive(session, message)
                del message  # it would live until the next one comes, on each of thousands
        except asyncio.CancelledError:
            if not session.closed:
                raise
            # Without a status the agent would take the stream for open, for ever.
            await abort(context, grpc.StatusCode.UNAVAILABLE, "the master closed this stream")
        finally:
            self.logs.end(session)
            if self.sessions.get(session.node_id) is session:
                del self.sessions[session.node_id]
                self._away.pop(session.node_id, None)
                if self.over.is_set() and not session.left:  # it may not have heard
                    self._away[session.node_id] = self._back_by()
                gone = (session.node_id, session.incarnation)
                self.snapshots.gone(*gone)
                self._news.add(session.node_id, ev.Detached((gone,)))

    @functools.cached_property
    def _welcome(self) -> pb.ToAgent:
        job = self._shell.job
        welcome = pb.Welcome(
            version=pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
            job_uid=job.uid,
            epoch=job.epoch,
            heartbeat_interval=self.heartbeat_interval,
        )
        return pb.ToAgent(welcome=welcome)

    async def _hello(self, context: Any) -> pb.Hello:
        """The first message, of an agent that belongs to this job; all others are turned away."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                first = await context.read()
        except TimeoutError:
            await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello came")
        if first is grpc.aio.EOF or not first.HasField("hello"):
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the first message is Hello")
        hello: pb.Hello = first.hello
        refusal = self._refusal(hello) or await self._namesake(hello)
        if refusal:
            log.warning("refused %s: %s", hello.node_id[:LONGEST_NAME], refusal)
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return hello

    def _refusal(self, hello: pb.Hello) -> str:
        try:
            theirs = version.Version(hello.version.major, hello.version.minor)
            version.check("the agent", theirs, version.WIRE)
        except ProtocolMismatch as error:
            return str(error)
        job = self._shell.job
        if hello.run_id != self._run_id:
            return f"this master runs job {self._run_id!r}, not {hello.run_id[:256]!r}"
        if hello.job_uid and hello.job_uid != job.uid:
            return "this master has begun another job under the same name"
        if hello.epoch > job.epoch:
            return f"this master is in epoch {job.epoch}, the agent has obeyed {hello.epoch}"
        if not 0 < len(hello.node_id) <= LONGEST_NAME:
            return f"a node's name has 1 to {LONGEST_NAME} characters"
        if not 0 < hello.slots <= MOST_SLOTS:
            return f"a node has 1 to {MOST_SLOTS} slots"
        host, _, port = hello.knock_address.rpartition(":")
        if not (0 < len(host) <= 256 and port.isdecimal() and len(port) < 6 and int(port) < 65536):
            return "a node says where it can be knocked at, as host:port"
        return ""

    async def _namesake(self, hello: pb.Hello) -> str:
        """Whether another launcher has the name, and lives: two would push each other out for ever."""
        node = self._shell.job.nodes.get(NodeId(hello.node_id))
        if node is None or hello.knock_address == node.knock_address:
            return ""  # new, or another life of the agent that one guardian starts
        if await knock(node.knock_address, node.incarnation) is not KnockAnswer.ALIVE:
            return ""
        return (
            f"a node named {hello.node_id[:LONGEST_NAME]} is in the job already, and lives at {node.host}: "
            "give each node a --node-id of its own"
        )

    def _open(self, hello: pb.Hello, context: Any) -> Session:
        session = Session(hello, context)
        old = self.sessions.get(session.node_id)
        self.sessions[session.node_id] = session
        if old is not None:
            old.close()
        session.push(self._welcome)
        self._news.add(session.node_id, ev.Attached((messages.attachment(hello),)))
        for told in hello.snapshots:
            self.snapshots.hear(session, told)
        self._boundary.attached(session, hello.stands)
        if len(self._shell.job.nodes) + self._news.arriving == self._shell.policy.max_nodes:
            asyncio.get_running_loop().call_soon(self._news.flush)
        return session

    def flush(self) -> None:
        """Fold who came and went until now."""
        self._news.flush()

    def _fold(self, session: Session, event: ev.Event, number: int | None = None) -> None:
        """What a node says is folded after all that came before it, which may be what it is about: a
        rank fails because another node is gone. number: of the round it speaks of.
        """
        self.flush()
        self.stale += is_stale(self._shell.job, session.node_id, session.incarnation, number)
        self._shell.fold(event)

    def _receive(self, session: Session, message: pb.FromAgent) -> None:
        kind = message.WhichOneof("body")
        node_id, incarnation = session.node_id, session.incarnation
        if kind == "heartbeat":
            self._heartbeat(session, message.heartbeat)
            return
        if _is_said_again(message) and self._shell.stuck:
            return
        if kind == "report":
            told = messages.report(message.report)
            self._fold(session, ev.Reported(node_id, incarnation, told), told.round)
        elif kind == "spare_store":
            address = message.spare_store.address
            self._fold(session, ev.StoreReady(node_id, incarnation, address))
        elif kind == "probed":
            health = messages.health(message.probed, node_id, incarnation)
            self._news.add(node_id, ev.Probed((health,)))
        elif kind == "paired":
            pairing = messages.pairing(message.paired, node_id, incarnation)
            self._news.add(node_id, ev.Paired((pairing,)))
        elif kind == "unit":
            unit = message.unit
            if unit.unit != self._shell.job.unit:
                declared = ev.UnitDeclared(unit.round, unit.unit, node_id, incarnation)
                self._fold(session, declared, unit.round)
        elif kind == "leaving":
            session.left = not message.leaving.drain
            reason = message.leaving.reason[: messages.MAX_TEXT]
            left = ev.Left(node_id, incarnation, reason)
            drain = ev.DrainAsked(node_id, reason)
            self._fold(session, drain if message.leaving.drain else left)
        elif kind == "snapshots":
            self.snapshots.hear(session, message.snapshots)
            self._boundary.look()
        elif kind == "sync":
            self.flush()
            self.snapshots.sync(session)
        elif kind == "found":
            self.snapshots.found(message.found)
        elif kind == "examined":
            self._health.examined(session, message.examined)
        elif kind == "stand":
            self._boundary.hear(session, message.stand)
        elif kind == "log":
            self.logs.take(session, message.log)

    def _heartbeat(self, session: Session, beat: pb.Heartbeat) -> None:
        session.progress = beat.ranks
        session.metrics = beat.metrics[:MOST_METRICS]
        if self._shell.stuck:
            return
        current = self._shell.job.round
        node = self._shell.job.nodes.get(session.node_id)
        waits = current is not None and current.standing and session.node_id not in self._places
        if beat.prepared and waits and node is not None and not node.prepared:
            self._shell.fold(ev.Prepared(session.node_id, session.incarnation))
            current = self._shell.job.round
        if current is None or beat.round != current.number or not current.standing:
            self.stale += current is not None and beat.round not in (0, current.number)
            return
        self._health.heard(session, beat)
        self._pacing.heard(session, beat, self.heartbeat_interval)
        if current.seats[0].node_id != session.node_id:
            return
        step = max((rank.step for rank in beat.ranks), default=0)
        lively = step or any(rank.ticks for rank in beat.ranks)
        if lively and (not current.stepped or step > current.step):
            self._shell.fold(ev.Progressed(current.number, step, beat.plain))

    # --- effects --------------------------------------------------------------------------

    def act(self, effect: Effect) -> None:
        if isinstance(effect, ev.Tell):
            self.snapshots.review()
            self._boundary.review()
            self._health.review()
            self._tell(effect.node_ids)
        elif isinstance(effect, ev.Knock):
            key = (effect.node_id, effect.incarnation)
            node = self._shell.job.nodes.get(effect.node_id)
            if key in self._knocking:
                self._knocking[key].set()
            elif node is not None and node.incarnation == effect.incarnation:
                again = self._knocking[key] = asyncio.Event()
                self._start(self._keep_knocking(node, again))
        elif isinstance(effect, ev.Finished):
            log.info("job over: %s", effect.reason)
            away = [node_id for node_id in self._shell.job.nodes if node_id not in self.sessions]
            self._away = dict.fromkeys(away, self._back_by())
            self.over.set()

    def _tell(self, node_ids: frozenset[NodeId] | None) -> None:
        job = self._shell.job
        current = job.round
        placed = (current.number, current.standing) if current else (0, False)
        if placed != self._placed:
            self._placed, self._places = placed, orders.places(current)
        for node_id in self.sessions if node_ids is None else node_ids:
            session = self.sessions.get(node_id)
            node = job.nodes.get(node_id)
            if session is None or (node is None and job.result is None):
                continue
            if node is not None and node.incarnation != session.incarnation:
                continue
            order = orders.directive(job, node_id, self._places)
            more = order.store or order.prepare or order.probe
            already = session.idle and order.kind == "wait" and not more
            if order != session.told and not already:
                session.told, session.idle = order, False
                session.push(messages.directive(order, node_id, job.epoch))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # an exception goes to the loop's handler, see main.py

    async def _keep_knocking(self, node: Node, again: asyncio.Event) -> None:
        """Until this life of the node is back, or gone."""
        key = (node.node_id, node.incarnation)
        clock = asyncio.get_running_loop().time
        try:
            while await self._my_turn(*key):
                again.clear()
                since, began = self._away_since(*key), clock()
                answer = await knock(node.knock_address, node.incarnation)
                # Late, this process stood still and did not hear; and it may have come and gone.
                counts = clock() - began < LONGEST_KNOCK and since == self._away_since(*key)
                if counts and not self._shell.stuck:
                    self._news.add(node.node_id, ev.Knocked(((*key, answer),)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KNOCK_EVERY):
                        await again.wait()
        finally:
            del self._knocking[key]

    async def _my_turn(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Wait until one more knock may go out; False: this one need not. Who is back takes no turn."""
        async with self._turn:
            if self._away_since(node_id, incarnation) is None:
                return False
            now = asyncio.get_running_loop().time()
            earliest = now - BURST / KNOCKS_A_SECOND
            self._next_knock = max(self._next_knock, earliest) + 1 / KNOCKS_A_SECOND
            if self._next_knock > now:
                await asyncio.sleep(self._next_knock - now)
            return True

    def _away_since(self, node_id: NodeId, incarnation: Incarnation) -> float | None:
        """When this life of the node fell silent; None: it is here, or gone."""
        node = self._shell.job.nodes.get(node_id)
        if node is None or node.incarnation != incarnation:
            return None
        return node.changed if node.state is NodeState.UNREACHABLE else None

    async def watch_silence(self) -> None:
        """End streams on which nothing came for too long; their nodes are then knocked at."""
        limit, pause = 2.5 * self.heartbeat_interval, self.heartbeat_interval / 2
        clock = asyncio.get_running_loop().time
        while True:
            before = clock()
            await asyncio.sleep(pause)
            now = clock()
            if now - before > 2 * pause:
                continue  # this process stood still, so it may not have heard
            for session in list(self.sessions.values()):
                if now - session.heard > limit:
                    session.close()

    async def farewell(self, patience: float) -> None:
        """Wait until every agent has taken its last directive, `patience` seconds at most.

        Nodes that are away, and those that a master started again has not seen yet, get one lease
        to come back. Longer while snapshots are written to storage: agents know when to stop that.
        """
        clock = asyncio.get_running_loop().time
        over = clock() + patience
        while (self.sessions and (clock() < over or self.snapshots.pending)) or any(
            clock() < t for t in self._away.values()
        ):
            await asyncio.sleep(0.02)

    def ended(self, node_id: NodeId) -> None:
        """Nobody will come back for a last word."""
        self._away.pop(node_id, None)

    def _back_by(self) -> float:
        return asyncio.get_running_loop().time() + self._shell.policy.lease


def _is_said_again(message: pb.FromAgent) -> bool:
    """With every heartbeat; what is not folded then need not be kept."""
    return message.HasField("unit") or (message.HasField("leaving") and message.leaving.drain)

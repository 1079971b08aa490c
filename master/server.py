"""The master's gRPC face: streams of agents in, directives out; status and verbs for people."""

import asyncio
import functools
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from elastic.master import directive as orders
from elastic.master import events as ev
from elastic.master import messages
from elastic.master.events import Effect, KnockAnswer, NodeId
from elastic.master.job import DRAINED
from elastic.master.journal import Journal
from elastic.master.knock import knock
from elastic.master.nodes import Node, NodeState
from elastic.master.report import report
from elastic.master.session import Session
from elastic.master.shell import Shell
from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.errors import ProtocolMismatch

log = logging.getLogger(__name__)

BATCH, LONGEST_BATCH = 0.002, 0.2
"""Seconds in which arrivals are gathered into one event; an event costs O(nodes), so the more there
are the longer: LOAD times what the last one took, or until the job is complete."""
LOAD = 20
LOG_CHUNKS = 64
"""Chunks of a log that wait for who asked for them at most."""
KNOCK_EVERY = 1.0
"""Seconds between knocks at a node that stays unreachable."""


class MasterServicer(master_pb2_grpc.MasterServicer):
    """Translates between streams and the shell. One event loop, no locks, no thread a stream."""

    def __init__(self, shell: Shell, journal: Journal, run_id: str, *, open_admin: bool) -> None:
        self.shell = shell
        self.over = asyncio.Event()
        """Set when the job has a result."""
        self._journal = journal
        self._run_id = run_id
        self._open_admin = open_admin
        self._sessions: dict[NodeId, Session] = {}
        self._arrivals: dict[NodeId, ev.Attachment] = {}
        self._batch = BATCH
        self._places = orders.places(None)
        self._placed: tuple[int, bool] = (0, False)
        self._knocking: set[NodeId] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs: dict[int, tuple[Session, asyncio.Queue[pb.LogChunk]]] = {}
        self._requests = 0
        self._stale = 0

    @property
    def heartbeat_interval(self) -> float:
        """Seconds; longer for thousands of nodes, so that they cost one core at most."""
        return max(1.0, self.shell.policy.max_nodes / 1000)

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
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the master closed this stream")
        finally:
            if self._sessions.get(session.node_id) is session:
                del self._sessions[session.node_id]
                self._end_logs_of(session)
                self._fold_arrival_of(session)
                self.shell.fold(ev.Detached(session.node_id, session.incarnation))

    def _end_logs_of(self, session: Session) -> None:
        """Who reads a log from there gets no more of it."""
        for owner, inbox in self._logs.values():
            if owner is session and not inbox.full():
                inbox.put_nowait(pb.LogChunk(end=True, error="the node went away"))

    @functools.cached_property
    def _welcome(self) -> pb.ToAgent:
        job = self.shell.job
        welcome = pb.Welcome(
            version=pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
            job_uid=job.uid,
            epoch=job.epoch,
            heartbeat_interval=self.heartbeat_interval,
        )
        return pb.ToAgent(welcome=welcome)

    async def _hello(self, context: Any) -> pb.Hello:
        """The first message, of an agent that belongs to this job; all others are turned away."""
        first = await context.read()
        if first is grpc.aio.EOF or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is Hello")
        hello: pb.Hello = first.hello
        refusal = self._refusal(hello) or await self._namesake(hello)
        if refusal:
            log.warning("refused %s: %s", hello.node_id[:256], refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return hello

    def _refusal(self, hello: pb.Hello) -> str:
        try:
            theirs = version.Version(hello.version.major, hello.version.minor)
            version.check("the agent", theirs, version.WIRE)
        except ProtocolMismatch as error:
            return str(error)
        job = self.shell.job
        if hello.run_id != self._run_id:
            return f"this master runs job {self._run_id!r}, not {hello.run_id[:256]!r}"
        if hello.job_uid and hello.job_uid != job.uid:
            return "this master has begun another job under the same name"
        if hello.epoch > job.epoch:
            return f"this master is in epoch {job.epoch}, the agent has obeyed {hello.epoch}"
        if not 0 < len(hello.node_id) <= 256 or not 0 < hello.slots <= 4096:
            return "a node has a name of up to 256 characters and 1 to 4096 slots"
        return ""

    async def _namesake(self, hello: pb.Hello) -> str:
        """Whether another launcher has the name, and lives: two would push each other out for ever."""
        node = self.shell.job.nodes.get(NodeId(hello.node_id))
        if node is None or hello.knock_address == node.knock_address:
            return ""  # new, or another life of the agent that one guardian starts
        if await knock(node.knock_address, node.incarnation) is not KnockAnswer.ALIVE:
            return ""
        return (
            f"a node named {hello.node_id[:256]} is in the job already, and lives at {node.host}: "
            "give each node a --node-id of its own"
        )

    def _open(self, hello: pb.Hello, context: Any) -> Session:
        session = Session(hello, context)
        old = self._sessions.get(session.node_id)
        self._sessions[session.node_id] = session
        if old is not None:
            old.close()
        session.push(self._welcome)
        if not self._arrivals:
            asyncio.get_running_loop().call_later(self._batch, self._fold_arrivals)
        self._arrivals[session.node_id] = messages.attachment(hello)
        if len(self.shell.job.nodes) + len(self._arrivals) == self.shell.policy.max_nodes:
            asyncio.get_running_loop().call_soon(self._fold_arrivals)
        return session

    def _fold_arrivals(self) -> None:
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, {}
            began = time.monotonic()
            self.shell.fold(ev.Attached(tuple(arrivals.values())))
            self._batch = min(max(BATCH, LOAD * (time.monotonic() - began)), LONGEST_BATCH)

    def _fold_arrival_of(self, session: Session) -> None:
        """What a node says is folded after its arrival."""
        if session.node_id in self._arrivals:
            self._fold_arrivals()

    def _receive(self, session: Session, message: pb.FromAgent) -> None:
        kind = message.WhichOneof("body")
        node_id, incarnation = session.node_id, session.incarnation
        if kind == "heartbeat":
            self._heartbeat(session, message.heartbeat)
            return
        self._fold_arrival_of(session)
        if kind == "report":
            told = messages.report(message.report)
            self._stale += told.round != self.shell.job.last_round
            self.shell.fold(ev.Reported(node_id, incarnation, told))
        elif kind == "spare_store":
            self.shell.fold(ev.StoreReady(node_id, incarnation, message.spare_store.address))
        elif kind == "unit":
            self.shell.fold(ev.UnitDeclared(message.unit.round, message.unit.unit))
        elif kind == "leaving":
            reason = message.leaving.reason[: messages.MAX_TEXT]
            left = ev.Left(node_id, incarnation, reason)
            self.shell.fold(ev.DrainAsked(node_id, reason) if message.leaving.drain else left)
        elif kind == "log" and message.log.request in self._logs:
            self._relay_log(session, message.log)

    def _relay_log(self, session: Session, chunk: pb.LogChunk) -> None:
        """Towards whoever asked; who reads too slowly for our memory loses the rest."""
        (_, inbox), number = self._logs[chunk.request], chunk.request
        if inbox.full():
            inbox.get_nowait()
            chunk = pb.LogChunk(end=True, error="read too slowly: ask for less with --tail")
            session.push(pb.ToAgent(read_log=pb.ReadLogRequest(request=number, cancel=True)))
        inbox.put_nowait(chunk)

    def _heartbeat(self, session: Session, beat: pb.Heartbeat) -> None:
        session.progress = beat.ranks
        current = self.shell.job.round
        if current is None or beat.round != current.number or not current.standing:
            self._stale += current is not None and beat.round not in (0, current.number)
            return
        if current.seats[0].node_id != session.node_id:
            return
        step = max((rank.step for rank in beat.ranks), default=0)
        lively = step or any(rank.ticks for rank in beat.ranks)
        if lively and (not current.stepped or step > current.step):
            self.shell.fold(ev.Progressed(current.number, step))

    # --- effects --------------------------------------------------------------------------

    def act(self, effect: Effect) -> None:
        if isinstance(effect, ev.Tell):
            self._tell(effect.node_ids)
        elif isinstance(effect, ev.Knock):
            node = self.shell.job.nodes.get(effect.node_id)
            if node is not None and effect.node_id not in self._knocking:
                self._knocking.add(effect.node_id)
                self._start(self._keep_knocking(node))
        elif isinstance(effect, ev.Finished):
            log.info("job over: %s", effect.reason)
            self.over.set()

    def _tell(self, node_ids: frozenset[NodeId] | None) -> None:
        job = self.shell.job
        current = job.round
        placed = (current.number, current.standing) if current else (0, False)
        if placed != self._placed:
            self._placed, self._places = placed, orders.places(current)
        for node_id in self._sessions if node_ids is None else node_ids:
            session = self._sessions.get(node_id)
            node = job.nodes.get(node_id)
            if session is None or (node is None and job.result is None):
                continue
            if node is not None and node.incarnation != session.incarnation:
                continue
            order = orders.directive(job, node_id, self._places)
            already = session.idle and order.kind == "wait" and not order.store
            if order != session.told and not already:
                session.told, session.idle = order, False
                session.push(messages.directive(order, job.epoch))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # an exception goes to the loop's handler, see main.py

    async def _keep_knocking(self, node: Node) -> None:
        """Until the node is back, or gone."""
        try:
            while True:
                answer = await knock(node.knock_address, node.incarnation)
                self.shell.fold(ev.Knocked(node.node_id, node.incarnation, answer))
                now = self.shell.job.nodes.get(node.node_id)
                if now is None or now.incarnation != node.incarnation:
                    return
                if now.state is not NodeState.UNREACHABLE:
                    return
                await asyncio.sleep(KNOCK_EVERY)
        finally:
            self._knocking.discard(node.node_id)

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
            for session in list(self._sessions.values()):
                if now - session.heard > limit:
                    session.close()

    async def farewell(self, patience: float) -> None:
        """Wait until every agent has taken its last directive, `patience` seconds at most."""
        deadline = asyncio.get_running_loop().time() + patience
        while self._sessions and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    # --- people ---------------------------------------------------------------------------

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        job = self.shell.job
        current = job.round
        places = orders.places(current)
        return pb.Status(
            run_id=self._run_id,
            job_uid=job.uid,
            epoch=job.epoch,
            phase=self._phase(),
            reason=self.shell.reason,
            round=job.last_round,
            world_size=sum(s.ranks for s in current.seats) if current and current.standing else 0,
            step=job.ledger.step,
            restarts=job.restart_count,
            nodes=[self._node_status(node, places) for node in job.nodes.values()],
            report_json=json.dumps(report(job, self.shell.now())),
            stale_messages=self._stale,
        )

    def _phase(self) -> str:
        job = self.shell.job
        if job.result is not None:
            codes = {0: "succeeded", DRAINED: "drained"}
            return codes.get(job.result.exit_code, "failed")
        return "running" if job.round is not None and job.round.standing else "forming"

    def _node_status(self, node: Node, places: Any) -> pb.NodeStatus:
        place = places.get(node.node_id)
        session = self._sessions.get(node.node_id)
        current = self.shell.job.round
        state = "spare" if place is None else "training"
        if current is not None and node.node_id in current.finished and place is not None:
            state = "finished"
        if node.state is not NodeState.ATTACHED:
            state = node.state.value
        if node.draining:
            state = "draining"
        status = pb.NodeStatus(
            node_id=node.node_id,
            state=state,
            host=node.host,
            slots=node.slots,
            ranks=session.progress[:4096] if session is not None else (),
        )
        if place is not None:
            status.node_rank = place.node_rank
            status.first_rank = place.first_rank
        return status

    async def ListEvents(
        self, request: pb.ListEventsRequest, context: Any
    ) -> AsyncIterator[pb.EventRecord]:
        after = request.after
        while True:
            noted = self.shell.noted
            for note in list(self._journal.notes(after)):
                after = note.sequence
                yield pb.EventRecord(
                    sequence=note.sequence,
                    time=note.wall,
                    job_time=note.job,
                    kind=note.kind,
                    reason=note.reason,
                    detail_json=note.detail,
                )
            if not request.follow or self.over.is_set():
                return
            await noted.wait()

    async def ReadLog(self, request: pb.ReadLogRequest, context: Any) -> AsyncIterator[pb.LogChunk]:
        session = self._session_of(request.rank)
        if session is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no node runs rank {request.rank} now")
            return
        self._requests += 1
        number = self._requests
        inbox: asyncio.Queue[pb.LogChunk] = asyncio.Queue(LOG_CHUNKS)
        self._logs[number] = session, inbox
        try:
            relayed = pb.ReadLogRequest()
            relayed.CopyFrom(request)
            relayed.request = number
            session.push(pb.ToAgent(read_log=relayed))
            while not (chunk := await inbox.get()).end:
                yield chunk
            yield chunk
        finally:
            del self._logs[number]
            session.push(pb.ToAgent(read_log=pb.ReadLogRequest(request=number, cancel=True)))

    def _session_of(self, rank: int) -> Session | None:
        current = self.shell.job.round
        first = 0
        for seat in current.seats if current is not None else ():
            if first <= rank < first + seat.ranks:
                return self._sessions.get(seat.node_id)
            first += seat.ranks
        return None

    async def Restart(self, request: pb.RestartRequest, context: Any) -> pb.Accepted:
        await self._admin(context)
        reason = request.reason[: messages.MAX_TEXT] or "restart asked for"
        self.shell.fold(ev.RestartAsked(reason))
        return pb.Accepted(message=self.shell.reason)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.Accepted:
        await self._admin(context)
        node_id = NodeId(request.node_id) if request.node_id else None
        if node_id is not None and node_id not in self.shell.job.nodes:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no node {node_id}")
        reason = request.reason[: messages.MAX_TEXT] or "drain asked for"
        self.shell.fold(ev.DrainAsked(node_id, reason))
        return pb.Accepted(message=self.shell.reason)

    async def _admin(self, context: Any) -> None:
        """Without a token, verbs that change the job are taken from loopback only."""
        peer = context.peer()
        if self._open_admin or peer.startswith(("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")):
            return
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "without a job token this is taken from the master's own host only: "
            "set ELASTIC_JOB_TOKEN on every node",
        )

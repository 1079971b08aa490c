"""The master's face towards people: status, events, logs, and the verbs that change the job."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from elastic.master import directive as orders
from elastic.master import events as ev
from elastic.master import messages, prechecks
from elastic.master.directive import Place
from elastic.master.events import NodeId
from elastic.master.journal import Journal
from elastic.master.nodes import Node, NodeState
from elastic.master.report import report
from elastic.master.session import Session, abort
from elastic.master.shell import Shell
from elastic.master.state import nodes_of
from elastic.master.streams import Streams
from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.errors import NotFound
from elastic.proto.limits import MOST_SLOTS

_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")
"""Beginnings of grpc's names for peers on this host."""


class Control(master_pb2_grpc.ControlServicer):
    """Reads the shell and the streams; what it changes it folds as an event, like anyone else.

    open_admin: verbs that change the job are taken from everywhere, since calls bring a token.
    """

    def __init__(
        self, shell: Shell, streams: Streams, journal: Journal, run_id: str, *, open_admin: bool
    ) -> None:
        self._shell = shell
        self._streams = streams
        self._journal = journal
        self._run_id = run_id
        self._open_admin = open_admin

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        job = self._shell.job
        current = job.round
        places = orders.places(current)
        return pb.Status(
            run_id=self._run_id,
            job_uid=job.uid,
            epoch=job.epoch,
            phase=self._phase(),
            reason=self._shell.reason,
            round=job.last_round,
            world_size=sum(s.ranks for s in current.seats) if current and current.standing else 0,
            step=job.ledger.step,
            restarts=job.restart_count,
            nodes=[self._node_status(node, places) for node in job.nodes.values()],
            report_json=json.dumps(report(job, self._shell.now())),
            stale_messages=self._streams.stale,
            metrics_json=self._streams.metrics,
            version=pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
        )

    def _phase(self) -> str:
        job = self._shell.job
        if job.result is not None:
            return job.result.outcome
        return "running" if job.round is not None and job.round.standing else "forming"

    def _node_status(self, node: Node, places: Mapping[NodeId, Place]) -> pb.NodeStatus:
        place = places.get(node.node_id)
        session = self._streams.sessions.get(node.node_id)
        current = self._shell.job.round
        state = "spare" if place is None else "training"
        if current is not None and node.node_id in current.finished and place is not None:
            state = "finished"
        if place is None and node.probe is not None:
            state = "probing"
        elif place is None and not prechecks.may_join(
            node, self._shell.job.checks, self._shell.policy
        ):
            state = "kept out"
        if node.state is not NodeState.ATTACHED:
            state = node.state.value
        if node.draining:
            state = "draining"
        status = pb.NodeStatus(
            node_id=node.node_id,
            state=state,
            host=node.host,
            slots=node.slots,
            ranks=session.progress[:MOST_SLOTS] if session is not None else (),
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
            noted = self._shell.noted
            for note in list(self._journal.notes(after)):
                after = note.sequence
                yield messages.record(note)
            if not request.follow or self._streams.over.is_set():
                return
            await noted.wait()

    async def ReadLog(self, request: pb.ReadLogRequest, context: Any) -> AsyncIterator[pb.LogChunk]:
        session = self._session_of(request.rank)
        if session is None:
            await abort(context, grpc.StatusCode.NOT_FOUND, f"no node runs rank {request.rank} now")
            return
        async for chunk in self._streams.logs.read(session, request):
            yield chunk

    def _session_of(self, rank: int) -> Session | None:
        current = self._shell.job.round
        here = nodes_of(current, [rank]) if current is not None else ()
        return self._streams.sessions.get(here[0]) if here else None

    async def Restart(self, request: pb.RestartRequest, context: Any) -> pb.Accepted:
        await self._admin(context)
        reason = request.reason[: messages.MAX_TEXT] or "restart asked for"
        back: tuple[tuple[str, int, int], ...] = ()
        if request.from_step:
            try:
                back = await self._streams.snapshots.find(request.from_step)
            except NotFound as error:
                await abort(context, grpc.StatusCode.NOT_FOUND, str(error))
        self._streams.flush()
        before = self._shell.job
        self._shell.fold(ev.RestartAsked(reason, back))
        if self._shell.job is before and not self._shell.stuck:
            await abort(context, grpc.StatusCode.NOT_FOUND, self._no_restart())
        return pb.Accepted(message=self._shell.reason)

    def _no_restart(self) -> str:
        over = self._shell.job.result
        return self._shell.reason if over is None else f"the job is over: {over.reason}"

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.Accepted:
        await self._admin(context)
        self._streams.flush()
        node_id = NodeId(request.node_id) if request.node_id else None
        if node_id is not None and node_id not in self._shell.job.nodes:
            await abort(context, grpc.StatusCode.NOT_FOUND, f"there is no node {node_id}")
        reason = request.reason[: messages.MAX_TEXT] or "drain asked for"
        self._shell.fold(ev.DrainAsked(node_id, reason))
        return pb.Accepted(message=self._shell.reason)

    async def _admin(self, context: Any) -> None:
        """Without a token, verbs that change the job are taken from loopback only."""
        if self._shell.stuck:
            why = "the journal cannot be written, so nothing is decided: see the master's console"
            await abort(context, grpc.StatusCode.UNAVAILABLE, why)
        if self._open_admin or context.peer().startswith(_LOOPBACK):
            return
        await abort(
            context,
            grpc.StatusCode.PERMISSION_DENIED,
            "without a job token this is taken from the master's own host only: "
            "set ELASTIC_JOB_TOKEN on every node",
        )

"""Between protobuf messages and the master's own dataclasses; texts are bounded here."""

from elastic.master import events as ev
from elastic.master.directive import Directive
from elastic.master.events import Failed, Incarnation, NodeId, NodePhase
from elastic.master.journal import Note
from elastic.proto import master_pb2 as pb
from elastic.proto.limits import MOST_SLOTS

MAX_TEXT = 4096
"""Characters kept of any text that a node sends."""

_PHASES = {
    pb.NodeReport.IDLE: NodePhase.IDLE,
    pb.NodeReport.RUNNING: NodePhase.RUNNING,
    pb.NodeReport.FINISHED: NodePhase.FINISHED,
    pb.NodeReport.FAILED: NodePhase.FAILED,
}
_FAILED = {
    pb.RankFailure.RANK: Failed.RANK,
    pb.RankFailure.STORE: Failed.STORE,
    pb.RankFailure.START: Failed.START,
    pb.RankFailure.LOG: Failed.LOG,
    pb.RankFailure.TIMER: Failed.TIMER,
}
_KINDS = {"wait": pb.Directive.WAIT, "run": pb.Directive.RUN, "exit": pb.Directive.EXIT}


def attachment(hello: pb.Hello) -> ev.Attachment:
    return ev.Attachment(
        node_id=NodeId(hello.node_id[:256]),
        incarnation=Incarnation(hello.incarnation),
        slots=hello.slots,
        host=hello.host[:256],
        knock_address=hello.knock_address[:256],
        role=hello.role[:256],
        labels=tuple((k[:256], v[:256]) for k, v in sorted(hello.labels.items())[:32]),
        node_rank=hello.node_rank if hello.HasField("node_rank") else None,
        store=hello.spare_store[:256],
        report=report(hello.report),
    )


def report(message: pb.NodeReport) -> ev.Report:
    return ev.Report(
        round=message.round,
        phase=_PHASES.get(message.phase, NodePhase.IDLE),
        failures=tuple(failure(f) for f in message.failures[:MOST_SLOTS]),
    )


def failure(message: pb.RankFailure) -> ev.RankFailure:
    return ev.RankFailure(
        rank=message.rank,
        local_rank=message.local_rank,
        exit_code=message.exit_code,
        error_type=message.error_type[:256],
        message=message.message[:MAX_TEXT],
        frame=message.frame[:512],
        log_tail=message.log_tail[-MAX_TEXT:],
        oom_killed=message.oom_killed,
        what=_FAILED.get(message.what, Failed.RANK),
    )


def record(note: Note) -> pb.EventRecord:
    return pb.EventRecord(
        sequence=note.sequence,
        time=note.wall,
        job_time=note.job,
        kind=note.kind,
        reason=note.reason,
        detail_json=note.detail,
    )


def directive(order: Directive, epoch: int) -> pb.ToAgent:
    place = order.place
    return pb.ToAgent(
        directive=pb.Directive(
            kind=_KINDS[order.kind],
            epoch=epoch,
            round=order.round,
            node_rank=place.node_rank,
            num_nodes=place.num_nodes,
            first_rank=place.first_rank,
            local_world_size=place.local_world_size,
            world_size=place.world_size,
            store=order.store,
            role_first_rank=place.role_first_rank,
            role_world_size=place.role_world_size,
            prepare=order.prepare,
            restart_count=order.restart_count,
            stop_grace=order.stop_grace,
            exit_code=order.exit_code,
            reason=order.reason,
        )
    )

"""What `elasticctl status` says, as a JSON-able dictionary: the word of a live master, or what the
folder of one that is gone says.
"""

import json
from typing import Any

from elastic.master import report as books
from elastic.master.job import Job, replay
from elastic.master.journal import Journal
from elastic.master.policy import Policy
from elastic.master.rendezvous import with_ranks
from elastic.proto import job_folder, verbs
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import ElasticError, NotFound
from elastic.proto.verbs import Output


def of_master(status: pb.Status) -> dict[str, Any]:
    return {
        "job": status.run_id,
        "uid": status.job_uid,
        "live": True,
        "phase": status.phase,
        "reason": status.reason,
        "epoch": status.epoch,
        "round": status.round,
        "world_size": status.world_size,
        "step": status.step,
        "restarts": status.restarts,
        "stale_messages": status.stale_messages,
        "metrics": job_folder.step_of(status.metrics_json),
        **_books(json.loads(status.report_json)),
        "nodes": [_node(node) for node in status.nodes],
    }


def _node(node: pb.NodeStatus) -> dict[str, Any]:
    return {
        "node": node.node_id,
        "state": node.state,
        "node_rank": node.node_rank if node.HasField("node_rank") else None,
        "first_rank": node.first_rank if node.HasField("node_rank") else None,
        "host": node.host,
        "slots": node.slots,
        "ranks": [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "step": rank.step,
                "ticks": rank.ticks,
                "phase": rank.phase,
                "started_by": rank.started_by,
            }
            for rank in node.ranks
        ],
    }


_BOOKS = (
    "seconds",
    "productive_seconds",
    "goodput",
    "restarts_by_cause",
    "seconds_lost_by_cause",
    "interruptions",
    "stragglers",
    "failures",
)


def _books(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report.get(name) for name in _BOOKS}


def of_folder(job: verbs.Job, out: Output) -> dict[str, Any]:
    """The same, of a job whose master is gone: its report, and its journal folded again."""
    assert job.folder is not None
    report = job_folder.read_report(job.folder)
    try:
        state, now = _replay(job)
    except ElasticError as error:
        if report is None:
            raise
        out.note(f"{error}; its report says this")
        return _of_report(job, report)
    return {
        **_of_report(job, report or books.report(state, now)),
        "world_size": sum(s.ranks for s in state.round.seats) if state.round else 0,
        "nodes": _last_nodes(state),
    }


def _of_report(job: verbs.Job, report: dict[str, Any]) -> dict[str, Any]:
    assert job.folder is not None
    gone = {
        "outcome": "dead",
        "reason": "its master is gone; the same command line goes on with it",
    }
    result = report["result"] or gone
    return {
        "job": job.name,
        "uid": report["job"],
        "live": False,
        "phase": result["outcome"],
        "reason": result["reason"],
        "epoch": report["epoch"],
        "round": report["rounds"],
        "world_size": 0,
        "step": report["step"],
        "restarts": report.get("restarts"),
        "stale_messages": None,  # its master alone counted them
        "metrics": job_folder.step_of(job_folder.newest_metrics(job.folder)),
        **_books(report),
        "nodes": [],
    }


def _replay(job: verbs.Job) -> tuple[Job, float]:
    """The state at the journal's end, and its job time."""
    assert job.folder is not None
    journal = open_journal(job)
    try:
        state, _, now, entries = journal.load()
    finally:
        journal.close()
    state = replay(state, ((entry.event, entry.job) for entry in entries), Policy())
    return state, entries[-1].job if entries else now


def open_journal(job: verbs.Job) -> Journal:
    assert job.folder is not None
    path = job.folder / job_folder.JOURNAL
    if not path.is_file():
        raise NotFound(f"{job.folder} has no journal: its master never came to write one")
    return Journal(path, read_only=True)


def _last_nodes(state: Job) -> list[dict[str, Any]]:
    """Those of the last round, as it ended."""
    current = state.round
    if current is None:
        return []
    failed = {observed.node_id for observed in current.failures}
    found = []
    for node_rank, (seat, ranks) in enumerate(with_ranks(current.seats)):
        node = state.nodes.get(seat.node_id)
        ended = "finished" if seat.node_id in current.finished else "stopped"
        last = pb.NodeStatus(
            node_id=seat.node_id,
            state="failed" if seat.node_id in failed else ended,
            node_rank=node_rank,
            first_rank=ranks.start,
            host=node.host if node else "",
            slots=node.slots if node else len(ranks),
            ranks=[pb.RankProgress(rank=rank) for rank in ranks],
        )
        found.append(_node(last))
    return found

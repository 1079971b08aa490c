"""What is told to `--notify`: of each step of the job, whether somebody should hear of it, and what. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.master import events as ev
from elastic.master.events import Event, NodeId
from elastic.master.job import Job
from elastic.master.state import names, needed, nodes_of

MOST_TEXT = 2000
"""Characters of a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    kind: str
    """kept_out, slow, replicas_differ, hang, node_lost, failure; at the job's end job_succeeded, job_failed, job_drained or job_stopped."""
    reason: str
    """In words, one line."""
    nodes: tuple[NodeId, ...] = ()
    ranks: tuple[int, ...] = ()
    """Both as far as they can be named."""
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON-able. Of a round that ended, as `elasticctl why -o json`."""


def of(before: Job, event: Event, after: Job, why: Mapping[str, Any] | None) -> tuple[Notice, ...]:
    """Of one step, an incident once, the job's end last. why: `account.document` of the round that it ended, if it did. A master that starts again tells nothing: what it
    comes to know was told."""
    if before.result is not None or isinstance(event, ev.MasterStarted):
        return ()
    told = [*_doubt(before, event, after), *kept_out(before, after)]
    told += _slow(before, event, after)
    told += _incident(before, event, after, why or {})
    if (result := after.result) is not None:
        detail = {"outcome": result.outcome, "exit_code": result.exit_code}
        told.append(Notice(kind=f"job_{result.outcome}", reason=result.reason, detail=detail))
    return tuple(told)


def _doubt(before: Job, event: Event, after: Job) -> Iterator[Notice]:
    if not isinstance(event, ev.Doubted) or after.damaged is before.damaged:
        return
    current = before.round
    nodes = nodes_of(current, event.ranks) if current and current.number == event.round else ()
    yield Notice(
        kind="replicas_differ",
        reason=event.what,
        nodes=tuple(nodes),
        ranks=event.ranks,
        detail={"round": event.round, "trusted_step": event.after, "checkpoint": event.checkpoint},
    )


def kept_out(before: Job, after: Job) -> Iterator[Notice]:
    """Of nodes, by what their probes or tests have just said; not again where these are tried again."""
    for where, checked in after.checks.items() if after.checks is not before.checks else ():
        was = before.checks.get(where)
        if checked.state == "faulty" and (was is None or was.state != "faulty"):
            reason = f"{checked.node_id} is kept out: {checked.what}"
            detail = {"level": checked.level}
            yield Notice(kind="kept_out", reason=reason, nodes=(checked.node_id,), detail=detail)


def _slow(before: Job, event: Event, after: Job) -> Iterator[Notice]:
    """Once it begins."""
    if not isinstance(event, ev.Straggling) or event.over or after is before:
        return
    before_it = before.round.stragglers if before.round is not None else ()
    if event.about not in {one.about for one in before_it}:
        detail = {"kind": event.kind, "share": event.share, "pays": event.pays}
        yield Notice(
            kind="slow", reason=event.reason, nodes=event.nodes, ranks=event.ranks, detail=detail
        )


def _incident(before: Job, event: Event, after: Job, why: Mapping[str, Any]) -> Iterator[Notice]:
    """What went wrong with the round that stood, or with nodes beside it."""
    current = before.round if before.round is not None and before.round.standing else None
    hung = (
        event if isinstance(event, ev.Hung) and current and event.round == current.number else None
    )
    lost = _lost(before, event, after)
    if hung is not None:
        yield Notice(
            kind="hang", reason=hung.reason, nodes=hung.nodes, ranks=hung.ranks, detail=why
        )
    elif lost:
        reason = why.get("reason", f"{names(lost)} lost")
        yield Notice(kind="node_lost", reason=reason, nodes=lost, detail=why)
    elif why.get("failed"):
        nodes, ranks = _named(why["node"]), _named(why["rank"])
        yield Notice(kind="failure", reason=why["reason"], nodes=nodes, ranks=ranks, detail=why)


def _named(one: Any) -> tuple[Any, ...]:
    return () if one is None else (one,)


def _lost(before: Job, event: Event, after: Job) -> tuple[NodeId, ...]:
    """Nodes that are gone, but for one that says goodbye while no ranks need it."""
    if after.nodes is before.nodes:
        return ()
    gone = [node for node_id, node in before.nodes.items() if node_id not in after.nodes]
    if isinstance(event, ev.Left):
        gone = [node for node in gone if needed(before, node)]
    return tuple(node.node_id for node in gone)


def document(notice: Notice, *, run_id: str, time: float) -> dict[str, Any]:
    """What is sent, JSON-able; time: seconds of Unix."""
    return {
        "time": round(time, 3),
        "run_id": run_id,
        "kind": notice.kind,
        "reason": " ".join(notice.reason.split())[:MOST_TEXT],
        "nodes": list(notice.nodes),
        "ranks": list(notice.ranks),
        "detail": dict(notice.detail),
    }

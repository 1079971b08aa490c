"""What ended each round, told to a person: where it began, by what evidence, what was done. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from elastic.master import events as ev
from elastic.master.diagnosis import (
    CERTAIN,
    CONTAINER_CODES,
    LIKELY,
    Diagnosis,
    Host,
    diagnose,
)
from elastic.master.events import Event, NodeId
from elastic.master.job import Job, Round, handle
from elastic.master.policy import Policy
from elastic.master.reading import Observed, of_hardware
from elastic.master.recovery import COUNTED, FREE, Cause
from elastic.master.rendezvous import with_ranks
from elastic.master.symptoms import ACTIONS

LINES = 3
"""Of evidence, at most."""
LONGEST = 1000
"""Characters of what is told, for a verdict may name thousands of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A round that is over, as the journal tells of it."""

    round: int
    lasted: float
    """Seconds."""
    cause: str
    """A `Cause`; empty: the job ended with it."""
    reason: str
    nodes: tuple[NodeId, ...]
    """In the order of their ranks."""
    failures: tuple[Observed, ...] = ()
    hung: ev.Hung | None = None
    next: int = 0
    """The round after it; 0: there is none."""
    outcome: str = ""
    """How the job ended with it; empty: it went on."""
    left: str = ""
    """Of the budget that it was charged to, in words."""
    ended: Mapping[NodeId, tuple[int, ...]] = field(default_factory=dict[NodeId, tuple[int, ...]])
    """Ranks that had ended with 0, by node."""
    removed: tuple[ev.Removal, ...] = ()
    """Of the nodes that it ended of, those of whose containers' ends the runtime has told."""

    @property
    def failed(self) -> bool:
        """Something went wrong; else it was asked for, or the script was done."""
        if self.cause:
            return self.cause not in {*map(str, FREE), str(Cause.NODE_LEFT)}
        return self.outcome == "failed"


def endings(job: Job, entries: Iterable[tuple[Event, float]], policy: Policy) -> list[Ending]:
    """Of all rounds that end in these events, which happened to `job`, oldest first.

    policy: for an epoch that names none.
    """
    found: dict[int, Ending] = {}
    hung: ev.Hung | None = None
    for event, now in entries:
        hung = event if isinstance(event, ev.Hung) else hung
        own = event.policy if isinstance(event, ev.MasterStarted) else job.policy
        before, job = job, handle(job, event, now, own or policy).state
        for ended in (before.round, job.round):
            if ended is None or ended.number not in found:
                continue
            told = found[ended.number]
            if job.last_round > told.round and not told.next:
                told = replace(told, next=told.round + 1)
            if len(ended.failures) > len(told.failures):
                told = replace(told, failures=ended.failures)
            found[ended.number] = told
        ending = ending_of(before, job, event, now, hung, own or policy)
        if ending is not None:
            found[ending.round] = ending
        if isinstance(event, ev.Removed) and found:
            newest = found[max(found)]
            gone = newest.nodes if ending is not None else _lost(newest)
            found[newest.round] = _exited(newest, event, gone)
    return list(found.values())


def _exited(ending: Ending, event: ev.Removed, gone: Collection[NodeId]) -> Ending:
    """With how the containers of nodes ended of which it ended; that may be heard only later."""
    known = {one.node_id for one in ending.removed}
    more = [
        one
        for one in event.nodes
        if one.exit_code in CONTAINER_CODES and one.node_id in gone and one.node_id not in known
    ]
    return replace(ending, removed=(*ending.removed, *more))


def _lost(ending: Ending) -> list[NodeId]:
    """Of which it ended."""
    if ending.cause not in (Cause.NODE_LOST, Cause.AGENT_LOST):
        return []
    words = ending.reason.replace(",", " ").split()
    return [node_id for node_id in ending.nodes if node_id in words]


def ending_of(
    before: Job, job: Job, event: Event, now: float, hung: ev.Hung | None, policy: Policy
) -> Ending | None:
    """Of the round that this step ended, if it did end one; the last of a job that is over ended with it."""
    current = before.round
    if current is None or before.result is not None:
        return None
    same = job.round if job.round is not None and job.round.number == current.number else None
    broke = current.standing and (same is None or not same.standing)
    over = job.result is not None
    if not (broke or over):
        return None
    cause, reason = "", job.result.reason if job.result is not None else ""
    if job.ledger.interruptions != before.ledger.interruptions:
        last = job.ledger.interruptions[-1]
        cause, reason = last.cause, reason or last.reason
    seen = same.failures if same is not None else (*current.failures, *_last(current, event, now))
    return Ending(
        round=current.number,
        lasted=now - current.started,
        cause=cause,
        reason=reason,
        nodes=tuple(seat.node_id for seat in current.seats),
        failures=seen,
        ended=_ended(same or current),
        hung=hung if hung is not None and hung.round == current.number else None,
        next=job.last_round if job.last_round > current.number else 0,
        outcome=job.result.outcome if over and job.result is not None else "",
        left=_left(job, cause, policy),
    )


def of_step(before: Job, event: Event, after: Job, now: float, policy: Policy) -> Ending | None:
    """Of the standing round, if this step ended it."""
    current = before.round
    if current is None or not current.standing:
        return None
    hung = event if isinstance(event, ev.Hung) and event.round == current.number else None
    return ending_of(before, after, event, now, hung, policy)


def _last(current: Round, event: Event, now: float) -> list[Observed]:
    """What was reported in the step that has already formed the next round."""
    if not isinstance(event, ev.Reported) or event.report.round != current.number:
        return []
    known = {(o.node_id, o.failure) for o in current.failures}
    return [
        Observed(node_id=event.node_id, failure=failure, at=now)
        for failure in event.report.failures
        if (event.node_id, failure) not in known
    ]


def _ended(current: Round) -> dict[NodeId, tuple[int, ...]]:
    """Ranks that had ended with 0, by node."""
    here = {
        seat.node_id: tuple(rank for rank in ranks if rank in current.ended)
        for seat, ranks in with_ranks(current.seats)
    }
    return {node_id: ranks for node_id, ranks in here.items() if ranks}


def _left(job: Job, cause: str, policy: Policy) -> str:
    if cause in map(str, COUNTED):
        return f"{policy.max_restarts - job.recovery.restarts} of {policy.max_restarts} restarts"
    return f"{policy.fault_budget - job.recovery.faults} of {policy.fault_budget} faults"


# --- in words ------------------------------------------------------------------------------------


def verdict(ending: Ending) -> Diagnosis | None:
    """Of a round that failed; None where no rank and no node had a part in it."""
    hung = ending.hung
    if hung is not None and ending.cause in ("", Cause.HANG):
        one = len(hung.ranks) == 1  # of several it is not known which
        recorded = of_hardware(hung.kernel_log)
        named = hung.nodes and (one or recorded is not None)
        sure = recorded is not None or (one and not hung.soft)
        line = "" if recorded is None else recorded.line
        return Diagnosis(
            label="peer_hung" if recorded is None else recorded.label,
            node_id=hung.nodes[0] if named else None,
            rank=hung.ranks[0] if one else None,
            evidence=tuple(filter(None, (line, hung.reason, hung.place))),
            confidence=CERTAIN if sure else LIKELY,
        )
    if ending.cause in (Cause.NODE_LOST, Cause.AGENT_LOST) and not ending.removed:
        lost = _lost(ending)
        return Diagnosis(
            label="node_lost",
            node_id=lost[0] if lost else None,
            rank=None,
            evidence=(ending.reason,),
            confidence=CERTAIN,
        )
    if not ending.failures and not ending.removed:
        return None
    return diagnose(ending.failures, {node_id: _host(ending, node_id) for node_id in ending.nodes})


def _host(ending: Ending, node_id: NodeId) -> Host:
    """What its kernel recorded, of which each rank that fails tells, and how its container ended."""
    told = (o.failure.kernel_log for o in ending.failures if o.node_id == node_id)
    gone = next((one for one in ending.removed if one.node_id == node_id), None)
    return Host(
        kernel_log=tuple(dict.fromkeys(chain.from_iterable(told))),
        container_exit=gone.exit_code if gone else None,
        container_oom=gone is not None and gone.out_of_memory,
        ended=ending.ended.get(node_id, ()),
    )


def document(ending: Ending) -> dict[str, Any]:
    """JSON-able; nulls where nothing failed."""
    told = verdict(ending) if ending.failed else None
    root = told.root if told else None
    return {
        "round": ending.round,
        "seconds": round(ending.lasted, 3),
        "failed": ending.failed,
        "cause": ending.cause,
        "reason": _cut(ending.reason),
        "label": told.label if told else None,
        "node": told.node_id if told else None,
        "rank": told.rank if told else None,
        "frame": root.failure.frame if root else None,
        "confidence": told.confidence if told else None,
        "evidence": [_cut(line) for line in evidence(told)] if told else [],
        "done": _cut(_done(ending)),
        "next_round": ending.next or None,
        "action": ACTIONS[told.label] if told else None,
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def evidence(told: Diagnosis) -> tuple[str, ...]:
    """The most telling lines, the culprit's last log lines among them."""
    log = told.root.failure.log_tail.splitlines() if told.root else []
    last = [" ".join(line.split())[:200] for line in log if line.strip()][-2:]
    more = [line for line in told.evidence[1:] if not line.endswith(told.evidence[0])]
    return tuple(dict.fromkeys((told.evidence[0], *(last or more))))[:LINES]


def paragraph(told: Mapping[str, Any]) -> str:
    """The whole account, of a document."""
    opening = f"Round {told['round']} ended after {told['seconds']:.1f} s"
    if not told["failed"]:
        return f"{opening}, and nothing failed: {told['reason']}. {told['done']}"
    if told["label"] is None:
        return f"{opening}: {told['cause'] or 'the job failed'}. {told['reason']}. {told['done']}"
    place = _place(told) + (f", at {told['frame']}" if told["frame"] else "")
    said = "; ".join(f"'{line}'" for line in told["evidence"])
    what = told["label"].replace("_", " ")
    return (
        f"{opening}: {what} ({told['confidence']}). {place}. It is told by {said}. {told['done']} "
        f"What to do: {told['action']}."
    )


def _place(told: Mapping[str, Any]) -> str:
    if told["node"] is None:
        return "No node or rank can be named as where it began"
    rank = "the node itself" if told["rank"] is None else f"rank {told['rank']}"
    return f"It began with {rank} on {told['node']}"


def _done(ending: Ending) -> str:
    if ending.outcome:
        why = f": {ending.reason}" if ending.failed else ""
        return f"The job {_OUTCOMES.get(ending.outcome, ending.outcome)}{why}."
    if not ending.next:
        return _NO_OTHER
    left = f", {ending.left} left" if ending.failed else ""
    return f"{_again(ending.next)}{left}."


_NO_OTHER = "No round has been formed since."


def _again(number: int) -> str:
    return f"Its ranks were started again as round {number}"


def since_noted(told: Mapping[str, Any], last_round: int) -> dict[str, Any]:
    """A document that was noted as its round ended, with what was done since. last_round: of the job."""
    if told["done"] != _NO_OTHER or last_round <= told["round"]:
        return dict(told)
    number = told["round"] + 1
    return {**told, "next_round": number, "done": f"{_again(number)}."}


_OUTCOMES = {"drained": "was drained", "stopped": "was stopped"}


def chosen(told: Sequence[Mapping[str, Any]], number: int | None) -> Mapping[str, Any] | None:
    """Of documents, oldest first, that round's; without a number the last that failed, or else the last."""
    if number is not None:
        return next((one for one in told if one["round"] == number), None)
    failed = [one for one in told if one["failed"]]
    return next(reversed(failed or told), None)

"""What a job has to say of itself: how it ended, what interrupted it, where the seconds went."""

from typing import Any

from elastic.master import endings
from elastic.master import ledger as books
from elastic.master.directive import Ended, ended
from elastic.master.state import Job


def report(job: Job, now: float) -> dict[str, Any]:
    """A JSON-able report of `job` at job time `now` (seconds)."""
    ledger = books.closed(job.ledger, now) if job.result is None else job.ledger
    told = Ended() if job.result is None else ended(job, job.result)
    return {
        "job": job.uid,
        "result": None
        if job.result is None
        else {
            "outcome": job.result.outcome,
            "exit_code": job.result.exit_code,
            "reason": job.result.reason,
            "class": str(endings.kind_of(job.result.exit_code, job.result.cause)),
            "rank": told.rank,
            "exception": told.exception,
            "fingerprint": told.fingerprint,
        },
        "rounds": job.last_round,
        "restarts": job.restart_count,
        "epoch": job.epoch,
        "step": ledger.step,
        "seconds": round(ledger.productive + sum(ledger.lost.values()), 3),
        "productive_seconds": round(ledger.productive, 3),
        "goodput": round(books.goodput(ledger), 4),
        "restarts_by_cause": dict(ledger.restarts),
        "seconds_lost_by_cause": {cause: round(s, 3) for cause, s in ledger.lost.items()},
        "interruptions": [
            {
                "cause": i.cause,
                "reason": i.reason,
                "at": round(i.at - ledger.began, 3),
                "downtime_seconds": None if i.downtime is None else round(i.downtime, 3),
                "step_before": i.step_before,
                "step_after": i.step_after,
            }
            for i in ledger.interruptions
        ],
        "checks": [
            {"node": where, "state": checked.state, "what": checked.what}
            for where, checked in job.checks.items()
        ],
        "stragglers": []
        if job.round is None or not job.round.standing
        else [
            {
                "kind": one.kind,
                "ranks": list(one.ranks),
                "nodes": list(one.nodes),
                "share": round(one.share, 4),
                "pays": one.pays,
                "reason": one.reason,
            }
            for one in job.round.stragglers
        ],
        "failures": []
        if job.round is None
        else [
            {
                "node": o.node_id,
                "rank": o.failure.rank,
                "local_rank": o.failure.local_rank,
                "exit_code": o.failure.exit_code,
                "error_type": o.failure.error_type,
                "message": o.failure.message,
                "log_tail": o.failure.log_tail,
            }
            for o in job.round.failures
        ],
    }

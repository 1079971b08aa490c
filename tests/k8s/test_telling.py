"""What a master tells of training, checkpoint and failures in `status.job`."""

from dataclasses import replace
from typing import Any

import pytest

from elastic import telling
from elastic.master import state as master
from elastic.master.launcher import Saved
from elastic.master.ledger import STOPPED, Interruption, Ledger, interrupted
from elastic.master.recovery import Cause
from elastic.master.state import Result, Round
from elastic.proto.elasticjob import JobState, PodFailure, Snapshots, Training
from elastic.proto.ending import Ended
from elastic.proto.errors import ElasticError, ProtocolMismatch, UsageError

FAILURE = PodFailure(time=1000.0, pod="p", cause="NodeLost", action="ReplacePod", reason="gone")


@pytest.mark.parametrize(
    ("breaks", "downtime"),
    [
        ((), None),
        (((10.0, 3.0),), 3.0),
        (((10.0, None),), None),
        (((-50.0, 9.0), (12.0, 3.0), (40.0, 5.0)), 3.0),
        (((telling.NEAR + 1, 3.0), (-telling.NEAR - 1, 3.0)), None),
    ],
)
def test_a_failures_downtime_is_that_of_the_interruption_that_it_made(
    breaks: tuple[tuple[float, float | None], ...], downtime: float | None
) -> None:
    """breaks: seconds after the failure, and how long nothing trained."""
    made = tuple(
        Interruption(cause="node lost", reason="r", at=900.0 + after, downtime=lasted)
        for after, lasted in breaks
    )
    (found,) = telling.timed((FAILURE,), Ledger(interruptions=made), began=100.0)
    assert found == replace(FAILURE, downtime_seconds=downtime)
    known = replace(FAILURE, downtime_seconds=7.0)
    assert telling.timed((known,), Ledger(interruptions=made), began=100.0) == (known,)
    assert telling.timed((FAILURE,) * 12, None, began=100.0) == (FAILURE,) * 12


@pytest.mark.parametrize(
    ("cause", "reason", "is_its"),
    [
        ("node lost", "job-worker-1-r0 is lost: nothing heard", True),
        ("node lost", "job-worker-0-r0, job-worker-1-r0 are gone", True),
        ("node lost", "job-worker-0-r0 is lost: nothing heard", False),
        ("node lost", "job-worker-1-r01 is lost: nothing heard", True),
        ("node lost", "job-worker-0-r0, a, b and 4 more are gone: no more", True),
        ("network", "rank 0 on job-worker-7-r0 raised DistBackendError: closed by peer", True),
        (Cause.GROWTH, "job-worker-8-r0 can join", False),
    ],
)
def test_what_interrupted_nothing_has_nothing_of_anothers_downtime(
    cause: str, reason: str, is_its: bool
) -> None:
    pods = tuple(replace(FAILURE, pod=f"job-worker-{n}-r0") for n in (1, 0))
    made = Interruption(cause=cause, reason=reason, at=900.0, downtime=3.0)
    found, _ = telling.timed(pods, Ledger(interruptions=(made,)), began=100.0)
    assert found.downtime_seconds == (3.0 if is_its else None)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, (None, None, None)),
        (
            {"losses": {"lm loss": 2.3456789}, "tokens_per_second": 1234, "mfu": 0.41},
            (2.34568, 1234.0, 0.41),
        ),
        (
            {"losses": {"lm loss": "NaN"}, "tokens_per_second": True, "mfu": float("inf")},
            (None,) * 3,
        ),
        ({"losses": [1], "tokens_per_second": 10**400, "mfu": None}, (None, None, None)),
    ],
)
def test_what_the_script_says_of_its_steps(
    metrics: dict[str, Any], expected: tuple[float | None, ...]
) -> None:
    found = telling.training(7, 1.5, metrics)
    assert (found.step, found.stepped_at) == (7, 1.5)
    assert (found.loss, found.tokens_per_second, found.mfu) == expected


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"iterations": 500, "iteration": 100, "seconds": 0.25}, (500, 100.0)),
        ({"iterations": 500, "iteration": 500, "seconds": 0.25}, (500, 0.0)),
        ({"iterations": 1234567890, "iteration": 1234567889, "seconds": 0.25}, (1234567890, 0.2)),
        ({"iterations": 5, "iteration": 100, "seconds": 0.25}, (None, None)),
        ({"iterations": 1 << 52, "iteration": 1, "seconds": 1e299}, (1 << 52, None)),
        ({"iterations": 500, "iteration": 100, "seconds": -0.25}, (500, None)),
        ({"iterations": 500, "iteration": 100}, (500, None)),
        ({"iterations": "500", "iteration": 100, "seconds": 0.25}, (None, None)),
        ({"iteration": 100, "seconds": 0.25}, (None, None)),
    ],
)
def test_how_long_it_will_take(
    metrics: dict[str, Any], expected: tuple[int | None, float | None]
) -> None:
    found = telling.training(100, 1.5, metrics)
    assert (found.total_steps, found.eta_seconds) == expected


@pytest.mark.parametrize(
    ("known", "ledger", "expected"),
    [
        (None, Ledger(step=500, stepping=True), (500, 3.0)),
        (None, Ledger(), (0, 3.0)),
        ((500, 3.0), Ledger(step=500, stepping=True), (500, 3.0)),
        ((500, 3.0), Ledger(step=501, stepping=True), (501, 9.0)),
        ((0, None), Ledger(stepping=True), (0, 9.0)),
    ],
)
def test_a_step_of_an_earlier_life_is_no_news(
    known: tuple[int, float | None] | None, ledger: Ledger, expected: tuple[int, float | None]
) -> None:
    before = Training(step=498, stepped_at=3.0)
    assert telling.stepped(known, before, ledger, 9.0) == expected


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UsageError("what"), Ended.USAGE),
        (ProtocolMismatch("what"), Ended.REFUSED),
        (ElasticError("what"), Ended.STOPPED),
    ],
)
def test_why_a_master_could_not_serve(error: ElasticError, kind: Ended) -> None:
    words = telling.of_error(error)
    assert (words.kind, words.reason) == (kind, "what")


def test_when_a_checkpoint_came_to_storage() -> None:
    there = telling.snapshots(Saved(storage=5), Snapshots(), 100.0)
    assert there == Snapshots(persisted_step=5), "it was there before this job"
    memory = telling.snapshots(Saved(memory=7, storage=5), there, 101.0)
    assert memory == Snapshots(memory_step=7, persisted_step=5)
    saved = telling.snapshots(Saved(memory=8, storage=7), memory, 102.0)
    assert saved == Snapshots(memory_step=8, persisted_step=7, persisted_at=102.0)
    assert telling.snapshots(Saved(memory=9, storage=7), saved, 103.0).persisted_at == 102.0
    assert telling.snapshots(Saved(), saved, 104.0) == replace(saved, memory_step=None)
    first = telling.snapshots(Saved(memory=1, storage=1), Snapshots(memory_step=1), 105.0)
    assert first.persisted_at == 105.0


def test_what_was_done_stays_while_nobody_serves() -> None:
    before = JobState(
        generation=1, attempt=1, state="Running", restarts=3, round=4, world_size=2, productive_seconds=8.0,
        lost_seconds={"start": 2.0}, goodput=0.8,
        training=Training(step=9, loss=1.0), checkpoint=Snapshots(memory_step=9, persisted_step=8),
    )  # fmt: skip
    found = telling.resting(JobState(generation=1, attempt=1, state="Suspended"), before)
    assert (found.restarts, found.training) == (3, before.training)
    assert (found.productive_seconds, found.lost_seconds, found.goodput) == (
        8.0,
        {"start": 2.0},
        0.8,
    )
    assert found.checkpoint == Snapshots(persisted_step=8)
    assert (found.round, found.world_size) == (4, 0), "from there they are counted on"


STOOD = Round(number=4, seats=(), incarnations={}, roles={}, store="", started=1.0)
FELL = replace(STOOD, standing=False)


def test_where_the_seconds_went() -> None:
    said = JobState(generation=1, attempt=1, state="Running")
    waits = master.Job(ledger=Ledger(lost={"start": 3.21}, since=5.0))
    none = telling.booked(said, waits, 500.0)
    assert (none.productive_seconds, none.lost_seconds, none.goodput) == (0.0, {"start": 3.2}, None)
    lost = {"start": 6.0, str(Cause.NODE_LOST): 4.0}
    ledger = Ledger(productive=20.0, lost=lost, since=50.0, cause="", stepping=True)
    trains = master.Job(ledger=ledger, last_round=4, round=STOOD)
    some = telling.booked(said, trains, 60.04)
    assert (some.productive_seconds, some.lost_seconds, some.goodput) == (30.0, lost, 0.75)
    recovers = replace(trains, round=FELL, ledger=replace(ledger, cause="start"))
    assert telling.booked(said, recovers, 60.0).lost_seconds == {**lost, "start": 16.0}
    over = replace(trains, result=Result(exit_code=0, reason=""))
    assert telling.booked(said, over, 60.0).productive_seconds == 20.0


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (master.Job(), False),
        (master.Job(last_round=4, round=STOOD), True),
        (
            master.Job(
                last_round=4, round=FELL, ledger=interrupted(Ledger(), Cause.NODE_LOST, "", 2.0)
            ),
            True,
        ),
        (
            master.Job(
                last_round=4, round=FELL, ledger=interrupted(Ledger(), STOPPED, "suspended", 2.0)
            ),
            False,
        ),
        (
            master.Job(
                last_round=5, round=STOOD, ledger=interrupted(Ledger(), STOPPED, "suspended", 2.0)
            ),
            True,
        ),
    ],
    ids=["new", "trains", "lost a node", "resumed", "trains again"],
)
def test_a_job_that_is_resumed_has_not_begun_until_it_trains(
    job: master.Job, expected: bool
) -> None:
    assert telling.begun(job) is expected

"""What a job's end is called outside, and what every launcher is told of it."""

import pytest

from elastic.master import endings
from elastic.master import events as ev
from elastic.master.directive import directive
from elastic.master.events import NodeId
from elastic.master.policy import Policy
from elastic.master.recovery import FREE, Cause
from elastic.master.state import DRAINED, Job, Result, Why
from elastic.proto.ending import DETAILED, Ended
from tests.master.builders import BUG, Core, attached, drain, failed, failure, running


def test_every_cause_has_a_name() -> None:
    ends = {*Cause, *Why} - (FREE - {Cause.UNIT})
    assert set(endings.KINDS) == ends, "what is free ends no job"


@pytest.mark.parametrize(
    ("code", "cause", "kind"),
    [
        (0, "", Ended.FINISHED),
        (1, "", Ended.USER_ERROR),
        (DRAINED, "", Ended.DRAINED),
        (DRAINED, Why.STRAGGLER, Ended.STRAGGLER),
        (1, Why.STOPPED, Ended.STOPPED),
        (1, Cause.HANG, Ended.HANG),
        (1, "of a newer version", Ended.USER_ERROR),
    ],
)
def test_kinds(code: int, cause: str, kind: Ended) -> None:
    assert endings.kind_of(code, cause) == kind


def ended(core: Core) -> Ended:
    assert core.job.result is not None
    return endings.kind_of(core.job.result.exit_code, core.job.result.cause)


def test_a_script_error_is_told_whole() -> None:
    core = Core(Policy())
    core.feed(attached("a"), 0.0)
    core.feed(failed("a", 1, BUG), 5.0)
    told = directive(core.job, NodeId("a"), {}).ending
    assert (told.cause, told.rank, told.exception) == (
        Cause.ERROR, 0, "ValueError: bad value 17",
    )  # fmt: skip
    assert told.fingerprint
    assert ended(core) == Ended.USER_ERROR


def test_a_hang_fails_the_job_where_that_is_asked_for() -> None:
    core = running("a", "b", hang_action="fail")
    ranks, reason = (1,), "rank 1 is stopped"
    core.feed(
        ev.Hung(round=1, ranks=ranks, nodes=(NodeId("b"),), place="a.py:7", reason=reason), 20.0
    )
    assert ended(core) == Ended.HANG
    told = directive(core.job, NodeId("a"), {}).ending
    assert (told.cause, told.rank) == (Cause.HANG, 1)
    assert core.job.result is not None
    assert (core.job.result.exit_code, core.job.result.reason) == (1, reason)
    assert core.job.recovery.faults == 0, "nothing is paid for a restart"


def test_too_few_nodes_in_time() -> None:
    core = Core(Policy(min_nodes=2, max_nodes=2, join_timeout=10.0))
    core.feed(ev.MasterStarted("uid"), 0.0)
    core.feed(attached("a"), 1.0)
    core.feed(ev.Tick(), 11.0)
    assert DETAILED[ended(core)] == 214


def test_below_the_minimum() -> None:
    core = Core(Policy(min_nodes=2, max_nodes=2, below_min_timeout=10.0))
    for name in "ab":
        core.feed(attached(name), 0.0)
    core.feed(ev.Left(NodeId("b"), ev.Incarnation(1), "SIGTERM"), 5.0)
    core.feed(ev.Tick(), 16.0)
    assert DETAILED[ended(core)] == 216


def test_a_hang_that_repeats() -> None:
    core = Core(Policy(same_failure_limit=1))
    core.feed(attached("a"), 0.0)
    hung = ev.Hung(
        round=1, ranks=(0,), nodes=(NodeId("a"),), place="train.py:7", reason="rank 0 waits"
    )
    core.feed(hung, 9.0)
    assert DETAILED[ended(core)] == 215


def test_out_of_memory() -> None:
    core = Core(Policy(fault_budget=0))
    core.feed(attached("a"), 0.0)
    core.feed(failed("a", 1, failure(exit_code=-9, oom_killed=True)), 9.0)
    assert ended(core) == Ended.OOM


def test_a_straggler_hears_why_it_is_drained() -> None:
    core = Core(Policy(min_nodes=1, max_nodes=2, exclude_straggler=True))
    for name in "ab":
        core.feed(attached(name), 0.0)
    core.feed(ev.Tick(), 2.0)
    slow = ev.Straggling(
        round=core.job.last_round, kind="node", ranks=(1,), nodes=(NodeId("b"),), share=0.6, pays=True,
        reason="b is slow",
    )  # fmt: skip
    core.feed(slow, 20.0)
    core.feed(ev.Tick(), 21.0)
    order = directive(core.job, NodeId("b"), {})
    assert (order.kind, order.exit_code, order.ending.cause) == ("exit", DRAINED, Why.STRAGGLER)


def test_a_drain_that_was_asked_for() -> None:
    core = Core(Policy(min_nodes=1, max_nodes=2))
    for name in "ab":
        core.feed(attached(name), 0.0)
    core.feed(drain("b"), 3.0)
    assert directive(core.job, NodeId("b"), {}).ending.cause == ""


def test_results_of_older_journals_have_no_cause() -> None:
    job = Job(result=Result(exit_code=1, reason="it failed"))
    assert directive(job, NodeId("a"), {}).ending.cause == ""

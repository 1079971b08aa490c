"""Of which steps of a job somebody is told."""

from dataclasses import replace
from typing import Any

from elastic.master import account, notices
from elastic.master import events as ev
from elastic.master.events import Event, Incarnation, KnockAnswer, NodeId
from elastic.master.notices import Notice, document
from elastic.master.policy import Policy
from tests.master.builders import (
    BUG,
    CLOSED,
    Core,
    attached,
    detached,
    failed,
    finished,
    knocked,
    left,
    running,
    spare,
)


def told(core: Core, *fed: tuple[Event, float]) -> list[Notice]:
    found: list[Notice] = []
    for event, at in fed:
        before = core.job
        core.feed(event, at)
        ending = account.of_step(before, event, core.job, at, core.policy)
        why = None if ending is None else account.document(ending)
        found += notices.of(before, event, core.job, why)
    return found


def hung(number: int = 1) -> ev.Hung:
    return ev.Hung(
        round=number, ranks=(1,), nodes=(NodeId("b"),), place="a.py:7", reason="rank 1 is stopped"
    )


def probed(core: Core, state: str, number: int = 1) -> ev.Probed:
    health = ev.Health(
        node_id=NodeId("a"), incarnation=Incarnation(1), number=number, level=core.policy.precheck,
        state=state, what="matmul: a bit differs", seconds=1.0,
    )  # fmt: skip
    return ev.Probed((health,))


def kinds(found: list[Notice]) -> list[str]:
    return [one.kind for one in found]


def test_a_job_in_which_nothing_goes_wrong_tells_of_its_end_alone() -> None:
    core = Core(Policy(max_nodes=2))
    found = told(
        core, (attached("a"), 0.0), (ev.Tick(), 1.0), (ev.Progressed(1, 1), 2.0), (finished("a", 1), 3.0),
        (left("a"), 4.0),
    )  # fmt: skip
    assert found == [
        Notice(
            kind="job_succeeded",
            reason="its node finished",
            detail={"outcome": "succeeded", "exit_code": 0},
        )
    ]


def test_a_failure_is_told_once_it_is_judged_with_its_diagnosis() -> None:
    core = running("a", "b", max_restarts=1)
    (one,) = told(core, (failed("b", 1, CLOSED), 20.0), (failed("a", 1, BUG), 20.5))
    assert core.seats() == ["a", "b"]
    assert (one.kind, one.nodes, one.ranks) == ("failure", ("a",), (0,))
    assert one.reason == "rank 0 on a raised ValueError: bad value 17"
    assert (one.detail["label"], one.detail["cause"]) == ("script_error", "script error")
    assert one.detail["evidence"]


def test_a_failure_that_ends_the_job_is_told_before_the_end() -> None:
    failure, end = told(running("a"), (failed("a", 1, BUG), 20.0), (ev.Tick(), 30.0))
    assert (failure.kind, failure.ranks) == ("failure", (0,))
    assert (end.kind, end.detail) == ("job_failed", {"outcome": "failed", "exit_code": 1})


def test_a_hang_is_told_once_whether_or_not_it_ends_the_round() -> None:
    (one,) = told(running("a", "b"), (hung(), 20.0))
    assert (one.kind, one.nodes, one.ranks, one.reason) == (
        "hang",
        ("b",),
        (1,),
        "rank 1 is stopped",
    )
    assert one.detail["label"] == "peer_hung"
    (one,) = told(running("a", "b", hang_action="dump"), (hung(), 20.0))
    assert (one.kind, one.detail) == ("hang", {})
    assert not told(running("a", "b"), (hung(2), 20.0)), "of another round"


def test_a_lost_node_is_told_also_one_that_waits() -> None:
    away = (detached("b"), 20.0), (knocked("b", KnockAnswer.GONE), 20.1)
    (one,) = told(running("a", "b"), *away)
    assert (one.kind, one.nodes, one.reason) == ("node_lost", ("b",), "b is gone")
    assert one.detail["cause"] == "node lost"
    core = running("a", max_nodes=1)
    core.feed(attached("b"), 11.0)
    (one,) = told(core, *away)
    assert (one.kind, one.nodes, one.reason, one.detail) == ("node_lost", ("b",), "b lost", {})


def test_who_leaves_is_told_if_ranks_needed_it() -> None:
    (one,) = told(running("a", "b"), (left("b"), 20.0))
    assert (one.kind, one.nodes, one.reason) == ("node_lost", ("b",), "b left: SIGTERM")
    core = running("a", max_nodes=1)
    core.feed(attached("b"), 11.0)
    assert not told(core, (left("b"), 20.0))


def test_a_node_that_is_kept_out_is_told_and_one_that_works_is_not() -> None:
    core = Core(Policy(precheck="quick"))
    core.feed(attached("a"), 0.0)
    assert not told(core, (probed(core, "faulty", number=9), 1.0)), "nobody asked for it"
    (one,) = told(core, (probed(core, "faulty"), 1.0))
    assert (one.kind, one.nodes) == ("kept_out", ("a",))
    assert one.reason == "a is kept out: matmul: a bit differs"
    again = core.wake()
    assert again is not None
    core.tick(again)
    assert not told(core, (probed(core, "faulty", number=2), again)), "it is still kept out"
    core = Core(Policy(precheck="quick"))
    core.feed(attached("a"), 0.0)
    assert not told(core, (probed(core, "ok"), 1.0))


def test_what_is_slow_is_told_as_it_begins() -> None:
    slow = ev.Straggling(
        round=1, kind="rank", ranks=(1,), nodes=(NodeId("b"),), share=0.25, pays=True, reason="rank 1 is slow"
    )  # fmt: skip
    worse = replace(slow, share=0.5)
    over = replace(slow, over=True, reason="rank 1 is slow no more")
    (one,) = told(running("a", "b"), (slow, 20.0), (worse, 25.0), (over, 30.0))
    assert (one.kind, one.nodes, one.ranks, one.reason) == ("slow", ("b",), (1,), "rank 1 is slow")
    assert one.detail == {"kind": "rank", "share": 0.25, "pays": True}


def test_replicas_that_differ_are_told_once() -> None:
    event = ev.Doubted(round=1, checkpoint="/run", after=4, ranks=(1,), what="rank 1 differs")
    (one,) = told(running("a", "b"), (event, 20.0), (event, 20.1))
    assert (one.kind, one.nodes, one.ranks) == ("replicas_differ", ("b",), (1,))
    assert one.reason == "rank 1 differs"
    assert one.detail == {"round": 1, "trusted_step": 4, "checkpoint": "/run"}


def test_what_is_asked_for_is_not_told() -> None:
    core = running("a", "b")
    assert not told(core, (ev.RestartAsked("new flags"), 20.0))
    spare(core)
    assert not told(core, (ev.DrainAsked(NodeId("b"), "maintenance"), 30.0), (left("b"), 31.0))
    assert kinds(told(core, (ev.DrainAsked(None, "maintenance"), 40.0))) == ["job_drained"]


def test_a_master_that_starts_again_tells_nothing_of_what_was_told() -> None:
    core = running("a")
    assert kinds(told(core, (failed("a", 1, BUG), 20.0))) == ["failure", "job_failed"]
    assert not told(core, (ev.MasterStarted("another"), 30.0), (attached("a"), 31.0))


def test_what_is_sent() -> None:
    notice = Notice(
        kind="hang", reason="rank 1\n is " + "x" * 9000, ranks=(1,), detail={"round": 2}
    )
    sent: dict[str, Any] = document(notice, run_id="job", time=12.3456)
    assert sent.pop("reason") == ("rank 1 is " + "x" * 9000)[: notices.MOST_TEXT]
    assert sent == {
        "time": 12.346, "run_id": "job", "kind": "hang", "nodes": [], "ranks": [1], "detail": {"round": 2},
    }  # fmt: skip

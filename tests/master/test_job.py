"""The composed decider, by example: what people were promised, one sentence a test."""

from dataclasses import replace
from typing import Any

import pytest

from elastic.master import events as ev
from elastic.master.culprits import FOREVER
from elastic.master.events import Incarnation, KnockAnswer, NodeId, NodePhase
from elastic.master.job import DRAINED, handle
from elastic.master.nodes import NodeState
from elastic.master.policy import Policy
from tests.master.builders import (
    BUG,
    CLOSED,
    KILLED,
    Core,
    attached,
    attachment,
    detached,
    drain,
    failed,
    failure,
    finished,
    knocked,
    left,
    report,
    running,
    spare,
    store,
    unit,
)

GONE, ALIVE, SILENT, RESTARTING = (
    KnockAnswer.GONE,
    KnockAnswer.ALIVE,
    KnockAnswer.SILENT,
    KnockAnswer.RESTARTING,
)


def unanswered(core: Core, *nodes: str, at: float | None = None) -> None:
    """Two knocks in a row at each of them."""
    for node in nodes:
        core.feed(knocked(node, SILENT), at)
        core.feed(knocked(node, SILENT), at)


def test_a_full_house_starts_at_once() -> None:
    core = Core(Policy(min_nodes=2, max_nodes=2))
    core.attach("a")
    assert core.reason() == "a attached; 1 of at least 2 nodes here"
    core.attach("b")
    assert core.seats() == ["a", "b"]
    assert core.reason() == "b attached; round 1: 2 nodes, 2 ranks"


def test_one_of_two_starts_after_the_last_call() -> None:
    core = Core(Policy(min_nodes=1, max_nodes=2))
    core.attach("a", at=5.0)
    assert core.wake() == 6.0
    assert not core.seats()
    core.tick(6.0)
    assert core.seats() == ["a"]


def test_a_master_without_a_journal_begins_behind_the_rounds_of_its_agents() -> None:
    """They take no order of an earlier round; 2**63 is nobody's."""
    core = Core(Policy(min_nodes=2, max_nodes=2))
    core.attach("a", report=ev.Report(round=7, phase=NodePhase.RUNNING))
    core.attach("b", report=ev.Report(round=1 << 63))
    assert core.seats() == ["a", "b"]
    assert core.reason() == "b attached; round 8: 2 nodes, 2 ranks"


def test_what_is_above_max_waits_as_a_spare_and_takes_a_lost_nodes_place_at_once() -> None:
    core = running("a", "b", "c", max_nodes=2, min_nodes=2)
    assert core.order("c").kind == "wait"
    core.feed(detached("a"))
    core.feed(knocked("a", GONE))
    assert core.seats() == ["c", "b"]
    assert core.reason() == "a is gone; round 2: 2 nodes, 2 ranks"
    assert core.restarts() == {"node lost": 1}


def test_the_same_thing_is_said_once() -> None:
    core = running("a", "b")
    core.feed(failed("b", 1, failure(rank=1, exit_code=-9)))
    assert core.reason() == "rank 1 on b was ended by SIGKILL; round 2: 2 nodes, 2 ranks"


def test_a_silent_node_is_lost_when_its_lease_is_over() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    assert ev.Knock(NodeId("b"), 1) in core.decision.effects  # type: ignore[union-attr,arg-type]
    unanswered(core, "b", at=21.0)
    assert core.wake() == 25.0
    assert core.seats() == ["a", "b"]
    core.tick(25.0)
    assert core.seats() == ["a"]
    assert core.reason() == "b is lost: nothing heard for 5 s; round 2: 1 node, 1 rank"


def test_a_silence_does_not_count_before_knocks_went_unanswered() -> None:
    """A master that has thousands to hear and to knock at may be late with both."""
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    core.tick(60.0)
    assert core.seats() == ["a", "b"]
    core.feed(knocked("b", ALIVE), 61.0)
    core.tick(90.0)
    assert core.seats() == ["a", "b"]
    core.feed(knocked("b", SILENT), 91.0)
    assert core.seats() == ["a", "b"], "a packet may be lost on the way"
    core.feed(knocked("b", SILENT), 93.0)
    assert core.seats() == ["a"]


def test_where_most_were_silent_who_is_lost_is_lost_after_the_long_lease() -> None:
    core = running("a", "b", "c")
    core.feed(detached("a"), 20.0)
    core.feed(detached("b"), 21.0)
    unanswered(core, "a", "b", at=22.0)
    core.tick(49.9)
    assert core.seats() == ["a", "b", "c"]
    core.tick(50.0)
    assert core.reason().startswith("a is lost: nothing heard for 30 s")
    assert not core.seats(), "b may come back"
    core.tick(core.wake() or 0.0)
    unanswered(core, "b", at=52.0)
    assert core.seats() == ["c"]
    assert core.restarts() == {"node lost": 1}


def test_one_whose_stream_breaks_again_and_again_keeps_no_dead_node_alive() -> None:
    core = running("a", "b", "c")
    core.feed(detached("a"), 20.0)
    at = 20.0
    while len(core.seats()) == 3:
        core.feed(detached("b"), at + 0.1)
        core.feed(knocked("a", SILENT), at + 1.0)
        core.feed(attached("b"), at + 1.5)
        at += 1.5
        assert at < 30
    assert core.seats() == ["c", "b"]


def test_a_node_that_answers_keeps_training_without_its_stream() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    for second in range(21, 60):
        core.feed(knocked("b", ALIVE), float(second))
    assert core.seats() == ["a", "b"]
    core.feed(attached("b"), 60.0)
    assert core.job.last_round == 1
    assert core.order("b").kind == "run"


def test_a_round_is_not_kept_waiting_by_a_node_that_answers_and_never_attaches() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    core.feed(failed("a", 1, KILLED), 20.5)
    at = 20.5
    while not core.seats():
        at += 0.5
        core.feed(knocked("b", ALIVE), at)
        assert at < 26
    assert core.seats() == ["a"]
    assert at == 25.0


def test_others_go_on_without_a_node_whose_agent_died() -> None:
    """Its ranks are gone, and those of its next agent start cold: it is a newcomer."""
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    core.feed(knocked("b", RESTARTING), 20.1)
    assert core.seats() == ["a"]
    assert core.reason() == "the agent on b died; round 2: 1 node, 1 rank"
    spare(core)
    core.feed(attached("b", 2), 21.0)
    assert core.seats() == ["a"]
    core.tick(22.0)
    assert core.seats() == ["a", "b"]
    assert core.restarts() == {"agent lost": 1, "more nodes": 1}


def test_a_node_whose_agent_died_is_waited_for_where_it_is_needed() -> None:
    core = running("a", "b", min_nodes=2)
    core.feed(detached("b"), 20.0)
    core.feed(knocked("b", RESTARTING), 20.1)
    assert not core.seats()
    assert core.reason() == "the agent on b died; 1 of at least 2 nodes here"
    core.feed(attached("b", 2), 21.0)
    assert core.seats() == ["a", "b"]
    assert core.restarts() == {"agent lost": 1}


def test_no_round_begins_with_ranks_that_import_torch_while_others_could_train() -> None:
    core = running("a", "b")
    core.feed(ev.Progressed(1, 1, plain=True))
    core.feed(attached("b", 2), 20.0)  # its agent died and was back before anyone noticed
    assert core.seats() == ["a"]
    spare(core)
    core.tick(21.0)
    assert core.seats() == ["a"]
    core.feed(ev.Prepared(NodeId("b"), Incarnation(2)), 24.0)
    assert core.seats() == ["a", "b"]


def test_an_agent_that_does_not_come_back_is_lost() -> None:
    core = running("a", "b", min_nodes=2)
    core.feed(detached("b"), 20.0)
    core.feed(knocked("b", RESTARTING), 20.0)
    core.tick(23.0)
    assert core.reason() == "b is lost: no agent came back; 1 of at least 2 nodes here"
    assert core.restarts() == {"agent lost": 1}, "one death, one charge"


def test_an_agent_back_before_anyone_noticed() -> None:
    core = running("a", "b")
    core.feed(attached("b", 2), 20.0)
    assert core.seats() == ["a", "b"]
    assert core.job.last_round == 2
    assert core.reason().startswith("b attached; the agent on b died and is back; round 2")


def test_everyone_is_told_when_an_agent_came_back_but_no_round_can_start() -> None:
    core = running("a", "b", min_nodes=2)
    decision = core.feed(attached("a", 2, store=""))
    assert not core.seats()
    assert ev.Tell() in decision.effects
    assert core.order("b").kind == "wait"


# Fewer than min left.


def test_fewer_than_min_wait_and_go_on_unaided() -> None:
    core = running("a", "b", min_nodes=2)
    core.feed(left("b"), 20.0)
    assert core.wake() is None
    assert core.order("a").kind == "wait"
    core.tick(90_000.0)
    core.attach("c")
    assert core.seats() == ["a", "c"]


def test_below_min_for_too_long_fails_with_the_reason() -> None:
    core = running("a", "b", min_nodes=2, below_min_timeout=30.0)
    core.feed(left("b"), 20.0)
    assert core.wake() == 50.0
    core.attach("c", at=40.0)
    assert core.seats()
    core.feed(left("c"), 45.0)
    core.tick(74.0)
    assert core.job.result is None
    core.tick(75.0)
    assert core.exit_code() == 1
    assert core.reason() == "1 of at least 2 nodes here, for 30 s"


def test_below_min_begins_anew_with_the_master() -> None:
    core = running("a", "b", min_nodes=2, below_min_timeout=30.0)
    core.feed(left("b"), 20.0)
    core.feed(ev.MasterStarted("x"), 1000.0)
    assert core.job.result is None


# Stores.


def test_a_used_store_is_never_used_again() -> None:
    core = Core(Policy())
    core.attach("a", store="a:1")
    assert core.job.round is not None
    assert core.job.round.store == "a:1"
    core.feed(attached("a", store="a:1"), 2.0)  # it had not heard of the round yet
    core.feed(store("a", "a:1"), 2.1)
    core.feed(failed("a", 1, KILLED), 3.0)
    assert not core.seats()
    assert core.reason().endswith("once a has made a store")
    core.feed(store("a", "a:2"), 3.1)
    assert core.seats() == ["a"]
    assert core.job.round.store == "a:2"


def test_a_small_port_range_makes_addresses_come_back() -> None:
    core = Core(Policy())
    core.attach("a", store="a:1")
    core.feed(store("a", "a:2"))
    core.feed(failed("a", 1, KILLED))
    core.feed(store("a", "a:1"))
    core.used_stores.clear()
    core.feed(failed("a", 2, KILLED))
    assert core.seats() == ["a"]


def test_a_missing_store_delays_only_until_its_node_is_lost() -> None:
    core = running("a", "b")
    core.feed(attached("a", 2, store=""), 20.0)
    assert not core.seats()
    core.feed(detached("a", 2), 21.0)
    core.feed(knocked("a", GONE, 2), 21.1)
    assert core.seats() == ["b"]


# Finished nodes.


def test_all_finished_ends_the_job() -> None:
    core = running("a", "b")
    core.feed(finished("a", 1))
    core.feed(finished("a", 1))
    core.feed(finished("b", 1))
    assert core.exit_code() == 0
    assert core.order("nobody").kind == "exit"


@pytest.mark.parametrize("how", ["left", "lost", "agent"])
def test_a_node_that_is_done_does_not_disturb(how: str) -> None:
    core = running("a", "b")
    core.feed(finished("b", 1))
    if how == "left":
        core.feed(left("b"))
    elif how == "lost":
        core.feed(detached("b"))
        core.feed(knocked("b", GONE))
    else:
        core.feed(attached("b", 2))
        assert core.order("b").kind == "wait"
    assert core.seats() == ["a", "b"]
    assert not core.restarts()
    core.feed(finished("a", 1))
    assert core.exit_code() == 0


@pytest.mark.parametrize("how", ["lost", "agent"])
def test_the_round_ends_with_its_store_even_if_that_node_is_done(how: str) -> None:
    core = running("a", "b")
    core.feed(finished("a", 1))
    if how == "lost":
        core.feed(detached("a"))
        core.feed(knocked("a", GONE))
    else:
        core.feed(attached("a", 2))
    assert core.job.last_round == 2
    assert sum(core.restarts().values()) == 1


def test_the_store_of_a_finished_node_dies() -> None:
    core = running("a", "b")
    core.feed(finished("a", 1))
    core.feed(failed("a", 1, failure(what=ev.Failed.STORE)))
    assert core.seats() == ["a", "b"]
    assert core.restarts() == {"store lost": 1}


def test_a_store_that_dies_after_rank_0_failed_is_the_cause() -> None:
    """Both are told of as rank 0's."""
    core = running("a", "b")
    core.feed(failed("a", 1, CLOSED))
    core.feed(failed("a", 1, CLOSED, failure(what=ev.Failed.STORE)))
    core.feed(ev.Tick(), 10.0)
    assert core.restarts() == {"store lost": 1}


def test_a_failed_node_cannot_finish() -> None:
    core = running("a", "b")
    core.feed(failed("a", 1, CLOSED))
    core.feed(finished("a", 1))
    core.feed(finished("b", 1))
    assert core.job.result is None


# What nobody should say.


def test_a_node_that_failed_without_a_word_is_recovered() -> None:
    core = running("a", "b", max_restarts=1, slots=2)
    core.feed(failed("b", 1))
    assert core.job.last_round == 2
    assert "rank 2 on b exited with 1: its agent did not say why" in core.reason()


def test_reports_of_another_life_or_round_change_nothing() -> None:
    core = running("a", "b")
    before = core.job
    core.feed(failed("a", 0, KILLED))
    core.feed(failed("a", 2, KILLED))
    core.feed(failed("stranger", 1, KILLED))
    core.feed(ev.Reported(NodeId("a"), 7, failed("a", 1, KILLED).report))  # type: ignore[arg-type]
    core.feed(ev.Progressed(9, 4))
    core.feed(unit(9, 2))
    core.feed(unit(1, 0))
    core.feed(unit(1, -3))
    core.feed(unit(1, 2, "stranger"))
    core.feed(unit(1, 2, "a", 9))
    core.feed(detached("a", 9))
    core.feed(knocked("a", GONE))  # it is attached: an answer to an old question
    core.feed(left("a", 9))
    core.feed(drain("stranger"))
    core.feed(report("a", 1, NodePhase.RUNNING))
    assert core.job is before


def test_when_every_node_drains_the_job_is_drained() -> None:
    core = running("a", "b", min_nodes=1)
    core.feed(drain("a"))
    assert core.job.result is None
    core.feed(drain("b"))
    assert core.job.result is not None
    assert (core.job.result.exit_code, core.job.result.resumable) == (DRAINED, True)
    assert {core.order(node).exit_code for node in "ab"} == {DRAINED}


def test_a_node_without_slots_gets_no_place() -> None:
    core = Core(Policy(min_nodes=1, max_nodes=3))
    core.attach("a", "b")
    core.attach("c", slots=0)
    core.attach("d", slots=-4)
    core.tick(5.0)
    assert core.seats() == ["a", "b"]


def test_nothing_is_journaled_that_changes_nothing() -> None:
    core = running("a", "b")
    core.feed(unit(1, 2))
    core.feed(detached("b"))
    unanswered(core, "b")
    for event in (unit(1, 2), knocked("b", SILENT), ev.Tick(), detached("b")):
        decision = handle(core.job, event, core.now, core.policy)
        assert decision.state is core.job, event


def test_what_came_together_is_decided_once() -> None:
    core = running("a", "b", "c", "d")
    lives = tuple((NodeId(node), Incarnation(1)) for node in "bcd")
    answers = tuple((*life, GONE) for life in lives)
    core.feed(ev.Together((ev.Detached(lives), ev.Knocked(answers))))
    assert core.seats() == ["a"]
    assert core.job.last_round == 2
    assert core.restarts() == {"node lost": 1}
    assert core.reason().endswith(
        "b, c, d are unreachable; b, c, d are gone; round 2: 1 node, 1 rank"
    )


def test_who_comes_together_with_others_is_told_that_the_job_is_over() -> None:
    core = running("a", "b")
    core.feed(drain(None))
    core.feed(ev.Together((detached("a"), attached("b"))))
    assert ev.Tell(frozenset({NodeId("b")})) in core.decision.effects  # type: ignore[union-attr]


def test_leases_stand_still_while_the_master_does() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    unanswered(core, "b", at=21.0)
    core.feed(ev.Stalled(), 29.0)
    assert core.seats() == ["a", "b"], "what b said meanwhile is still to be read"
    unanswered(core, "b", at=30.0)
    assert core.wake() == 34.0


def test_no_script_is_blamed_for_what_the_master_did_not_hear() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    core.feed(failed("a", 1, BUG), 20.1)
    core.feed(ev.Stalled(), 26.5)
    core.tick(31.4)
    assert core.job.result is None
    unanswered(core, "b", at=33.0)
    assert core.restarts() == {"node lost": 1}
    assert core.job.result is None


# Restarts of the master.


def test_after_a_masters_restart_the_round_stands_and_leases_begin_anew() -> None:
    core = running("a", "b")
    core.feed(ev.MasterStarted("ignored"), 1000.0)
    assert core.seats() == ["a", "b"]
    assert core.job.uid == "job"
    assert {n.state for n in core.job.nodes.values()} == {NodeState.UNREACHABLE}
    core.attach("a", at=1000.3)
    core.feed(ev.Tick(), 1001.0)
    assert ev.Knock(NodeId("b"), 1) in core.decision.effects  # type: ignore[union-attr,arg-type]
    unanswered(core, "b", at=1002.0)
    core.tick(1004.9)
    assert core.seats() == ["a", "b"]
    core.tick(1005.0)
    assert core.seats() == ["a"]


def test_a_stopped_job_goes_on_with_the_same_command() -> None:
    core = running("a", "b", max_nodes=4)
    core.feed(ev.Progressed(1, 5), 12.0)
    core.feed(ev.Stopping("told to end"), 20.0)
    assert core.exit_code() == 1
    core.feed(ev.MasterStarted("other"), 120.0)
    assert core.job.uid == "job"
    assert not core.job.nodes
    core.attach("b", incarnation=2, at=121.0)
    assert not core.seats(), "the others are right behind it"
    core.attach("a", incarnation=2, at=121.5)
    assert core.seats() == ["a", "b"], "as many as there were, in their places"
    assert core.job.last_round == 2
    assert core.restarts() == {"stopped": 1}
    core.feed(ev.Progressed(2, 6), 125.0)
    assert core.job.ledger.lost["stopped"] == pytest.approx(105.0)


def test_steps_that_are_computed_again_are_no_progress() -> None:
    """The budget grows back once a round goes beyond the one before it; its first step has no number yet."""
    core = running("a", "b", max_nodes=2)
    core.feed(ev.Progressed(1, 11), 12.0)
    core.feed(failed("a", 1, KILLED), 13.0)
    for step in (0, 10, 11):
        core.feed(ev.Progressed(2, step), 14.0)
        assert core.job.recovery.faults == 1
    core.feed(ev.Progressed(2, 12), 15.0)
    assert core.job.recovery.faults == 0


def hung(core: Core, at: float, **more: Any) -> None:
    told = {
        "ranks": (1,),
        "nodes": (NodeId("b"),),
        "place": "train.py in step",
        "reason": "it stands",
    }
    core.feed(ev.Hung(round=core.job.last_round, **told | more), at)
    spare(core)
    core.tick(at + core.policy.settle)


def test_a_hang_at_the_same_step_ends_a_job_whose_steps_nobody_tells() -> None:
    """Each round is as long as the one before, and has its first step."""
    core = running("a", "b", max_nodes=2)
    began = 10.0
    for _ in range(5):
        core.feed(ev.Progressed(core.job.last_round, 0), began + 5.0)
        hung(core, began + 60.0)
        began = core.now
    assert core.exit_code() == 1
    assert core.job.result is not None
    assert "the same failure 3 times" in core.job.result.reason


def test_hangs_after_other_times_do_not() -> None:
    core = running("a", "b", max_nodes=2)
    for number in range(20):
        core.feed(ev.Progressed(core.job.last_round, 0), core.now + 5.0)
        hung(core, core.now + 60.0 * 2**number)
    assert core.exit_code() is None


def test_steps_that_are_told_late_are_progress() -> None:
    """The first sign of life may have no number yet."""
    core = running("a", "b", max_nodes=2, max_restarts=9)
    for number, steps in ((1, ()), (2, ()), (3, (0, 100, 900))):
        for step in steps:
            core.feed(ev.Progressed(number, step), core.now + 1.0)
        core.feed(failed("a", number, BUG), core.now + 1.0)
        core.tick(core.now + 1.0)
        spare(core)
        core.tick(core.now + 1.0)
    assert core.exit_code() is None
    assert list(core.job.recovery.seen.values()) == [1]


def test_what_may_be_no_hang_is_the_same_failure_only_once_it_was_given_long() -> None:
    core = running("a", "b", max_nodes=2)
    core.feed(ev.Progressed(1, 50), 12.0)
    for seconds in (1.5, 6.0, 24.0, 96.0, 384.0):
        hung(core, core.now + 60.0, soft=True, seconds=seconds)
        assert core.exit_code() is None
    for _ in range(3):
        hung(core, core.now + 700.0, soft=True, seconds=FOREVER)
    assert core.exit_code() == 1


def test_who_leaves_as_planned_or_after_a_failure_did_not_end_early() -> None:
    core = running("a", "b", max_nodes=2)
    core.feed(ev.Progressed(1, 11), 12.0)
    core.feed(failed("a", 1, CLOSED), 13.0)
    core.feed(finished("b", 1), 13.1)
    core.tick(20.0)
    assert core.restarts() == {"network": 1}, "it gave its peer up"

    core = running("a", "b", max_nodes=2)
    core.feed(ev.Progressed(1, 11), 12.0)
    core.feed(finished("b", 1), 13.0)
    core.feed(failed("a", 1, CLOSED), 13.1)
    core.tick(20.0)
    assert core.restarts() == {"ranks ended early": 1}


def test_a_job_that_ended_makes_way_for_a_new_one() -> None:
    core = running("a")
    core.feed(finished("a", 1))
    core.feed(ev.MasterStarted("second"), 50.0)
    assert core.job.uid == "second"
    assert core.job.last_round == 1, "rounds only grow"
    core.attach("a", incarnation=9)
    assert core.job.last_round == 2


def test_nothing_changes_once_there_is_a_result() -> None:
    core = running("a", "b")
    core.feed(failed("a", 1, BUG))
    assert core.exit_code() == 1
    over = core.job
    for event in (drain(None), left("a"), detached("b"), finished("b", 1), ev.Stopping("x")):
        core.feed(event)
    decision = core.feed(attached("late"))
    assert core.job is over
    assert decision.effects == (ev.Tell(frozenset({NodeId("late")})),)
    assert core.order("late").exit_code == 1


# Drains, requests, growth, units.


def test_a_drained_node_leaves_and_the_others_go_on() -> None:
    core = running("a", "b", "c")
    core.feed(drain("b"))
    assert core.seats() == ["a", "c"]
    assert core.order("b").exit_code == DRAINED
    assert core.order("b").stop_grace == 60.0
    assert core.restarts() == {"asked for": 1}
    core.feed(attached("b", 2), 30.0)
    assert core.order("b").exit_code == DRAINED, "a new agent drains on"
    core.feed(ev.MasterStarted("x"), 31.0)
    core.attach("a", "c", at=31.1)
    core.feed(attached("b", 2), 31.2)
    assert core.order("b").kind == "exit"


def test_a_job_drains() -> None:
    core = running("a", "b")
    core.feed(drain(None))
    assert core.exit_code() == DRAINED
    assert core.job.result is not None
    assert core.job.result.resumable
    assert core.order("a").stop_grace == 60.0


def test_a_restart_is_free() -> None:
    core = running("a", "b", fault_budget=0)
    core.feed(ev.RestartAsked("because"))
    assert core.seats() == ["a", "b"]
    assert core.job.last_round == 2


def test_new_nodes_are_taken_in_once_they_have_settled() -> None:
    core = running("a", "b", max_nodes=4)
    core.attach("c", at=20.0)
    assert core.job.last_round == 1
    assert core.wake() == 21.0
    core.tick(21.0)
    assert core.seats() == ["a", "b", "c"]
    spare(core)
    core.attach("d", at=30.0)
    assert core.seats() == ["a", "b", "c"], "it may not stay"
    core.tick(31.0)
    assert core.seats() == ["a", "b", "c", "d"]
    assert core.restarts() == {"more nodes": 2}


def prepared(node: str, incarnation: int = 1) -> ev.Prepared:
    return ev.Prepared(NodeId(node), Incarnation(incarnation))


def test_training_stops_for_a_new_node_once_that_is_prepared() -> None:
    core = running("a", "b", max_nodes=3)
    core.feed(ev.Progressed(1, 1, plain=True), 11.0)
    core.attach("c", at=20.0)
    assert core.order("c").prepare
    core.tick(21.0)
    assert core.seats() == ["a", "b"]
    assert core.wake() == 35.0
    core.feed(prepared("c", incarnation=7), 24.0)
    assert core.seats() == ["a", "b"], "another life of it was"
    core.feed(prepared("c"), 25.0)
    assert core.seats() == ["a", "b", "c"]


def test_a_node_that_never_is_prepared_is_taken_in_all_the_same() -> None:
    core = running("a", "b", max_nodes=3)
    core.feed(ev.Progressed(1, 1, plain=True), 11.0)
    core.attach("c", at=20.0)
    core.tick(35.0)
    assert core.seats() == ["a", "b", "c"]


def test_what_scripts_do_is_told_to_those_who_wait_and_to_those_who_come() -> None:
    core = running("a", "b", max_nodes=1)
    assert not core.order("b").prepare
    told = core.feed(ev.Progressed(1, 1, plain=True), 11.0)
    assert ev.Tell(frozenset({NodeId("b")})) in told.effects
    assert core.order("b").prepare
    assert not core.order("a").prepare
    core.feed(ev.Progressed(1, 2), 12.0)
    core.attach("c", at=13.0)
    assert core.order("c").prepare


def test_a_round_is_not_broken_for_growth_before_it_can_start_again() -> None:
    core = running("a", max_nodes=2)
    core.feed(failed("a", 1, KILLED), 19.0)  # round 2 took the spare store
    assert core.job.last_round == 2
    core.attach("b", at=20.0)
    core.tick(21.5)
    assert core.seats() == ["a"]
    core.feed(store("a", "fresh"), 22.0)
    assert core.seats() == ["a", "b"]


def test_no_growth_while_nodes_finish_or_are_out_of_reach() -> None:
    core = running("a", "b", max_nodes=4)
    core.feed(detached("b"), 20.0)
    core.feed(knocked("b", ALIVE), 20.1)
    core.attach("c", "d", at=20.2)
    core.tick(22.0)
    assert core.job.last_round == 1
    core.feed(finished("a", 1), 22.1)
    core.feed(attached("b"), 22.2)
    core.tick(30.0)
    assert core.job.last_round == 1


def test_the_script_says_what_world_it_needs() -> None:
    core = running("a", "b", "c")
    core.feed(unit(1, 2))
    assert core.seats() == ["a", "b"]
    assert core.job.recovery.restarts == core.job.recovery.faults == 0
    assert core.restarts() == {"rank unit": 1}


def test_a_script_whose_world_can_never_come_ends_the_job() -> None:
    core = running("a", max_nodes=1)
    core.feed(unit(1, 2))
    assert core.exit_code() == 1
    assert core.reason().endswith(
        "of 1 slot on 1 node, and the job may have no more nodes: give more --nproc-per-node or --nnodes"
    )


def test_a_script_whose_world_may_come_waits_for_it() -> None:
    growing = running("a", max_nodes=2)
    growing.feed(unit(1, 2))
    assert growing.job.result is None
    growing.attach("b", at=20.0)
    growing.tick(30.0)
    assert growing.seats() == ["a", "b"]
    trained = running("a", max_nodes=1)
    trained.feed(ev.Progressed(1, 3))
    trained.feed(unit(1, 2))
    assert trained.job.result is None


def damaged(round_: int, step: int, *, from_memory: bool = True) -> ev.Damaged:
    damage = ev.Damage(
        checkpoint="/run", round=1, step=step, from_memory=from_memory, what="slot of rank 1: w"
    )
    return ev.Damaged(round_, damage)


def test_a_checkpoint_that_is_damaged_costs_no_restart_and_is_remembered() -> None:
    core = running("a", "b", max_restarts=0)
    told = core.feed(damaged(1, 7), 20.0)
    assert "step 7 of checkpoint /run is damaged: slot of rank 1: w" in told.reason
    assert (core.job.recovery.restarts, core.job.recovery.faults) == (0, 1)
    assert core.restarts() == {"checkpoint damaged": 1}
    for node in ("a", "b"):
        core.feed(store(node, f"{node}:fresh"), 20.1)
    assert core.job.last_round == 2
    core.feed(damaged(1, 7), 20.2)
    core.feed(damaged(1, 6), 20.2)
    assert core.job.last_round == 2, "that round is over"
    core.feed(damaged(2, 7, from_memory=False), 20.3)
    assert [(one.step, one.from_memory) for one in core.job.damaged] == [(7, True), (7, False)]


def doubted(number: int = 1, after: int = 4, ranks: tuple[int, ...] = (1,)) -> ev.Doubted:
    return ev.Doubted(
        round=number, checkpoint="/run", after=after, ranks=ranks, what="rank 1 is not as most are"
    )


def test_replicas_that_differ_are_remembered_and_the_round_ends_as_its_script_does() -> None:
    core = running("a", "b")
    told = core.feed(doubted(), 20.0)
    assert told.reason == (
        "b may compute wrong; what round 1 has saved after step 4 is not loaded again: rank 1 is not as most are"
    )
    assert core.seats() == ["a", "b"]
    (one,) = core.job.damaged
    assert (one.round, one.step, one.later) == (1, 5, True)
    for again in (doubted(), doubted(2), doubted(0), doubted(after=-1)):
        before = core.job
        core.feed(again, 20.1)
        assert core.job is before, again


def test_a_round_that_began_before_the_doubt_was_heard_begins_anew() -> None:
    core = running("a", "b", max_restarts=1)
    core.feed(failed("a", 1, BUG), 20.0)
    assert core.job.last_round == 2
    spare(core)
    core.feed(doubted(), 20.1)
    assert core.job.last_round == 3
    assert core.restarts() == {"script error": 1, "checkpoint damaged": 1}


def test_whose_ranks_may_be_wrong_is_probed_before_the_next_round() -> None:
    core = running("a", "b", max_restarts=1, precheck="off")
    core.policy = replace(core.policy, precheck="quick")
    core.feed(doubted(), 20.0)
    core.feed(failed("b", 1, BUG), 20.1)
    assert (core.order("a").probe is None, core.order("b").probe is None) == (True, False)
    assert not core.seats(), "it waits for the answer"
    answer = ev.Health(
        node_id=NodeId("b"), incarnation=Incarnation(1), number=1, level="quick", state="faulty",
        what="a bit differs", seconds=1.0,
    )  # fmt: skip
    core.feed(ev.Probed((answer,)), 25.0)
    core.tick(30.0)
    assert core.seats() == ["a"]


def test_damage_without_an_end_ends_the_job() -> None:
    core = running("a", max_restarts=0, fault_budget=3)
    for step in range(10, 0, -1):
        core.feed(damaged(core.job.last_round, step))
        core.feed(store("a", f"a:of-{step}"))
    assert core.job.result is not None
    assert "3 faults with too little progress in between" in core.job.result.reason


def test_a_script_that_likes_no_world_is_stopped() -> None:
    core = running("a", "b", "c")
    for ranks in [2, 3, 2, 3, 2, 3]:
        if core.job.result is None:
            core.feed(unit(core.job.last_round, ranks))
            spare(core)
    assert core.exit_code() == 1
    assert "the same failure 3 times" in core.reason()


# Failures.


def test_a_symptom_waits_for_its_cause() -> None:
    core = running("a", "b")
    core.feed(failed("a", 1, CLOSED), 20.0)
    assert core.wake() == 21.0
    assert core.reason().endswith("looking for its cause elsewhere")
    core.feed(failed("b", 1, failure(rank=1, exit_code=-9)), 20.4)
    assert core.restarts() == {"killed": 1}
    assert core.job.ledger.interruptions[-1].reason == "rank 1 on b was ended by SIGKILL"


def test_no_script_is_blamed_while_a_node_may_be_dead() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    core.feed(failed("a", 1, BUG), 20.1)
    unanswered(core, "b", at=21.0)
    assert core.job.result is None
    assert core.wake() == 25.0
    core.tick(25.0)
    assert core.restarts() == {"node lost": 1}
    assert core.job.result is None


def test_a_script_is_blamed_once_every_node_has_answered() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 20.0)
    core.feed(failed("a", 1, BUG), 20.1)
    core.feed(attached("b"), 21.0)
    assert core.exit_code() == 1
    assert "rank 0 on a raised ValueError: bad value 17" in core.reason()


def test_ranks_beside_a_node_that_leaves_get_a_moment_in_which_their_launcher_may_be_told() -> None:
    core = running("a", "b")
    core.feed(left("b"))
    assert core.order("a").stop_grace == core.policy.settle
    core = running("a", "b", failure_grace=3.0)
    core.feed(left("b"))
    assert core.order("a").stop_grace == 3.0


def test_survivors_of_a_failed_job_get_the_grace_of_failures() -> None:
    core = running("a", "b", failure_grace=3.0)
    core.feed(ev.RestartAsked("x"))
    assert core.order("a").stop_grace == 60.0
    core.feed(failed("a", 2, BUG))
    assert core.order("a").stop_grace == 3.0


def test_a_lost_node_is_charged_once_though_its_peers_fail_too() -> None:
    core = running("a", "b", "c", min_nodes=3)
    core.feed(detached("c"), 20.0)
    core.feed(failed("a", 1, CLOSED), 20.0)
    core.feed(knocked("c", GONE), 20.1)
    core.feed(failed("b", 1, CLOSED), 20.2)
    core.tick(30.0)
    assert core.restarts() == {"node lost": 1}


def test_many_nodes_lost_in_one_moment_are_one_interruption() -> None:
    names = [f"n{i}" for i in range(200)]
    core = running(*names, fault_budget=1)
    for name in names[10:]:
        core.feed(detached(name), 20.0)
    unanswered(core, *names[10:], at=20.0)
    core.tick(25.0)
    assert len(core.seats()) == 200, "that many are rather cut off than dead"
    core.tick(50.0)
    assert len(core.seats()) == 10
    assert core.restarts() == {"node lost": 1}
    assert "n10, n11, n12 and 187 more are lost" in core.reason()
    assert len(core.reason()) < 200


def test_a_budget_that_is_used_up_ends_the_job() -> None:
    core = running("a", fault_budget=2)
    for _ in range(3):
        core.feed(failed("a", core.job.last_round, KILLED))
        if core.job.result is None:
            spare(core)
    assert core.exit_code() == 1
    assert core.reason() == (
        "rank 0 on a was ended by SIGKILL: 2 faults with too little progress in between"
    )


def test_one_agent_twice_in_a_batch() -> None:
    core = running("a", "b")
    core.feed(ev.Attached((attachment("a", 2), attachment("a", 3), attachment("b"))))
    assert core.job.nodes[NodeId("a")].incarnation == 3
    assert core.job.last_round == 2
    assert core.restarts() == {"agent lost": 1}

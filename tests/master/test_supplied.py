"""A cluster that gives and takes nodes while the job runs."""

from dataclasses import replace

from elastic.master import events as ev
from elastic.master.directive import directive, places
from elastic.master.endings import kind_of
from elastic.master.events import Incarnation, KnockAnswer, NodeId
from elastic.master.policy import Policy
from elastic.master.recovery import Cause, Recovery
from elastic.master.state import Why
from elastic.proto.ending import Ended
from tests.master.builders import Core, attached, detached, drain, knocked, left, spare
from tests.master.probing import answer, begun, pair

POLICY = Policy(min_nodes=1, max_nodes=4, supplied=True, last_call=0.0, preparation=0.0)


GONE = KnockAnswer.GONE


def running(*nodes: str, policy: Policy = POLICY) -> Core:
    core = Core(policy)
    core.feed(ev.MasterStarted("uid", "launch", policy), 0.0)
    core.feed(ev.Attached(tuple(n for name in nodes for n in attached(name).nodes)), 0.0)
    core.feed(ev.Progressed(1, 1), 1.0)
    assert seats(core) == set(nodes)
    spare(core)
    return core


def seats(core: Core) -> set[str]:
    current = core.job.round
    return {s.node_id for s in current.seats} if current is not None and current.standing else set()


def gone(*nodes: str, cause: Cause = Cause.NODE_LOST) -> ev.Removed:
    return ev.Removed(
        tuple(ev.Removal(node_id=NodeId(n), cause=cause, reason=f"pod {n} is gone") for n in nodes)
    )


def test_pods_that_are_gone_are_one_change() -> None:
    core = running("a", "b", "c", "d")
    core.feed(gone("c", "d"), 5.0)
    assert seats(core) == {"a", "b"}
    assert core.job.last_round == 2
    assert core.job.ledger.restarts == {Cause.NODE_LOST: 1}


def test_a_preemption_costs_nothing_and_a_fault_beside_it_does() -> None:
    core = running("a", "b", "c", "d")
    core.feed(gone("d", cause=Cause.PREEMPTED), 5.0)
    assert core.job.recovery.faults == 0
    both = ev.Removed(gone("b", cause=Cause.PREEMPTED).nodes + gone("c").nodes)
    spare(core)
    core.feed(both, 6.0)
    assert core.job.recovery.faults == 1
    assert seats(core) == {"a"}


def test_who_was_taken_for_lost_but_was_taken_away_costs_nothing() -> None:
    """Its agent's end was heard before its pod's."""
    core = running("a", "b", "c", "d")
    core.feed(detached("c"), 5.0)
    core.feed(detached("d"), 5.0)
    both = ((NodeId("c"), Incarnation(1), GONE), (NodeId("d"), Incarnation(1), GONE))
    core.feed(ev.Knocked(both), 5.1)
    assert core.job.recovery.faults == 1
    assert core.job.ledger.restarts == {Cause.NODE_LOST: 1}
    core.feed(gone("c", cause=Cause.PREEMPTED), 6.0)
    assert core.job.recovery.faults == 1, "the other one is lost"
    core.feed(gone("d", cause=Cause.PREEMPTED), 6.0)
    core.feed(gone("d", cause=Cause.PREEMPTED), 6.0)
    assert core.job.recovery.faults == 0
    assert core.job.ledger.restarts == {Cause.PREEMPTED: 1}
    made = core.job.ledger.interruptions[-1]
    assert (made.cause, made.reason, made.at) == (Cause.PREEMPTED, "pod d is gone", 5.1)


def test_one_that_was_lost_and_is_gone_stays_charged() -> None:
    core = running("a", "b")
    core.feed(detached("b"), 5.0)
    core.feed(knocked("b", GONE), 5.1)
    core.feed(gone("b"), 6.0)
    assert core.job.recovery.faults == 1
    assert core.job.ledger.restarts == {Cause.NODE_LOST: 1}


def test_what_is_not_known_changes_nothing() -> None:
    core = running("a")
    before = core.job
    core.feed(gone("x"), 5.0)
    core.feed(ev.Withdrawn(((NodeId("x"), "scaled"),)), 5.0)
    assert core.job is before


def test_victims_of_a_shrink_leave_in_one_change_with_time_to_save() -> None:
    core = running("a", "b", "c", "d")
    core.feed(ev.Saving(1), 2.0)
    core.feed(ev.Resized(min_nodes=1, max_nodes=2), 5.0)
    core.feed(ev.Withdrawn(((NodeId("c"), "2 are wanted"), (NodeId("d"), "2 are wanted"))), 5.0)
    assert seats(core) == {"a", "b", "c", "d"}, "until all have saved a step"
    core.feed(ev.Met(1, 7), 6.0)
    assert seats(core) == {"a", "b"}
    assert core.job.last_round == 2
    told = directive(core.job, NodeId("d"), places(core.job.round))
    assert (told.kind, told.exit_code) == ("exit", 213)


def test_who_failed_its_check_ends_as_such_and_the_others_go_on() -> None:
    core = begun("a", "b", "c", supplied=True, min_nodes=2)
    answer(core, "b", "faulty", at=2.0)
    for node in "ac":
        answer(core, node, at=3.0)
    pair(core, at=4.0)
    assert (seats(core), core.order("b").kind) == ({"a", "c"}, "wait")
    said = core.feed(ev.Withdrawn(((NodeId("b"), "its check failed"),), Why.UNHEALTHY), 5.0).reason
    assert said.startswith("b drain: its check failed")
    told = core.order("b")
    assert (told.kind, told.exit_code, told.ending.cause) == ("exit", 213, Why.UNHEALTHY)
    assert told.reason == "drained, since its check failed: matmul: gpu3: 1 elements differ"
    assert told.goes_on
    assert kind_of(told.exit_code, told.ending.cause) is Ended.UNHEALTHY
    core.feed(left("b"), 6.0)
    assert (core.job.last_round, seats(core)) == (1, {"a", "c"})
    assert core.job.ledger.restarts == {}


def test_a_larger_range_lets_those_who_wait_in() -> None:
    core = Core(replace(POLICY, max_nodes=1))
    core.feed(attached("a"), 0.0)
    core.feed(attached("b"), 1.0)
    assert seats(core) == {"a"}
    spare(core)
    core.feed(ev.Resized(min_nodes=1, max_nodes=2), 100.0)
    core.feed(ev.Tick(), 101.0)
    assert seats(core) == {"a", "b"}


def test_the_job_outlives_its_last_node() -> None:
    core = running("a")
    core.feed(drain("a"), 5.0)
    assert core.job.result is None
    core.feed(gone("a", cause=Cause.PREEMPTED), 6.0)
    assert core.job.result is None
    core.feed(attached("a2"), 9.0)
    assert seats(core) == {"a2"}


def test_the_cluster_cannot_give_what_is_needed() -> None:
    core = running("a")
    core.feed(ev.FailAsked(cause=Why.IMAGE, reason="no image repo/x:1"), 5.0)
    assert core.job.result is not None
    assert (core.job.result.exit_code, core.job.result.cause) == (1, Why.IMAGE)


def test_what_a_suspend_may_have_put_right_is_not_held_against_the_job() -> None:
    core = running("a")
    known = Recovery(restarts=1, faults=2, seen={"an error": 2}, ooms={0: 1})
    core.job = replace(core.job, recovery=known)
    core.feed(ev.DrainAsked(None, "suspended"), 2.0)
    core.feed(gone("a", cause=Cause.PREEMPTED), 3.0)
    assert core.job.result is not None
    assert core.job.result.resumable
    core.feed(ev.MasterStarted("uid", "another launch", POLICY), 4.0)
    assert core.job.result is None
    assert core.job.recovery == Recovery(restarts=1, faults=2)


def test_no_epoch_is_used_twice_where_a_journal_was_lost() -> None:
    core = Core(POLICY)
    core.feed(ev.MasterStarted("uid", "one", POLICY, 2 << 16), 0.0)
    assert core.job.epoch == 2 << 16
    core.feed(ev.MasterStarted("uid", "two", POLICY, 2 << 16), 1.0)
    assert core.job.epoch == (2 << 16) + 1


def test_rounds_are_counted_on_where_a_journal_was_lost() -> None:
    """What they save would else be older than what is on storage, and never get there."""
    core = Core(POLICY)
    core.feed(ev.MasterStarted("uid", "two", POLICY, 2 << 16, 7), 0.0)
    assert (core.job.last_round, core.job.round) == (7, None)
    core.feed(attached("a"), 2.0)
    core.feed(attached("b"), 2.0)
    core.tick(60.0)
    assert core.job.round is not None
    assert core.job.round.number == 8
    core.feed(ev.MasterStarted("uid", "two", POLICY, 2 << 16, 24), 61.0)
    assert core.job.last_round == 8, "a journal that is there knows it better"


def test_only_certain_sizes_are_legal() -> None:
    core = running("a", "b", "c", "d", policy=replace(POLICY, sizes=(1, 2, 4)))
    core.feed(gone("d"), 5.0)
    assert seats(core) == {"a", "b"}, "not three"
    spare(core)
    core.feed(attached("e"), 50.0)
    core.feed(ev.Tick(), 60.0)
    assert seats(core) == {"a", "b", "c", "e"}

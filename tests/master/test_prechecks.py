"""Who is probed before it joins, and who is kept out."""

from typing import Any

import pytest

from elastic.master import events as ev
from elastic.master import prechecks
from elastic.master.events import Incarnation, KnockAnswer, NodeId, NodePhase
from elastic.master.prechecks import PATIENCE, SOON
from tests.master.builders import KILLED, Core, detached, failed, failure, knocked, left, spare
from tests.master.probing import answer, asked, begun, in_pairs, pair

FALLEN = "NVRM: Xid (PCI:0000:03:00): 79, pid=0, GPU has fallen off the bus."


def test_nobody_trains_before_all_are_probed() -> None:
    core = begun("a", "b")
    assert core.seats() == []
    order = core.order("b")
    assert order.kind == "wait"
    assert order.probe is not None
    assert (order.probe.level, order.probe.number) == ("quick", 2)
    answer(core, "a", at=2.0)
    assert core.seats() == []
    assert asked(core, "a", "b") == [False, True]
    answer(core, "b", at=3.0)
    assert core.seats() == []
    assert in_pairs(core) == ["a", "b"]
    pair(core, at=4.0)
    assert core.seats() == ["a", "b"]
    assert core.reason().startswith("2 nodes were tested two by two, 1.0 s; round 1: ")


def test_without_a_precheck_nobody_is_probed() -> None:
    core = begun("a", "b", precheck="off")
    assert core.seats() == ["a", "b"]


def test_a_faulty_node_is_kept_out_and_the_others_go_on() -> None:
    core = begun("a", "b", "c")
    answer(core, "b", "faulty", at=2.0)
    assert core.reason() == "b is kept out: matmul: gpu3: 1 elements differ, probed in 1.5 s; 0 of at least 1 node here; coming: a, c"  # fmt: skip
    answer(core, "a", at=2.5)
    answer(core, "c", at=3.0)
    core.tick(4.0)
    pair(core, at=5.0)
    assert core.seats() == ["a", "c"]
    assert core.order("b").kind == "wait"


def test_what_keeps_a_job_from_beginning_is_said() -> None:
    core = begun("a", "b", min_nodes=2, join_timeout=60.0)
    answer(core, "a", at=2.0)
    answer(core, "b", "faulty", at=2.0)
    core.tick(60.0)
    assert core.exit_code() == 1
    assert core.reason() == (
        "1 of at least 2 nodes here; b is kept out: matmul: gpu3: 1 elements differ, 60 s after the job began"
    )


def test_what_nobody_knows_is_no_fault() -> None:
    core = begun("a")
    answer(core, "a", "unknown", at=2.0)
    assert core.seats() == ["a"]


def training(*nodes: str, **policy: Any) -> Core:
    core = begun(*nodes, **policy)
    for node in nodes:
        answer(core, node, at=2.0)
    pair(core, at=3.0)
    spare(core)
    return core


def test_a_fault_of_the_software_costs_no_probe() -> None:
    """However old the verdict is."""
    core = training("a", "b", verdict_age=10.0)
    core.feed(failed("a", 1, KILLED), 500.0)
    assert asked(core, "a", "b") == [False, False]
    assert core.seats() == ["a", "b"]
    assert core.job.last_round == 2


def test_whom_a_new_round_leaves_out_is_tried_again_once_its_verdict_is_old() -> None:
    core = training("a", "b", verdict_age=10.0)
    core.feed(ev.Resized(min_nodes=1, max_nodes=1), 499.0)
    core.feed(failed("a", 1, KILLED), 500.0)
    assert core.seats() == ["a"]
    assert asked(core, "a", "b") == [False, True]


@pytest.mark.parametrize(("at", "again"), [(500.0, False), (1003.0, True)])
def test_a_good_verdict_holds_for_another_life_of_the_node_for_a_while(
    at: float, again: bool
) -> None:
    core = begun("a", "b", min_nodes=2)
    answer(core, "a", at=2.0)
    answer(core, "b", at=2.0)
    pair(core, at=2.0)
    spare(core)
    core.feed(left("b"), 3.0)
    core.attach("b", incarnation=2, at=at)
    assert asked(core, "b") == [again]
    assert bool(core.seats()) != again


def test_the_launcher_of_a_faulty_node_that_is_started_again_has_it_probed() -> None:
    core = begun("a")
    answer(core, "a", "faulty", at=2.0)
    core.attach("a", incarnation=2, at=5.0)
    assert asked(core, "a") == [True]
    answer(core, "a", at=6.0)
    assert core.seats() == ["a"]


def test_an_old_verdict_is_looked_into() -> None:
    core = begun("a", "b")
    answer(core, "a", "faulty", at=2.0)
    answer(core, "b", at=3.0)
    core.tick(4.0)
    assert core.seats() == ["b"]
    assert core.wake() == 1002.0
    core.tick(1002.0)
    assert core.reason().startswith("probing a again")
    assert asked(core, "a") == [True]


def test_where_too_few_are_left_a_verdict_is_old_soon() -> None:
    """As where a file system of all nodes was away for a minute."""
    core = begun("a", "b", min_nodes=2)
    for node in ("a", "b"):
        answer(core, node, "faulty", at=2.0)
    assert core.wake() == 2.0 + prechecks.SOON
    core.tick(2.0 + prechecks.SOON)
    assert asked(core, "a", "b") == [True, True]
    for node in ("a", "b"):
        answer(core, node, at=65.0)
    pair(core, at=66.0)
    assert core.seats() == ["a", "b"]


def test_it_is_old_soon_too_after_tests_in_pairs() -> None:
    """As where a switch was away for some minutes: nobody trains who would have to stop for the next."""
    core = begun("a", "b", min_nodes=2)
    waits = []
    for _ in range(6):
        for node in ("a", "b"):
            if asked(core, node) == [True]:
                answer(core, node, at=core.now + 2.0)
        while in_pairs(core):
            spare(core)
            pair(core, "a-b", at=core.now + 1.0)
        wake = core.wake()
        assert wake is not None
        waits.append(wake - core.now)
        core.tick(wake)
    assert waits == [prechecks.SOON * times for times in (1, 2, 4, 8, 8, 8)]


def test_a_stream_that_comes_back_makes_no_verdict_old() -> None:
    core = begun("a", "b", "c", min_nodes=2, max_nodes=3)
    for node in "abc":
        answer(core, node, at=2.0)
    while in_pairs(core):
        spare(core)
        pair(core, "c", at=core.now + 1.0)
    spare(core)
    core.tick(core.now + core.policy.verdict_age)
    assert asked(core, "c") == [True]
    answer(core, "c", at=core.now + 1.0)
    while in_pairs(core):
        spare(core)
        pair(core, "c", at=core.now + 1.0)
    core.feed(detached("c"), core.now + 1.5 * core.policy.verdict_age)
    core.attach("c", at=core.now + 1.0)
    assert asked(core, "c") == [False]


def test_a_spare_is_probed_again_once_its_verdict_is_old() -> None:
    """Those that train are not."""
    core = begun("a", "b", max_nodes=1)
    answer(core, "a", at=2.0)
    answer(core, "b", at=3.0)
    spare(core)
    assert core.seats() == ["a"]
    assert core.wake() == 1003.0
    core.tick(1003.0)
    assert asked(core, "a", "b") == [False, True]
    answer(core, "b", at=1005.0)
    assert core.wake() == 2005.0


def test_another_host_is_not_known_by_the_name_of_the_node() -> None:
    core = begun("a", "b", min_nodes=2)
    answer(core, "a", at=2.0)
    answer(core, "b", at=2.0)
    pair(core, at=2.0)
    spare(core)
    core.feed(left("b"), 3.0)
    core.attach("b", incarnation=2, host="10.0.0.9", at=4.0)
    assert asked(core, "b") == [True]


def test_answers_to_another_question_or_of_another_life_change_nothing() -> None:
    core = begun("a")
    before = core.job
    answer(core, "a", at=2.0, number=7)
    stranger = ev.Health(
        node_id=NodeId("a"), incarnation=Incarnation(9), number=1, level="quick", state="ok",
        what="", seconds=1.0,
    )  # fmt: skip
    core.feed(ev.Probed((stranger,)), 2.0)
    assert core.job is before


def test_one_that_never_answers_holds_up_the_others_only_for_so_long() -> None:
    core = begun("a", "b")
    answer(core, "a", at=2.0)
    assert core.wake() == PATIENCE["quick"]
    core.tick(PATIENCE["quick"])
    assert core.seats() == ["a"]
    spare(core)
    answer(core, "b", at=200.0)
    core.tick(300.0)
    assert core.seats() == ["a", "b"]


def test_a_job_that_only_tries_its_nodes_is_over_then() -> None:
    core = begun("a", "b", "c", min_nodes=3, probe_only=True)
    answer(core, "a", at=2.0)
    answer(core, "b", at=2.0)
    assert core.exit_code() is None
    answer(core, "c", at=2.0)
    while in_pairs(core):
        pair(core, at=core.now + 1)
    assert core.exit_code() == 0
    assert core.reason() == "3 of 3 nodes can train"


def test_it_fails_where_one_of_them_is_faulty() -> None:
    core = begun("a", "b", "c", min_nodes=3, probe_only=True)
    answer(core, "a", at=2.0)
    answer(core, "b", "faulty", at=2.0)
    answer(core, "c", at=2.0)
    pair(core, at=3.0)
    assert core.exit_code() == 1
    assert core.reason() == "2 of 3 nodes can train; b is kept out: matmul: gpu3: 1 elements differ"


def test_or_where_one_never_answers() -> None:
    core = begun("a", "b", min_nodes=2, probe_only=True)
    answer(core, "a", at=2.0)
    assert core.wake() == PATIENCE["quick"]
    core.tick(PATIENCE["quick"])
    assert core.exit_code() == 1
    assert core.reason() == "1 of 2 nodes can train; 1 node never answered"


def test_nor_can_one_train_that_is_out_of_reach() -> None:
    """It lives, as knocks tell, and is tested with nobody; that comes to an end."""
    core = begun("a", "b", "c", min_nodes=3, probe_only=True)
    for node in "abc":
        answer(core, node, at=2.0)
    core.feed(detached("c"), 3.0)
    while core.exit_code() is None:
        assert core.now < 1000.0
        core.feed(knocked("c", KnockAnswer.ALIVE), core.now + 1)
        pair(core, at=core.now, silent="c")
    assert core.job.result is not None
    assert core.exit_code() == 1
    assert core.job.result.reason == "2 of 3 nodes can train; 1 node never answered"


def test_what_is_known_of_nodes_that_are_gone_is_kept_no_longer_than_it_holds() -> None:
    """In a cloud each node has another name."""
    core = begun("a", max_nodes=2)
    answer(core, "a", at=2.0)
    for number in range(10):
        core.attach(f"n{number}", at=10.0 + 300.0 * number)
        answer(core, f"n{number}", "faulty", at=core.now + 1)
        core.feed(left(f"n{number}"), core.now + 1)
    known = [checked.node_id for checked in core.job.checks.values()]
    assert known == ["a", "n6", "n7", "n8", "n9"]


def test_nor_is_a_doubt_about_them_for_longer_than_a_day() -> None:
    core = begun("a", "b", "c", max_nodes=3)
    for node in "abc":
        answer(core, node, at=2.0)
    while in_pairs(core):
        pair(core, at=3.0)
    spare(core)
    core.feed(failed("b", 1, failure(exit_code=-9, kernel_log=(FALLEN,))), 20.0)
    core.feed(left("b"), 21.0)
    core.tick(40.0)
    assert [one.node_id for one in core.job.checks.values() if one.doubted] == ["b"]
    core.attach("d", at=20.0 + prechecks.FORGOTTEN)
    answer(core, "d", at=core.now + 1.0)
    assert "b" not in {one.node_id for one in core.job.checks.values()}


def test_who_trains_in_doubt_is_not_probed() -> None:
    """Alone: there is nobody to be tested with."""
    core = begun("a", max_nodes=2)
    answer(core, "a", at=2.0)
    core.tick(10.0)
    spare(core)
    core.feed(failed("a", 1, failure(exit_code=-9, kernel_log=(FALLEN,))), 20.0)
    core.tick(22.0)
    answer(core, "a", at=25.0)
    spare(core)
    core.tick(26.0)
    assert core.seats() == ["a"]
    core.feed(detached("a"), 2 * core.policy.verdict_age)
    report = ev.Report(round=core.job.last_round, phase=NodePhase.RUNNING)
    core.attach("a", report=report, at=core.now + 1.0)
    assert core.job.nodes[NodeId("a")].probe is None
    core.attach("b", at=core.now + 10.0)
    answer(core, "b", at=core.now + 2.0)
    core.tick(core.now + 60.0)
    while in_pairs(core):
        spare(core)
        pair(core, at=core.now + 1.0)
    assert core.seats() == ["a", "b"], "it grows"


def unfit(core: Core) -> dict[NodeId, str]:
    return prechecks.unfit(core.job.nodes, core.job.checks, core.policy)


def test_who_is_replaced_is_named_once_others_are_fine() -> None:
    core = begun("a", "b", "c", min_nodes=3, supplied=True)
    answer(core, "b", "faulty", at=2.0)
    assert unfit(core) == {}, "all may be so"
    answer(core, "a", at=3.0)
    assert unfit(core) == {"b": "matmul: gpu3: 1 elements differ"}
    answer(core, "c", "faulty", at=4.0)
    assert unfit(core) == {}, "most are"
    core.tick(4.0 + SOON)
    assert asked(core, "a", "b", "c") == [False, True, True]
    answer(core, "c", at=66.0)
    assert unfit(core) == {}, "b has not answered"
    answer(core, "b", "faulty", at=67.0)
    assert set(unfit(core)) == {"b"}


def test_a_node_alone_is_named_by_its_own_word() -> None:
    core = begun("a")
    answer(core, "a", "faulty", at=2.0)
    assert set(unfit(core)) == {"a"}


def test_who_is_merely_in_doubt_or_at_one_end_of_a_link_is_not_replaced() -> None:
    core = begun("a", "b")
    for node in "ab":
        answer(core, node, at=2.0)
    while in_pairs(core):
        pair(core, "a-b", at=core.now + 1)
    core.tick(core.now + 2)
    assert core.seats() == ["a"]
    assert "b is kept out: the link between a and b" in prechecks.describe(
        core.job.nodes, core.job.checks, core.policy
    )
    assert unfit(core) == {}
    hung = ev.Hung(round=1, ranks=(0,), nodes=(NodeId("a"),), place="", reason="hung", machine=True)
    core.feed(hung, 20.0)
    assert asked(core, "a") == [True]
    assert unfit(core) == {}


def test_whom_tests_in_pairs_name_is_replaced() -> None:
    core = begun(*"abcd")
    for node in "abcd":
        answer(core, node, at=2.0)
    while in_pairs(core):
        pair(core, "c", at=core.now + 1)
    (what,) = unfit(core).values()
    assert what.startswith("node c: works with none of ")

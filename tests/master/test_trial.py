"""Nodes that are tested with one another before they train together."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.master import events as ev
from elastic.master import prechecks
from elastic.master.events import KnockAnswer, NodeId, RankFailure
from elastic.master.nodes import Pairs
from elastic.master.trial import DEADLINE, LATE, START
from tests.master.builders import (
    CLOSED,
    KILLED,
    Core,
    detached,
    failed,
    failure,
    knocked,
    left,
    spare,
    store,
)
from tests.master.probing import answer, asked, begun, in_pairs, pair

LOST_GPU = failure(
    error_type="RuntimeError", message="CUDA error: uncorrectable ECC error encountered"
)


def probed(*nodes: str, **policy: Any) -> Core:
    """Each has probed itself, and works."""
    core = begun(*nodes, **policy)
    for node in nodes:
        answer(core, node, at=2.0)
    return core


def pairs(core: Core, node: str) -> Pairs:
    probe = core.job.nodes[NodeId(node)].probe
    assert probe is not None
    assert probe.pairs is not None
    return probe.pairs


def kept_out(core: Core) -> list[str]:
    """Of those that are here."""
    return [
        n
        for n, node in core.job.nodes.items()
        if not prechecks.may_join(node, core.job.checks, core.policy)
    ]


def test_nodes_meet_at_a_store_of_one_of_them() -> None:
    core = probed("a", "b")
    asked_of = [pairs(core, node) for node in ("a", "b")]
    assert asked_of[0] == asked_of[1]
    assert asked_of[0].stores == (core.job.nodes[NodeId("a")].store,)
    assert asked_of[0].pairs == (("a", "b"),)
    pair(core, at=3.0)
    assert core.job.round is not None
    assert (core.job.round.store,) == asked_of[0].stores, "a test uses none up"


def test_without_a_store_they_wait_for_one() -> None:
    core = begun("a", "b")
    for node in ("a", "b"):
        core.feed(store(node, ""), 1.0)
    for node in ("a", "b"):
        answer(core, node, at=2.0)
    assert in_pairs(core) == []
    core.feed(store("b", "b:77"), 2.5)
    assert in_pairs(core) == ["a", "b"]
    assert pairs(core, "a").stores == ("b:77",)


def test_whose_store_comes_too_late_to_answer_in_time_is_tested_in_the_next_round() -> None:
    core = begun("a", "b", "c", "d")
    for node in ("a", "b"):
        core.feed(store(node, ""), 1.0)
    for node in "abcd":
        answer(core, node, at=2.0)
    assert in_pairs(core) == ["c", "d"]
    pair(core, at=3.0)
    over = core.wake()
    assert over is not None
    core.feed(store("b", "b:77"), over - 1.0)
    assert in_pairs(core) == []
    core.tick(over)
    assert {"a", "b"} <= set(in_pairs(core))
    while in_pairs(core):
        pair(core, at=core.now + 1)
    assert (core.job.trial, kept_out(core)) == (None, [])


def test_the_device_is_what_all_have_and_as_many_as_each_has() -> None:
    core = begun("a", "b", "c", "d")
    for node, device, devices in (
        ("a", "cuda", 8),
        ("b", "cuda", 4),
        ("c", "cuda", 8),
        ("d", "cpu", 1),
    ):
        probe = core.job.nodes[NodeId(node)].probe
        assert probe is not None
        health = ev.Health(
            node_id=NodeId(node), incarnation=core.job.nodes[NodeId(node)].incarnation, number=probe.number,
            level="quick", state="ok", what="", seconds=1.0, device=device, devices=devices,
        )  # fmt: skip
        core.feed(ev.Probed((health,)), 2.0)
    assert [(pairs(core, node).device, pairs(core, node).devices) for node in "abcd"] == [
        ("cuda", 4), ("cuda", 4), ("cpu", 1), ("cpu", 1),
    ]  # fmt: skip


def test_a_bad_node_among_three_is_named_and_kept_out() -> None:
    core = probed("a", "b", "c")
    while in_pairs(core):
        pair(core, "b", at=core.now + 1)
    core.tick(core.now + 2)
    assert kept_out(core) == ["b"]
    assert core.seats() == ["a", "c"]
    assert (
        "works with none of" in core.job.checks[prechecks.where(core.job.nodes[NodeId("b")])].what
    )


def test_who_is_there_while_others_are_tested_waits_as_a_spare() -> None:
    """Though it would have a place by its name: else those that work were tested again, with it."""
    core = begun("a", "b", "c", max_nodes=2)
    for node in ("b", "c", "a"):
        answer(core, node, at=2.0)
    assert in_pairs(core) == ["b", "c"]
    pair(core, at=3.0)
    assert in_pairs(core) == []
    assert core.seats() == ["b", "c"]


def test_one_of_them_that_does_not_work_has_it_take_its_place() -> None:
    core = begun("a", "b", "c", max_nodes=2)
    for node in ("b", "c", "a"):
        answer(core, node, at=2.0)
    while in_pairs(core):
        pair(core, "c", at=core.now + 1)
    core.tick(core.now + 2)
    assert core.seats() == ["a", "b"]


def test_of_two_that_do_not_work_together_one_trains() -> None:
    """The link is at fault, as far as anybody can tell."""
    core = probed("a", "b")
    while in_pairs(core):
        pair(core, "a-b", at=core.now + 1)
    core.tick(core.now + 2)
    assert core.seats() == ["a"]
    (out,) = kept_out(core)
    what = core.job.checks[prechecks.where(core.job.nodes[NodeId(out)])].what
    assert what.startswith("the link between a and b: both are fine alone, and not together")


def test_a_bad_link_costs_one_node() -> None:
    core = probed(*"abcdef")
    for _ in range(3):
        if in_pairs(core):
            pair(core, "a-b", at=core.now + 1)
    core.tick(core.now + 2)
    assert len(core.seats()) == 5
    (out,) = kept_out(core)
    assert out in {"a", "b"}
    checked = core.job.checks[prechecks.where(core.job.nodes[NodeId(out)])]
    assert checked.what.startswith("the link between a and b: "), checked.what


def test_each_pair_meets_at_one_of_its_two_and_then_at_the_other() -> None:
    """What is between them and a third node is not in their way, nor is for ever that nobody reaches a store."""
    core = probed(*"abcd")
    stores = {core.job.nodes[NodeId(node)].store: node for node in "abcd"}
    met: dict[tuple[str, ...], list[str]] = {}
    while in_pairs(core):
        asked_of = {pairs(core, node) for node in in_pairs(core)}
        for which, at in (
            (w, a) for one in asked_of for w, a in zip(one.pairs, one.stores, strict=True)
        ):
            assert stores[at] in which
            met.setdefault(tuple(sorted(which)), []).append(stores[at])
        pair(core, "a-b", at=core.now + 1)
    assert met["a", "b"] in (["a", "b", "a"], ["b", "a", "b"])


@settings(max_examples=60)
@given(st.sampled_from(["abcd", "abcde", "abcdefg", "abcdefghi"]), st.data())
def test_no_node_is_at_fault_for_a_bad_link_or_two(nodes: str, data: st.DataObject) -> None:
    links = [f"{a}-{b}" for a, b in combinations(nodes, 2)]
    broken = data.draw(st.lists(st.sampled_from(links), min_size=1, max_size=2, unique=True))
    core = probed(*nodes)
    while in_pairs(core):
        pair(core, *broken, at=core.now + 1)
    core.tick(core.now + 2)
    said = [checked.what for checked in core.job.checks.values() if checked.what]
    assert all(what.startswith("the link between ") for what in said), said
    assert len(core.seats()) >= len(nodes) - len(broken)


@settings(max_examples=60)
@given(st.integers(3, 40), st.data())
def test_nodes_that_reach_no_other_are_named(count: int, data: st.DataObject) -> None:
    """Up to two, where there are enough to tell; partners in their first tests, too."""
    nodes = [f"n{number:02}" for number in range(count)]
    most = 2 if count >= 6 else 1
    dead = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=most, unique=True))
    core = probed(*nodes)
    while in_pairs(core):
        pair(core, *dead, at=core.now + 1)
    core.tick(core.now + 2)
    assert kept_out(core) == sorted(dead)


def test_who_never_answers_is_at_fault_once_the_time_is_over() -> None:
    core = probed("a", "b", "c")
    while in_pairs(core):
        pair(core, at=core.now + 1, silent="b")
        if in_pairs(core) == ["b"]:
            wake = core.wake()
            assert wake is not None
            core.tick(wake)
    core.tick(core.now + 2)
    assert kept_out(core) == ["b"]
    assert core.seats() == ["a", "c"]


def test_a_tick_that_decides_nothing_changes_nothing() -> None:
    """It is not journaled then."""
    core = probed("a", "b")
    before = core.job
    core.tick(3.0)
    assert core.job is before


def test_a_round_of_tests_is_over_in_time() -> None:
    core = probed("a", "b")
    start, each = DEADLINE["quick"]
    assert core.wake() == 2.0 + START + start + each + LATE


def test_who_is_gone_meanwhile_is_accused_of_nothing() -> None:
    core = probed("a", "b", "c")
    core.feed(left("b"), 2.5)
    while in_pairs(core):
        pair(core, "b", at=core.now + 1)
    core.tick(core.now + 2)
    assert core.seats() == ["a", "c"]
    assert all(checked.state == "ok" for checked in core.job.checks.values())


def test_nobody_waits_for_the_answers_of_one_that_is_gone() -> None:
    core = probed("a", "b")
    core.feed(left("b"), 2.5)
    assert in_pairs(core) == []
    assert core.order("a").probe is None
    core.tick(4.0)
    assert core.seats() == ["a"]


def test_others_of_its_group_go_on() -> None:
    core = probed("a", "b", "c")
    assert len(pairs(core, "a").nodes) == 3
    hub = pairs(core, "a").pairs[0][0]
    leaf = next(node for node in "abc" if node != hub)
    core.feed(left(leaf), 2.5)
    assert sorted(in_pairs(core)) == sorted({*"abc"} - {leaf})


def test_who_could_not_be_tested_trains() -> None:
    core = probed("a", "b")
    node = core.job.nodes[NodeId("b")]
    assert node.probe is not None
    unknown = ev.Pairing(
        node_id=node.node_id, incarnation=node.incarnation, number=node.probe.number, state="unknown", what="no memory"
    )  # fmt: skip
    core.feed(ev.Paired((unknown,)), 3.0)
    pair(core, "a-b", at=4.0)
    assert core.seats() == ["a", "b"]


def test_a_sick_device_is_its_node_s_fault() -> None:
    core = probed("a", "b")
    node = core.job.nodes[NodeId("b")]
    assert node.probe is not None
    sick = ev.Pairing(
        node_id=node.node_id, incarnation=node.incarnation, number=node.probe.number, state="faulty", gpu=3,
        what="CUDA error: unspecified launch failure",
    )  # fmt: skip
    core.feed(ev.Paired((sick,)), 3.0)
    pair(core, "a-b", at=4.0)
    core.tick(6.0)
    assert core.seats() == ["a"]
    checked = core.job.checks[prechecks.where(core.job.nodes[NodeId("b")])]
    assert checked.what == "GPU 3 of node b: CUDA error: unspecified launch failure"


@pytest.mark.parametrize(("exclude", "seats"), [(False, list("abcd")), (True, list("acd"))])
def test_a_slow_node_is_kept_out_where_that_is_wanted(exclude: bool, seats: list[str]) -> None:
    core = probed(*"abcd", exclude_straggler=exclude)
    for _ in range(3):
        said = []
        for node_id in in_pairs(core):
            node = core.job.nodes[NodeId(node_id)]
            assert node.probe is not None
            mine = [one for one in pairs(core, node_id).pairs if node_id in one]
            said.append(
                ev.Pairing(
                    node_id=node.node_id,
                    incarnation=node.incarnation,
                    number=node.probe.number,
                    state="ok",
                    matmul=(2.0 if node_id == "b" else 1.0,),
                    tests=tuple(ev.PairTest(passed=True, gather=0.1) for _ in mine),
                )
            )
        if said:
            core.feed(ev.Paired(tuple(said)), core.now + 1)
    core.tick(core.now + 2)
    assert core.seats() == seats


def test_who_was_tested_does_not_wait_for_the_tests_of_one_that_came_meanwhile() -> None:
    """Or a launcher that dies and comes back again and again would keep all others from training."""
    core = probed("a", "b", "c", max_nodes=4, min_nodes=2)
    core.feed(left("c"), 3.0)
    core.attach("c", at=3.5, incarnation=2)
    pair(core, at=5.0)
    assert core.seats() == ["a", "b"]
    spare(core)
    core.tick(5.0 + core.policy.last_call)
    assert core.seats() == ["a", "b", "c"]


def test_one_that_came_meanwhile_is_tested_where_it_is_needed() -> None:
    core = probed("a", "b", "c", min_nodes=3)
    core.feed(left("c"), 3.0)
    core.attach("c", at=3.5, incarnation=2)
    pair(core, at=5.0)
    assert core.seats() == []
    assert in_pairs(core) == list("abc")
    while in_pairs(core):
        pair(core, at=core.now + 1)
    assert core.seats() == list("abc")


def test_who_trained_does_not_wait_for_a_newcomer_s_tests() -> None:
    core = probed("a", "b")
    pair(core, at=3.0)
    spare(core)
    core.attach("c", at=4.0)
    core.feed(failed("a", 1, KILLED), 5.0)
    assert core.seats() == ["a", "b"]
    assert asked(core, "a", "b", "c") == [False, False, True]


@pytest.mark.parametrize(
    "fault",
    [
        LOST_GPU,
        failure(error_type="AcceleratorError", message="CUDA error: unspecified launch failure"),
        failure(error_type="RuntimeError", message="No CUDA GPUs are available"),
    ],
)
def test_what_may_be_a_machine_s_fault_has_its_node_tried_before_it_trains_again(
    fault: RankFailure,
) -> None:
    """Whoever pays for the restart."""
    core = probed("a", "b", min_nodes=2, max_restarts=1)
    pair(core, at=3.0)
    spare(core)
    core.feed(failed("b", 1, fault), 5.0)
    core.tick(8.0)
    assert core.seats() == []
    assert asked(core, "a", "b") == [False, True]
    answer(core, "b", at=9.0)
    assert in_pairs(core) == ["a", "b"]
    pair(core, at=10.0)
    assert core.seats() == ["a", "b"]


@pytest.mark.parametrize(("machine", "who", "probing"), [
    (False, ("b",), [False, False]), (True, ("b",), [False, True]), (True, (), [True, True]),
])  # fmt: skip
def test_a_hang_that_may_be_a_machine_s_fault_has_its_nodes_tried(
    machine: bool, who: tuple[str, ...], probing: list[bool]
) -> None:
    core = probed("a", "b", min_nodes=2)
    pair(core, at=3.0)
    spare(core)
    hung = ev.Hung(
        round=1, ranks=(1,) if who else (), nodes=tuple(map(NodeId, who)), place="", reason="it hangs", machine=machine
    )  # fmt: skip
    core.feed(hung, 9.0)
    assert asked(core, "a", "b") == probing
    assert bool(core.seats()) != machine


def test_the_others_wait_for_it_for_a_moment_only() -> None:
    core = probed("a", "b")
    pair(core, at=3.0)
    spare(core)
    core.feed(failed("b", 1, LOST_GPU), 5.0)
    assert core.seats() == []
    assert core.wake() == 5.0 + prechecks.HURRY
    core.tick(5.0 + prechecks.HURRY)
    assert core.seats() == ["a"]


def test_a_network_s_fault_without_another_cause_has_all_tried() -> None:
    core = probed("a", "b", min_nodes=2)
    pair(core, at=3.0)
    spare(core)
    core.feed(failed("b", 1, CLOSED), 5.0)
    core.tick(5.0 + core.policy.settle)
    assert "probing a, b: network" in core.reason()
    assert asked(core, "a", "b") == [True, True]
    answer(core, "a", at=9.0)
    answer(core, "b", at=9.0)
    pair(core, at=10.0)
    assert core.seats() == ["a", "b"]
    spare(core)
    core.feed(failed("b", 2, KILLED), 20.0)
    assert core.seats() == ["a", "b"], "the doubt is over"


def test_a_link_that_was_not_tested_before_is_once_the_network_fails() -> None:
    core = probed(*"abcd", min_nodes=3)
    assert {pairs(core, node).pairs for node in "abcd"} == {(("a", "b"),), (("c", "d"),)}
    pair(core, "a-c", at=3.0)
    spare(core)
    assert core.seats() == list("abcd")
    core.feed(failed("c", 1, CLOSED), 5.0)
    core.tick(5.0 + core.policy.settle)
    for node in "abcd":
        answer(core, node, at=9.0)
    while in_pairs(core):
        pair(core, "a-c", at=core.now + 1)
    core.tick(core.now + 2)
    (out,) = kept_out(core)
    assert core.job.checks[prechecks.where(core.job.nodes[NodeId(out)])].what.startswith(
        "the link between a and c: "
    )
    assert len(core.seats()) == 3


def test_of_few_nodes_all_meet_once_the_network_failed() -> None:
    core = probed(*"abcdef")
    pair(core, at=3.0)
    spare(core)
    core.feed(failed("a", 1, CLOSED), 10.0)
    core.tick(10.0 + core.policy.settle)
    for node in "abcdef":
        answer(core, node, at=16.0)
    met = set()
    while in_pairs(core):
        met |= {pair_ for node in in_pairs(core) for pair_ in pairs(core, node).pairs}
        spare(core)
        pair(core, at=core.now + 1)
    assert {tuple(sorted(pair_)) for pair_ in met} == set(combinations("abcdef", 2))


def test_nobody_goes_on_without_the_others_while_all_are_in_doubt() -> None:
    """One that has probed itself first is not one that could go on."""
    core = probed(*"abcd", min_nodes=2)
    while in_pairs(core):
        pair(core, at=core.now + 1)
    spare(core)
    core.feed(failed("b", 1, CLOSED), 10.0)
    core.tick(10.0 + core.policy.settle)
    since = core.now
    for node in "abc":
        answer(core, node, at=since + 5)
    core.tick(since + prechecks.HURRY + 1)
    assert in_pairs(core) == []
    answer(core, "d", at=since + 60)
    assert in_pairs(core) == list("abcd")


def test_who_is_in_doubt_joins_no_running_round_untested() -> None:
    core = probed("a", "b")
    pair(core, at=3.0)
    spare(core)
    core.feed(failed("b", 1, LOST_GPU), 5.0)
    core.tick(5.0 + prechecks.HURRY)
    assert core.seats() == ["a"]
    spare(core)
    answer(core, "b", at=30.0)
    assert in_pairs(core) == ["a", "b"]
    pair(core, at=31.0)
    assert core.seats() == ["a", "b"]


def test_who_failed_in_pairs_is_tried_in_pairs_before_it_trains() -> None:
    """By itself it works."""
    core = probed("a", "b", "c")
    while in_pairs(core):
        pair(core, "b", at=core.now + 1)
    core.tick(core.now + 2)
    spare(core)
    assert core.seats() == ["a", "c"]
    core.tick(core.policy.verdict_age + core.now)
    answer(core, "b", at=core.now + 1)
    assert in_pairs(core) == list("abc")
    while in_pairs(core):
        pair(core, "b", at=core.now + 1)
    core.tick(core.now + 2)
    assert (core.seats(), kept_out(core)) == (["a", "c"], ["b"])
    again = core.now
    core.tick(again + 1.9 * core.policy.verdict_age)
    assert asked(core, "b") == [False], "the others would stop for it, most likely for nothing"
    core.tick(again + 2 * core.policy.verdict_age)
    assert asked(core, "b") == [True]


def test_a_verdict_is_as_old_as_the_last_tests() -> None:
    """Alone or with others: neither in their midst nor after them is a node tried alone again."""
    core = begun("a", "b", "c", verdict_age=10.0)
    for node in "abc":
        answer(core, node, at=2.0)
    core.tick(60.0)
    assert asked(core, *"abc") == [False] * 3
    while in_pairs(core):
        pair(core, "b", at=core.now + 60)
    spare(core)
    assert core.seats() == ["a", "c"]
    assert asked(core, *"abc") == [False] * 3
    core.tick(core.now + 10.0)
    assert asked(core, *"abc") == [False, True, False]


def test_who_could_not_be_tried_while_it_trained_is_waited_for_as_long() -> None:
    core = probed("a", "b")
    pair(core, at=3.0)
    spare(core)
    doubted = ev.Doubted(round=1, checkpoint="/c", after=5, ranks=(1,), what="rank 1 differs")
    core.feed(doubted, 10.0)
    assert core.seats() == ["a", "b"]
    core.feed(failed("a", 1, KILLED), 200.0)
    core.tick(200.0 + core.policy.settle)
    assert core.seats() == []
    answer(core, "b", at=210.0)
    assert in_pairs(core) == ["a", "b"]


def test_whoever_is_named_for_the_same_step_is_tried_once() -> None:
    """Groups of replicas differ at once; and agents say it again and again."""
    core = probed("a", "b", "c")
    while in_pairs(core):
        pair(core, at=core.now + 1)
    spare(core)
    doubts = [
        ev.Doubted(round=1, checkpoint="/c", after=5, ranks=(rank,), what=f"rank {rank} differs")
        for rank in (1, 2)
    ]
    for doubted in (*doubts, *doubts):
        core.feed(doubted, 10.0)
    first, second = (seat for seat in core.seats()[1:])
    core.feed(failed(core.seats()[0], 1, KILLED), 20.0)
    assert asked(core, first, second) == [True, True]
    answer(core, first, at=25.0)
    answer(core, second, at=25.0)
    pair(core, at=26.0)
    for doubted in doubts:
        core.feed(doubted, 27.0)
    assert asked(core, *"abc") == [False] * 3


def test_time_that_tests_take_is_not_time_with_too_few_nodes() -> None:
    core = begun("a", "b", min_nodes=2, below_min_timeout=30.0)
    answer(core, "a", at=2.0)
    core.tick(5.0)
    answer(core, "b", at=6.0)
    while in_pairs(core):
        pair(core, "a-b", at=core.now + 20)
    core.tick(core.now + 1)
    assert core.exit_code() is None
    core.tick(core.now + 31.0)
    assert core.exit_code() == 1


def test_without_a_precheck_nothing_is_doubted() -> None:
    core = Core(replace(begun("a", "b").policy, precheck="off"))
    core.attach("a", "b", at=0.0)
    core.tick(2.0)
    spare(core)
    core.feed(failed("b", 1, LOST_GPU), 5.0)
    core.tick(8.0)
    assert core.seats() == ["a", "b"]
    assert core.job.checks == {}


def test_a_master_that_takes_over_goes_on_with_the_tests() -> None:
    core = probed("a", "b")
    before = core.job.trial
    assert before is not None
    core.feed(ev.MasterStarted("job", policy=core.policy), 3.0)
    assert core.job.trial == replace(before, until=before.until + 1.0)
    core.attach("a", "b", at=4.0)
    pair(core, at=5.0)
    assert core.seats() == ["a", "b"]


def test_who_could_not_answer_as_the_master_was_away_has_failed_nothing() -> None:
    core = probed(*"abcd")
    pair(core, "d", at=4.0)
    assert in_pairs(core) == list("abcd")
    core.feed(ev.MasterStarted("job", policy=core.policy), 500.0)
    core.attach(*"abcd", at=501.0)
    while in_pairs(core):
        pair(core, at=core.now + 1)
    core.tick(core.now + 2)
    assert (core.seats(), kept_out(core)) == (list("abcd"), [])


def test_who_answered_while_the_master_stood_still_has_failed_nothing() -> None:
    core = probed(*"abcd")
    pair(core, "d", at=4.0)
    core.feed(ev.Stalled(), 500.0)
    core.tick(500.0)
    assert in_pairs(core) == list("abcd")
    while in_pairs(core):
        pair(core, at=core.now + 1)
    core.tick(core.now + 2)
    assert (core.seats(), kept_out(core)) == (list("abcd"), [])


def test_who_cannot_be_heard_has_failed_nothing() -> None:
    core = probed(*"abcd")
    pair(core, "d", at=4.0)
    core.feed(detached("c"), 5.0)
    core.feed(detached("d"), 5.0)
    pair(core, at=6.0, silent="cd")
    wake = core.job.trial.until if core.job.trial else 0.0
    while core.now < wake:  # both live, as knocks tell
        core.feed(knocked("c", KnockAnswer.ALIVE), min(core.now + 5, wake))
        core.feed(knocked("d", KnockAnswer.ALIVE))
    core.tick(wake)
    core.attach("c", "d", at=wake + 1)
    assert kept_out(core) == []


def test_one_that_wants_no_tests_ends_them() -> None:
    core = probed("a", "b")
    core.policy = replace(core.policy, precheck="off")
    core.feed(ev.MasterStarted("job", policy=core.policy), 3.0)
    core.attach("a", "b", at=4.0)
    assert core.seats() == ["a", "b"]

"""Who is alive, and until when that is believed."""

from dataclasses import replace
from typing import Any

import pytest

from elastic.master import nodes as registry
from elastic.master.events import KnockAnswer, NodeId
from elastic.master.nodes import Node, NodeState
from elastic.master.policy import Policy
from tests.master.builders import attachment

POLICY = Policy(lease=5.0, agent_restart=3.0, settle=1.0)
A = NodeId("a")


def attached(now: float = 0.0, **more: Any) -> Node:
    return registry.attach({}, (), (attachment("a", **more),), now)[0][A]


def test_an_attached_node_has_no_deadline() -> None:
    node = attached()
    assert node.deadline(POLICY) is node.awaited(POLICY, 0.0) is node.knock_due(POLICY) is None
    assert registry.next_deadline({A: node}, POLICY) is None


def knocked(node: Node, answer: KnockAnswer, now: float) -> Node:
    found = registry.knocked(node, answer, now)
    assert found is not None
    return found


def test_silence_counts_once_two_knocks_went_unanswered() -> None:
    node = registry.silent(attached(), 10.0, asked=True)
    assert node.deadline(POLICY) is None
    node = knocked(node, KnockAnswer.SILENT, 11.0)
    assert node.deadline(POLICY) is None, "one may be lost on the way"
    node = knocked(node, KnockAnswer.SILENT, 13.0)
    assert node.deadline(POLICY) == 15.0
    node = knocked(node, KnockAnswer.ALIVE, 14.0)
    assert node.deadline(POLICY) is None
    for at in (15.0, 16.0):
        node = knocked(node, KnockAnswer.SILENT, at)
    assert node.deadline(POLICY) == 19.0
    assert knocked(node, KnockAnswer.SILENT, 17.0) is node
    again = registry.silent_anew({A: node}, 18.0)[A]
    assert again.deadline(POLICY) is None, "the master stood still"


def test_a_round_waits_for_who_may_come_back() -> None:
    node = registry.silent(attached(), 10.0, asked=True)
    assert node.awaited(POLICY, 10.0) == 15.0
    assert node.awaited(POLICY, 20.0) == 21.0, "nobody has heard yet what a knock says"
    alive = knocked(node, KnockAnswer.ALIVE, 14.0)
    assert alive.awaited(POLICY, 20.0) == 15.0, "it answers, and may still never attach"
    for at in (11.0, 13.0):
        node = knocked(node, KnockAnswer.SILENT, at)
    assert node.awaited(POLICY, 20.0) == 15.0


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (KnockAnswer.ALIVE, NodeState.UNREACHABLE),
        (KnockAnswer.SILENT, NodeState.UNREACHABLE),
        (KnockAnswer.RESTARTING, NodeState.RESTARTING),
        (KnockAnswer.GONE, None),
    ],
)
def test_what_an_answer_says(answer: KnockAnswer, state: NodeState | None) -> None:
    node = registry.silent(attached(), 10.0, asked=True)
    heard = registry.knocked(node, answer, 11.0)
    assert (heard.state if heard else None) is state
    here = attached()
    assert registry.knocked(here, answer, 11.0) is here, "an old answer says nothing of it"


def test_a_restarting_agent_has_so_long_and_no_longer() -> None:
    node = registry.knocked(
        registry.silent(attached(), 10.0, asked=True), KnockAnswer.RESTARTING, 11.0
    )
    assert node is not None
    assert node.deadline(POLICY) == 14.0
    assert node.awaited(POLICY, 12.0) is None, "no round is held up by it"
    assert registry.knocked(node, KnockAnswer.ALIVE, 13.0) is node
    assert not registry.expired({A: node}, 13.9, POLICY)
    assert registry.expired({A: node}, 14.0, POLICY) == (node,)


@pytest.mark.parametrize(("silent", "limit"), [(1, 5.0), (2, 5.0), (3, 30.0), (4, 30.0)])
def test_where_most_fall_silent_they_get_longer(silent: int, limit: float) -> None:
    table, _ = registry.attach({}, (), tuple(map(attachment, "abcd")), 0.0)
    for key in list(table)[:silent]:
        away = registry.silent(table[key], 10.0, asked=True)
        table[key] = replace(away, unanswered=registry.SILENT_KNOCKS)
    found = registry.patient(table, 10.0, POLICY)
    assert not registry.expired(found, 10.0 + limit - 0.1, POLICY)
    assert len(registry.expired(found, 10.0 + limit, POLICY)) == silent
    assert registry.next_deadline(found, POLICY) == 10.0 + limit
    assert registry.patient(found, 20.0, POLICY) is found


def test_once_most_are_back_the_others_are_soon_lost() -> None:
    table, _ = registry.attach({}, (), tuple(map(attachment, "abcd")), 0.0)
    away = {key: registry.silent(node, 10.0, asked=True) for key, node in table.items()}
    away = {**registry.patient(away, 10.0, POLICY)}
    for at in (11.0, 13.0):
        away[A] = knocked(away[A], KnockAnswer.SILENT, at)
    assert away[A].deadline(POLICY) == 40.0
    back, _ = registry.attach(away, (), tuple(map(attachment, "bcd")), 20.0)
    left = {**registry.patient(back, 20.0, POLICY)}
    assert left[A].deadline(POLICY) is None, "it is to be heard any moment"
    for at in (21.0, 23.0):
        left[A] = knocked(left[A], KnockAnswer.SILENT, at)
    assert registry.expired(left, 23.0, POLICY) == (left[A],)
    more = {key: registry.silent(left[key], 24.0, asked=True) for key in left if key != A}
    found = registry.patient({**left, **more}, 24.0, POLICY)
    assert not found[A].with_most, "it was silent before them"


def test_a_node_that_nobody_knocked_at_is_knocked_at_before_it_is_lost() -> None:
    node = registry.silent(attached(), 10.0, asked=False)
    assert registry.next_deadline({A: node}, POLICY) == 11.0
    assert registry.to_knock_at({A: node}, 11.0, POLICY) == (node,)


def test_another_life_of_its_agent_is_a_newcomer_and_drains_on() -> None:
    node = attached(1.0)
    table = {A: replace(node, draining=True)}
    again = registry.attach(table, (), (attachment("a", 2),), 50.0)[0][A]
    assert (again.joined, again.draining, again.incarnation) == (50.0, True, 2)


def test_a_store_is_offered_once() -> None:
    node = attached(store="a:1")
    used = registry.take_store(node)
    assert used.store == ""
    assert registry.with_store(used, "a:1") is used
    assert registry.with_store(used, "") is used
    fresh = registry.with_store(used, "a:2")
    assert fresh.store == "a:2"
    back = registry.attach({A: used}, (), (attachment("a", store="a:1"),), 1.0)[0][A]
    assert back.store == ""
    new_life = registry.attach({A: used}, (), (attachment("a", 2, store="a:1"),), 1.0)[0][A]
    assert new_life.store == "a:1"
    assert registry.with_store(fresh, "").store == ""


def test_a_store_that_a_round_took_is_known_when_its_node_was_lost_in_between() -> None:
    used = registry.take_store(attached(store="a:1"))
    spent = registry.spend((), (used,))
    table, _ = registry.attach({}, spent, (attachment("a", store="a:1"),), 9.0)
    assert table[A].store == "", "it never heard of that round"
    table, _ = registry.attach({}, spent, (attachment("a", 2, store="a:1"),), 9.0)
    assert table[A].store == "a:1", "another life's is another store"
    assert len(registry.spend(spent * 1000, (used,))) == registry.KEEP_SPENT

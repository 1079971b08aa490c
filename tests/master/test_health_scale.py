"""What a suspicion takes with thousands of nodes: decisions, not seconds, are counted."""

import asyncio

import pytest

from elastic.master import hangs
from elastic.master.hangs import Decision, Facts, State
from elastic.master.policy import Policy
from tests.master.serving import within
from tests.master.thousands import Thousands

NODES = 10_000
QUIET = 0.5
"""Seconds, of a patience of 1.2, at whose 0.4 ranks are looked at."""


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """Those made so far."""
    made: list[Decision] = []
    decide = hangs.decide

    def noted(state: State, facts: Facts, now: float, policy: Policy) -> Decision:
        made.append(decide(state, facts, now, policy))
        return made[-1]

    monkeypatch.setattr(hangs, "decide", noted)
    return made


@within(120)
async def test_thousands_become_quiet_by_one_decision_and_go_on_by_another(
    decisions: list[Decision],
) -> None:
    job = Thousands(NODES, 1)
    decisions.clear()
    for number in range(NODES):
        job.beat(number, QUIET)
        job.shell.time += 1e-4
    assert [bool(one.state.suspicion) for one in decisions] == [True]
    assert all(node.orders.qsize() == 1 for node in job.nodes)
    for number in range(NODES):
        job.beat(number)
    assert [bool(one.state.suspicion) for one in decisions] == [True, False]


@within(120)
async def test_who_was_quiet_before_all_others_and_tells_it_late_is_heard(
    decisions: list[Decision],
) -> None:
    """What is due comes sooner by that."""
    job = Thousands(3, 1)
    decisions.clear()
    for number, quiet in enumerate((QUIET, QUIET + 0.2, QUIET + 0.1)):
        job.beat(number, quiet)
    assert len(decisions) == 2


@within(120)
async def test_the_look_at_thousands_names_the_one_that_loops() -> None:
    job = Thousands(NODES, 1)
    looks = [job.looks(number, loops=777) for number in range(NODES)]
    for number in range(NODES):
        job.beat(number, QUIET)

    async def answer() -> None:
        while True:
            for number, order in enumerate(await job.orders()):
                job.answer(number, looks[number], order)
                job.shell.time += (hangs.ANSWER + 1.0) / NODES

    answering = asyncio.create_task(answer())
    hung = await job.shell.hung.get()
    assert (hung.ranks, hung.nodes) == ((777,), ("n777",))
    assert hung.reason.count("; 9999 of 9999 others: all_reduce") == 1
    answering.cancel()


@within(120)
async def test_who_is_always_a_look_behind_is_named_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hangs, "ANSWER", 0.05)
    job = Thousands(3, 1)
    job.beat(2, QUIET)

    async def answer() -> None:
        behind: list[int] = []
        while True:
            *orders, last = await job.orders()
            job.shell.time += 0.5
            for late in behind:
                job.answer(2, job.looks(2, loops=2), late)
            for number, order in enumerate(orders):
                job.answer(number, job.looks(number, loops=2), order)
            behind = [last]

    answering = asyncio.create_task(answer())
    assert (await job.shell.hung.get()).ranks == (2,)
    answering.cancel()

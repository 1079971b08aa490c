"""Where the seconds went."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.master import ledger as books
from elastic.master.ledger import START, Ledger


def total(ledger: Ledger) -> float:
    return ledger.productive + sum(ledger.lost.values())


def test_a_life() -> None:
    ledger = books.progressed(Ledger(), 1, 10.0)
    ledger = books.progressed(ledger, 20, 30.0)
    ledger = books.interrupted(ledger, "killed", "rank 1", 31.0)
    ledger = books.progressed(ledger, 19, 35.0)
    ledger = books.progressed(ledger, 20, 36.0)
    ledger = books.progressed(ledger, 21, 37.0)
    ledger = books.closed(ledger, 40.0)
    assert ledger.lost == {START: 10.0, "killed": 6.0}, "the cut step, the stop, the step again"
    assert ledger.productive == 24.0
    (record,) = ledger.interruptions
    assert (record.at, record.downtime, record.step_before, record.step_after) == (31, 4, 20, 19)
    assert ledger.restarts == {"killed": 1}
    assert books.goodput(ledger) == 0.6


def test_a_script_that_tells_no_steps() -> None:
    ledger = books.progressed(Ledger(), 0, 10.0)
    ledger = books.interrupted(ledger, "killed", "", 100.0)
    ledger = books.progressed(ledger, 0, 105.0)
    ledger = books.closed(ledger, 205.0)
    assert ledger.productive == 190.0
    assert ledger.lost == {START: 10.0, "killed": 5.0}


def test_a_sign_of_life_is_no_new_ground_where_steps_are_told() -> None:
    ledger = books.progressed(Ledger(), 100, 10.0)
    ledger = books.interrupted(ledger, "killed", "", 20.0)
    ledger = books.progressed(ledger, 0, 25.0)
    assert ledger.cause == "killed"
    assert ledger.interruptions[-1].downtime == 5.0
    ledger = books.progressed(ledger, 101, 60.0)
    assert ledger.cause == ""


def test_two_interruptions_without_a_step_between() -> None:
    ledger = books.progressed(Ledger(), 5, 10.0)
    ledger = books.interrupted(ledger, "killed", "", 12.0)
    ledger = books.interrupted(ledger, "node lost", "", 15.0)
    ledger = books.progressed(ledger, 6, 20.0)
    assert ledger.lost == {START: 10.0, "killed": 5.0, "node lost": 5.0}
    assert [(i.downtime, i.step_after) for i in ledger.interruptions] == [(8.0, 6), (5.0, 6)]


def test_the_end_of_a_failure_is_lost_and_of_a_success_is_not() -> None:
    ledger = books.progressed(Ledger(), 5, 10.0)
    assert books.closed(ledger, 13.0).productive == 3.0
    assert books.closed(ledger, 13.0, "script error").lost["script error"] == 3.0


def test_only_the_last_interruptions_are_kept_one_by_one() -> None:
    ledger = Ledger()
    for second in range(300):
        ledger = books.interrupted(ledger, "killed", str(second), float(second))
    assert len(ledger.interruptions) == books.KEEP
    assert ledger.interruptions[-1].reason == "299"
    assert ledger.restarts == {"killed": 300}


def test_nothing_yet() -> None:
    assert books.goodput(Ledger()) == 0.0


steps = st.tuples(
    st.floats(-5, 100), st.sampled_from(["step", "again", "silent", "killed", "lost"])
)


@given(st.lists(steps, max_size=40))
def test_seconds_add_up(history: list[tuple[float, str]]) -> None:
    ledger, now, latest, step = Ledger(), 0.0, 0.0, 0
    for gap, what in history:
        now = max(0.0, now + gap)
        latest = max(latest, now)
        if what == "step":
            step = ledger.step + 1
            ledger = books.progressed(ledger, step, now)
        elif what == "again":
            ledger = books.progressed(ledger, max(1, ledger.step - 3), now)
        elif what == "silent":
            ledger = books.progressed(ledger, 0, now)
        else:
            ledger = books.interrupted(ledger, what, "", now)
    ledger = books.closed(ledger, latest)
    assert total(ledger) == pytest.approx(latest)
    assert min([ledger.productive, *ledger.lost.values()]) >= 0

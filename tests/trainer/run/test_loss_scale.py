"""The loss scale moves as Megatron's does, and goes on from a checkpoint where it was."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.trainer.run.loss_scale import LossScale, Policy, State, after, first

POLICY = Policy(initial=16.0, least=2.0, window=3, hysteresis=2)


def run(overflows: list[bool], policy: Policy = POLICY) -> list[State]:
    """The state before each step, and at the end."""
    states = [first(policy)]
    for overflowed in overflows:
        states.append(after(states[-1], policy, overflowed=overflowed))
    return states


def scales(marks: str, policy: Policy = POLICY) -> list[float]:
    """The scale after each step; x: one that overflows."""
    return [state.scale for state in run([mark == "x" for mark in marks], policy)[1:]]


def test_it_falls_with_the_second_overflow_and_with_each_one_after_that() -> None:
    assert scales("x.xx") == [16, 16, 8, 4]


def test_it_grows_after_a_window_without_overflow_and_forgives_again() -> None:
    assert scales("xx...x") == [16, 8, 8, 8, 16, 16]
    assert scales("xx..x..") == [16, 8, 8, 8, 4, 4, 4], "the window starts anew"


def test_a_window_that_was_made_shorter_than_what_is_clean_ends_at_once() -> None:
    state = State(16.0, 700, 2)
    assert after(state, POLICY, overflowed=False) == State(32.0, 0, POLICY.hysteresis)


def test_it_does_not_fall_below_the_least() -> None:
    assert scales("xxxxxx")[-1] == 2


def test_a_fixed_one_stays() -> None:
    fixed = Policy(initial=8.0, window=None)
    assert set(scales("xx...xxx", fixed)) == {8}
    dynamic, scale = LossScale(POLICY), LossScale(fixed)
    scale.state.copy_(dynamic.state)
    assert scale.value == 8, "whatever the run had before it was started with another argument"


@pytest.mark.parametrize(
    ("policy", "stuck"),
    [(POLICY, [0, 0, 0, 0, 1, 2, 0, 1]), (Policy(initial=8.0, window=None), [1, 2, 3, 4, 5, 6, 0, 1])],
)  # fmt: skip
def test_it_counts_overflows_in_a_row_that_nothing_can_be_done_about(
    policy: Policy, stuck: list[int]
) -> None:
    scale, found = LossScale(policy), []
    for mark in "xxxxxx.x":
        scale.update(torch.tensor(math.inf if mark == "x" else 1.0))
        found.append(scale.stuck)
    assert found == stuck


def test_defaults_are_megatrons() -> None:
    assert run([True, True], Policy()) == [(2**32, 0, 2), (2**32, 0, 1), (2**31, 0, 0)]


@given(overflows=st.lists(st.booleans(), max_size=40), cut=st.integers(0, 40))
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(
    overflows: list[bool], cut: int
) -> None:
    norms = [torch.tensor(float("nan") if overflowed else 1.0) for overflowed in overflows]
    one, other = LossScale(POLICY), LossScale(POLICY)
    taken = [one.update(norm) for norm in norms[:cut]]
    other.state.copy_(one.state)
    taken += [other.update(norm) for norm in norms[cut:]]
    assert taken == [not overflowed for overflowed in overflows]
    assert State(*other.state.tolist()) == run(overflows)[-1]
    assert other.value == run(overflows)[-1].scale

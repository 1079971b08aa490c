"""The guard, alone and in a run whose losses are a function of its samples."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data import Skips
from elastic.proto.errors import UsageError
from elastic.trainer.arguments.guard import GuardFlags
from elastic.trainer.watch.guard import (
    Seen,
    State,
    Verdict,
    begun,
    from_json,
    gone_back,
    judge,
    to_json,
)

FLAGS = GuardFlags(guard="rollback", guard_window=32, guard_warmup=16, guard_patience=2)
BATCH = 8


def noisy(iteration: int) -> float:
    """A falling loss with noise."""
    return 2 + 3 * math.exp(-iteration / 60) + random.Random(iteration).gauss(0, 0.02)


def seen(iteration: int, loss: float, norm: float | None = 1.0) -> Seen:
    places = ((iteration - 1) * BATCH, iteration * BATCH)
    return Seen(iteration=iteration, places=places, loss=loss, grad_norm=norm)


def verdicts(
    losses: list[float], flags: GuardFlags, norms: Callable[[int], float] = lambda _: 1.0
) -> list[Verdict]:
    state, found = State(), []
    for iteration, loss in enumerate(losses, 1):
        state, verdict = judge(state, seen(iteration, loss, norms(iteration)), flags)
        found += [verdict] if verdict else []
    return found


def test_a_bad_batch_is_told_in_its_own_step() -> None:
    losses = [noisy(i) for i in range(1, 101)]
    assert verdicts(losses, FLAGS) == []
    losses[79] += 1.0
    (verdict,) = verdicts(losses, FLAGS)
    assert (verdict.iteration, verdict.what, verdict.action) == (80, "spike", "warn")
    assert verdict.value == losses[79] > verdict.bound > losses[78]
    assert str(verdict) == f"iteration 80: lm loss {losses[79]:.6g} is above {verdict.bound:.6g}"


@pytest.mark.parametrize("mode", ["off", "warn", "rollback"])
def test_a_run_goes_back_behind_nothing_that_it_has_loaded(
    mode: Literal["off", "warn", "rollback"],
) -> None:
    """A checkpoint of an odd step, as of a run that ended in one: what comes is saved, and counts from there."""
    loaded = State(bad=(80, 640), streak=2, holds=True, tries=1)
    state = begun(loaded, replace(FLAGS, guard=mode))
    assert not state.holds
    assert (state.bad, state.streak) == (((80, 640), 2) if mode == "warn" else (None, 0))
    assert state.tries == (0 if mode == "off" else 1)


def test_what_came_before_a_run_without_a_guard_says_nothing_of_what_comes_after_it() -> None:
    """Hundreds of steps later the loss is another."""
    loaded = State(losses=(8.4,) * 80, norms=(0.0,) * 80, steps=300, skips=Skips(ranges=((8, 16),)))
    between = begun(loaded, replace(FLAGS, guard="off"))
    assert begun(between, FLAGS) == State(skips=loaded.skips)


def test_samples_seen_before_fall_suddenly() -> None:
    losses = [noisy(i) - (0.8 if i > 80 else 0) for i in range(1, 101)]
    first, back = verdicts(losses, FLAGS)[:2]
    assert (first.iteration, first.what, first.action) == (81, "fall", "warn")
    assert (back.iteration, back.action, back.restore, back.skip) == (
        82,
        "rollback",
        80,
        (640, 656),
    )
    assert str(back).endswith("going back to iteration 80 and leaving out 16 samples from 640 on")


@pytest.mark.parametrize(("norm", "what"), [(30.0, "spike"), (0.0, "fall")])
def test_odd_gradient_norms(norm: float, what: str) -> None:
    losses = [noisy(i) for i in range(1, 101)]
    (verdict,) = verdicts(losses, FLAGS, lambda i: norm if i == 70 else 1 + 0.1 * math.sin(i))
    assert (verdict.iteration, verdict.metric, verdict.what) == (70, "grad norm", what)
    assert (verdict.value > verdict.bound) == (what == "spike")


@pytest.mark.parametrize("slope", [0.01, -0.01])
def test_slow_drifts_are_followed(slope: float) -> None:
    losses = [5 + slope * i + random.Random(i).gauss(0, 0.005) for i in range(1, 301)]
    assert verdicts(losses, FLAGS) == []


def test_a_lasting_change_is_told_once_and_then_accepted() -> None:
    losses = [3.0] * 60 + [4.0] * 60
    flags = replace(FLAGS, guard="warn")
    assert [one.iteration for one in verdicts(losses, flags)] == [61]
    assert [one.iteration for one in verdicts([*losses, 3.0], flags)] == [61, 121]


def test_nan_in_the_first_step_goes_back_to_the_beginning_and_in_the_end_stops() -> None:
    """Nothing is waited for; where it is not the data, all is not skipped."""
    state, actions = State(), []
    for _ in range(4):
        place = state.skips.place(0)
        one = Seen(iteration=1, places=(place, place + BATCH), loss=math.nan)
        state, verdict = judge(state, one, FLAGS)
        assert verdict
        actions.append((verdict.action, verdict.restore, verdict.skip))
        state = gone_back(State(), state, verdict, FLAGS)
    assert actions[:3] == [("rollback", 0, (n * BATCH, (n + 1) * BATCH)) for n in range(3)]
    assert actions[3] == ("stop", None, None)
    assert state.skips.ranges == ((0, 24),)
    assert "nan is not finite, and going back has not helped" in str(verdict)


def test_what_is_not_judged() -> None:
    idle = replace(seen(3, math.inf, math.nan), idle=True)
    assert judge(State(), idle, FLAGS) == (State(), None)
    assert judge(State(), seen(3, math.nan), GuardFlags()) == (State(), None)
    early = [5.0] * 8 + [50.0] + [5.0] * 3
    assert verdicts(early, FLAGS) == []


def test_what_a_later_version_saved_besides_is_passed_over() -> None:
    state, _ = judge(State(), seen(1, 2.0), FLAGS)
    assert from_json(to_json(state) | {"later": 1}) == state


NUMBERS = st.one_of(st.floats(0, 20), st.sampled_from([math.nan, math.inf, 1e300]))


@settings(max_examples=50, deadline=None)
@given(losses=st.lists(NUMBERS, max_size=60), cut=st.integers(0, 60), norm=NUMBERS)
def test_a_state_that_was_saved_judges_alike(losses: list[float], cut: int, norm: float) -> None:
    state = other = State()
    for iteration, loss in enumerate(losses, 1):
        if iteration == cut:
            other = from_json(json.loads(json.dumps(to_json(other), allow_nan=False)))
            assert other == state
        one = seen(iteration, loss, norm)
        state, mine = judge(state, one, FLAGS)
        other, theirs = judge(other, one, FLAGS)
        assert (other, repr(theirs)) == (state, repr(mine))  # repr: NaN is not itself
        assert len(state.losses) <= FLAGS.guard_window


def run(bad: set[int], kills: set[int], steps: int) -> tuple[State, list[tuple[int, int]]]:
    """Train `steps` steps; samples at the places in `bad` spoil every step that has one.

    kills: steps, counted from the start of the process, after which the run is lost and restored.
    Returns the guard's state, and the places of each step that is part of the run.
    """
    saved = {0: State()}
    taken: dict[int, tuple[int, int]] = {}
    state, iteration, made = State(), 0, 0
    while iteration < steps:
        iteration, made = iteration + 1, made + 1
        first = state.skips.place((iteration - 1) * BATCH)
        end = state.skips.place(iteration * BATCH - 1) + 1
        spoiled = bool(
            bad & set(state.skips.places(np.arange(iteration * BATCH))[-BATCH:].tolist())
        )
        one = Seen(
            iteration=iteration, places=(first, end), loss=9.0 if spoiled else noisy(iteration)
        )
        state, verdict = judge(state, one, FLAGS)
        taken[iteration] = (first, end)
        if verdict and verdict.action == "rollback":
            assert verdict.restore == max(saved), "the newest checkpoint is the last good one"
            iteration = verdict.restore
            state = gone_back(saved[iteration], state, verdict, FLAGS)
            continue
        assert verdict is None or verdict.action == "warn"
        if not state.holds:
            saved[iteration] = state
        if made in kills:
            iteration = max(saved)
            state = from_json(to_json(saved[iteration]))
    return state, [taken[number] for number in range(1, steps + 1)]


@settings(max_examples=30, deadline=None)
@given(
    start=st.integers(20 * BATCH, 30 * BATCH),
    width=st.integers(BATCH + 1, 4 * BATCH),
    kills=st.sets(st.integers(1, 50), max_size=5),
)
def test_bad_data_is_left_out_and_kills_change_nothing(
    start: int, width: int, kills: set[int]
) -> None:
    bad = set(range(start, start + width))
    quiet, taken = run(bad, set(), 40)
    killed, same = run(bad, kills, 40)
    assert (killed.skips, same) == (quiet.skips, taken)
    left_out = {place for first, end in quiet.skips.ranges for place in range(first, end)}
    assert len(bad - left_out) <= BATCH, "what spoils two steps in a row is not read again"
    assert len(left_out - bad) <= 2 * BATCH, "and little else is lost"


def test_flags_that_fit_nothing() -> None:
    with pytest.raises(UsageError, match="--guard-window is at least 16"):
        GuardFlags(guard_window=3)
    with pytest.raises(UsageError, match="--guard-fall is above 0"):
        GuardFlags(guard_fall=0)
    with pytest.raises(UsageError, match="--guard-patience"):
        GuardFlags(guard_patience=0)

"""Schedules against formulas that are written down here once more, from Megatron's documentation."""

import math
from fractions import Fraction
from itertools import pairwise, product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.schedules import (
    BatchSizes,
    DecayStyle,
    IncrementStyle,
    LearningRate,
    WeightDecay,
    WsdStyle,
)

STAGES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=5).map(
    lambda parts: tuple((sum(w for w, _ in parts[:i]), batch) for i, (_, batch) in enumerate(parts))
)
"""From (width, batch) of each stage."""


def test_megatrons_example_ramps_by_16_each_61677_samples() -> None:
    sizes = BatchSizes.ramp(16, 16, 5_859_375, batch=1536)
    table = {0: 16, 61_677: 16, 61_678: 32, 2_960_526: 768, 2_960_527: 784, 5_859_374: 1520}
    assert {consumed: sizes.at(consumed) for consumed in table} == table
    assert [sizes.at(consumed) for consumed in (5_859_375, 5_859_376, 10**9)] == [1536] * 3


@given(st.data(), st.integers(1, 30), st.integers(1, 9), st.integers(1, 40))
def test_a_ramp_is_megatrons_formula(
    data: st.DataObject, start: int, increment: int, increments: int
) -> None:
    samples = data.draw(st.integers(1, 300))
    batch = start + increment * increments
    sizes = BatchSizes.ramp(start, increment, samples, batch=batch)
    for consumed in range(samples + 3):
        parts = batch if consumed > samples else int(consumed / (samples / increments))
        assert sizes.at(consumed) == min(batch, start + increment * parts), consumed
    assert all(before < after for (before, _), (after, _) in pairwise(sizes.stages))


def test_a_step_schedule_counts_tokens() -> None:
    sizes = BatchSizes.stepwise("0:16, 2.4B:320 1T:1.5k", seq_length=2048)
    assert sizes.stages == ((0, 16), (1_171_875, 320), (488_281_250, 1500))
    assert [sizes.at(n) for n in (0, 1_171_874, 1_171_875, 10**12)] == [16, 16, 320, 1500]
    assert sizes.largest == 1500
    assert BatchSizes.stepwise("1e3:8 0:4", seq_length=10).stages == ((0, 4), (100, 8))


@given(STAGES, st.integers(0, 120))
def test_steps_and_samples_are_what_counting_gives(
    stages: tuple[tuple[int, int], ...], steps: int
) -> None:
    sizes = BatchSizes(stages=stages)
    consumed = 0
    for step in range(steps):
        assert sizes.consumed(step) == consumed
        batch = sizes.at(consumed)
        assert {sizes.steps(consumed + more) for more in range(batch)} == {step}
        consumed += batch
    assert (sizes.consumed(steps), sizes.steps(consumed)) == (consumed, steps)


def test_a_run_of_any_length_is_reckoned_at_once() -> None:
    sizes = BatchSizes.ramp(16, 16, 5_859_375, batch=1536)
    assert sizes.steps(sizes.consumed(10**15)) == 10**15
    assert BatchSizes.constant(3).consumed(10**18) == 3 * 10**18


LR, MIN_LR = 6e-4, 6e-5


def megatron_lr(
    style: str, wsd_style: str, n: int, *, init: float, warmup: Fraction, decay: int, wsd: int
) -> float:
    """After n of `decay` samples: what Megatron's scheduler sets, of exact fractions."""
    if warmup > 0 and n <= warmup:
        return init + (LR - init) * float(n / warmup)
    if style == "constant":
        return LR
    if n > decay:
        return MIN_LR
    if style == "inverse-square-root":
        return max(MIN_LR, LR * math.sqrt(max(1.0, float(warmup))) / math.sqrt(max(n, 1)))
    x = float((n - warmup) / (decay - warmup))
    if style == "WSD":
        style = wsd_style
        x = float(Fraction(n - decay + wsd, wsd)) if n > decay - wsd else 0.0
    coefficient = {
        "linear": 1 - x,
        "cosine": math.cos(math.pi * x / 2) ** 2,
        "exponential": math.exp2(1 - x) - 1,
        "minus_sqrt": 1 - math.sqrt(x),
    }
    return MIN_LR + (LR - MIN_LR) * coefficient[style]


@given(
    n=st.integers(0, 1100),
    sevenths=st.integers(0, 7 * 900),
    wsd=st.integers(0, 1000),
    init=st.sampled_from([0.0, 1e-5]),
)
def test_the_learning_rate_is_megatrons(n: int, sevenths: int, wsd: int, init: float) -> None:
    warmup = Fraction(sevenths, 7)
    for style, wsd_style in product(get_args(DecayStyle), get_args(WsdStyle)):
        rate = LearningRate(
            lr=LR,
            min_lr=MIN_LR,
            init_lr=init,
            warmup=float(warmup),
            decay=1000,
            style=style,
            wsd_decay=wsd,
            wsd_style=wsd_style,
        )
        wanted = megatron_lr(style, wsd_style, n, init=init, warmup=warmup, decay=1000, wsd=wsd)
        assert rate.at(n) == pytest.approx(wanted, rel=1e-12, abs=1e-16), (style, wsd_style)


@given(style=st.sampled_from(get_args(IncrementStyle)), n=st.integers(0, 1200))
def test_weight_decay_is_megatrons(style: IncrementStyle, n: int) -> None:
    start = 0.1 if style == "constant" else 0.01
    decay = WeightDecay(start=start, end=0.1, samples=1000, style=style)
    x = min(1.0, n / 1000)
    part = {"constant": 1.0, "linear": x, "cosine": math.sin(math.pi * x / 2) ** 2}[style]
    assert decay.at(n) == pytest.approx(start + (0.1 - start) * part, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: BatchSizes.constant(0), "--global-batch-size"),
        (lambda: BatchSizes.ramp(16, 16, 0, batch=32), "at least 1"),
        (lambda: BatchSizes.ramp(32, 16, 100, batch=32), "leave it out"),
        (lambda: BatchSizes.ramp(16, 10, 100, batch=32), "divides 16"),
        (lambda: BatchSizes.stepwise("", seq_length=8), "does not begin at 0"),
        (lambda: BatchSizes.stepwise("1K:16", seq_length=8), "does not begin at 0"),
        (lambda: BatchSizes.stepwise("0:16 5", seq_length=8), "5 is not TOKENS:BATCH"),
        (lambda: BatchSizes.stepwise("0:16 5Q:32", seq_length=8), "5Q is no number"),
        (lambda: BatchSizes.stepwise("0:16 -5:32", seq_length=8), "-5 is no number"),
        (lambda: BatchSizes.stepwise("0:16 nanK:32", seq_length=8), "nanK is no number"),
        (lambda: BatchSizes.stepwise("0:16 64:", seq_length=8), "is no number"),
        (lambda: BatchSizes.stepwise("0:16 64:0.5", seq_length=8), "at least 1 sample"),
        (lambda: BatchSizes.stepwise("0:16 7:32", seq_length=8), "move them apart"),
        (lambda: LearningRate(lr=1.0, min_lr=2.0, decay=9), "--min-lr 2.0"),
        (lambda: LearningRate(lr=math.nan, decay=9), "--lr nan"),
        (lambda: LearningRate(lr=1.0, init_lr=2.0, decay=9), "--lr-warmup-init 2.0"),
        (lambda: LearningRate(lr=1.0, warmup=9, decay=9), "shorten --lr-warmup"),
        (lambda: LearningRate(lr=1.0, decay=9, wsd_decay=10), "--lr-wsd-decay"),
        (lambda: LearningRate(lr=1.0, decay=9, style="wavy"), "--lr-decay-style wavy: .*WSD"),  # type: ignore[arg-type]
        (lambda: WeightDecay(start=0.2, end=0.1, samples=9), "--start-weight-decay"),
    ],
)
def test_what_makes_no_schedule_is_said(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=why):
        make()

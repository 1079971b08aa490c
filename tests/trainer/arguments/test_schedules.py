"""Megatron's flags to schedules: what they mean in samples, and which do not go together."""

from typing import Any

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.schedules import ScheduleFlags

BATCH: dict[str, Any] = {"seq_length": 8, "lr": 1.0, "global_batch_size": 10, "micro_batch_size": 2}
ITERS: dict[str, Any] = BATCH | {"train_iters": 100}
SAMPLES: dict[str, Any] = BATCH | {"train_samples": 1005}
RAMP: dict[str, Any] = {"rampup_batch_size": (2, 4, 60)}  # 2 until 30, 6 until 60, then 10


def test_iterations_are_samples_by_the_global_batch() -> None:
    flags = ScheduleFlags(
        **ITERS, lr_warmup_iters=7, lr_decay_iters=80, lr_decay_style="WSD", lr_wsd_decay_iters=20
    )
    rate = flags.learning_rate()
    assert (rate.warmup, rate.decay, rate.wsd_decay) == (70, 800, 200)
    assert flags.steps() == 100
    assert flags.decay_of_weights().samples == 1000


def test_a_run_counted_in_samples_has_whole_steps() -> None:
    flags = ScheduleFlags(**SAMPLES, lr_warmup_fraction=0.25)
    assert flags.steps() == 100
    assert (flags.learning_rate().decay, flags.learning_rate().warmup) == (1005, 251.25)
    flags = ScheduleFlags(
        **SAMPLES, lr_decay_samples=900, lr_warmup_samples=90, lr_wsd_decay_samples=50
    )
    rate = flags.learning_rate()
    assert (rate.decay, rate.warmup, rate.wsd_decay) == (900, 90, 50)


def test_under_a_ramp_the_decay_ends_at_its_iteration() -> None:
    flags = ScheduleFlags(**ITERS, **RAMP, lr_decay_iters=30, lr_warmup_iters=16)
    rate, sizes = flags.learning_rate(), flags.batch_sizes()
    # 15 steps of 2, 5 of 6, 10 of 10; the sixteenth step is one of 6
    assert (rate.decay, rate.warmup) == (30 + 30 + 100, 36)
    assert rate.at(sizes.consumed(16)) == 1.0
    assert rate.at(sizes.consumed(30)) == 0.0 < rate.at(sizes.consumed(29))
    assert ScheduleFlags(**SAMPLES, **RAMP).steps() == 15 + 5 + 94


def test_the_token_schedule_stands_alone() -> None:
    flags = ScheduleFlags(
        seq_length=8, lr=1.0, train_iters=7, micro_batch_size=1,
        step_batch_size_schedule="0:2 80:3 160:5",
    )  # fmt: skip
    assert flags.batch_sizes().stages == ((0, 2), (10, 3), (20, 5))
    assert flags.learning_rate().decay == 16  # five steps of 2, two of 3


def test_weight_decay_is_constant_or_rises() -> None:
    assert ScheduleFlags(**ITERS, weight_decay=0.3).decay_of_weights().at(5) == 0.3
    rising = ScheduleFlags(
        **ITERS, weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.4
    )
    assert rising.decay_of_weights().at(250) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"train_samples": 5}, "--train-iters or --train-samples"),
        ({"train_iters": None}, "--train-iters or --train-samples"),
        ({"train_iters": 0}, "--train-iters is at least 1"),
        ({"lr_decay_samples": 5}, "give --lr-decay-iters"),
        ({"lr_warmup_samples": 5}, "give --lr-warmup-iters"),
        ({"lr_wsd_decay_samples": 5}, "give --lr-wsd-decay-iters"),
        ({"lr_warmup_iters": -5}, "--lr-warmup-iters is at least 0"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}, "one of them"),
        ({"lr_decay_style": "WSD"}, "wants --lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, "cannot have 101"),
        ({"lr_decay_iters": 5, "lr_warmup_iters": 5}, "shorten --lr-warmup"),
        ({"start_weight_decay": 0.1}, "--weight-decay-incr-style"),
        ({"weight_decay_incr_style": "cosine"}, "wants --start-weight-decay"),
        ({"step_batch_size_schedule": "0:16"}, "leave out --global-batch-size"),
        ({"global_batch_size": None}, "give --global-batch-size"),
    ],
)
def test_what_does_not_go_together_is_said(more: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ScheduleFlags(**(ITERS | more)).learning_rate()


def test_a_run_has_a_step() -> None:
    ScheduleFlags(**(SAMPLES | {"train_samples": 10})).check_length()
    with pytest.raises(UsageError, match="--train-samples 9 are fewer than the first batch has"):
        ScheduleFlags(**(SAMPLES | {"train_samples": 9})).check_length()

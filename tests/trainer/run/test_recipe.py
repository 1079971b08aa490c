"""What may be changed while a run goes on is told; what has no effect is not."""

import pytest

from elastic.trainer.arguments.parse import parse
from elastic.trainer.run.recipe import changed, recipe
from tests.trainer.launch import SMALL

BASE = (*SMALL, "--train-iters=40")


def told(before: str, now: str) -> str:
    return changed(*(recipe(parse([*BASE, *words.split()])) for words in (before, now)))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("", "--lr 2e-2", "lr 0.01 -> 0.02"),
        ("", "--min-lr 0", "min-lr 0.001 -> 0.0"),
        ("", "--lr-decay-style cosine", "lr-decay-style linear -> cosine"),
        ("", "--lr-warmup-iters 4", "lr-warmup-samples 24.0 -> 48.0"),
        ("", "--train-iters 80", "lr-decay-samples 480 -> 960"),
        ("", "--weight-decay 0.1", "weight-decay 0.01 -> 0.1"),
        ("", "--clip-grad 0.5 --adam-beta2 0.95", "adam-beta2 0.999 -> 0.95, clip-grad 1.0 -> 0.5"),
        ("", "--adam-beta1 0.8 --adam-eps 1e-6", "adam-beta1 0.9 -> 0.8, adam-eps 1e-08 -> 1e-06"),
        ("", "--init-method-std 0.01", "init-method-std 0.02 -> 0.01"),
        ("--guard warn", "--guard rollback", "guard warn -> rollback"),
        ("--guard warn", "--guard warn --guard-spike 9", "guard-spike 8.0 -> 9.0"),
        ("--fp16", "--fp16 --hysteresis 3", "loss-scale hysteresis 2 -> 3"),
    ],
)
def test_what_has_an_effect_is_told(before: str, now: str, said: str) -> None:
    assert told(before, now) == said


@pytest.mark.parametrize(
    "words",
    [
        "--log-interval 7", "--guard-spike 9", "--hysteresis 3", "--micro-batch-size 2",
        "--lr-wsd-decay-style cosine", "--lr-decay-iters 40",
    ],
)  # fmt: skip
def test_what_has_none_is_not(words: str) -> None:
    """Or where it is not the recipe that says it."""
    assert told("", words) == ""


def test_a_constant_rate_has_no_end() -> None:
    constant = "--lr-decay-style constant"
    assert told(constant, f"{constant} --train-iters 80 --min-lr 0") == ""


def test_of_what_a_checkpoint_does_not_say_nothing_is_told() -> None:
    assert changed(None, recipe(parse(list(BASE)))) == ""

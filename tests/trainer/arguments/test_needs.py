"""What an argument needs beside it is said where that is not there, and only there."""

from pathlib import Path

import pytest

from elastic.trainer.arguments.needs import NEEDS, Need
from elastic.trainer.arguments.options import flag_of
from elastic.trainer.arguments.parse import parse
from tests.trainer.arguments.effects import OPS, SHOWN, WORDS
from tests.trainer.arguments.observed import words_of
from tests.trainer.arguments.tiny import SMALL

NULL = "--tokenizer-type NullTokenizer"
WITHOUT = {
    "reset_position_ids": "--position-embedding-type none",
    "recompute_granularity": "--compile --tensor-model-parallel-size 2 --recompute-granularity selective",
    "min_lr": "--lr-decay-style constant",
    "lr_decay_iters": "--lr-decay-style constant",
    "lr_decay_samples": "--in-samples 13 --lr-decay-style constant",
    "split": "--mock-data",
    "data_cache_path": "--mock-data",
    "eval_interval": "--eval-iters 0",
    "lr_wsd_decay_samples": "--in-samples 32",
    "vocab_file": NULL,
    "merge_file": NULL,
    "tokenizer_model": NULL,
    "vocab_size": WORDS,
    "use_pytorch_profiler": "--tensorboard-dir t",
    "profile_step_end": "--profile-step-start 1",
}
"""What makes sure that a need is not met; of others that is so anyway."""
GPU = {"memory_snapshot_path": "--memory-snapshot-path x", "log_memory_to_tensorboard": "--log-memory-to-tensorboard"}  # fmt: skip
"""Arguments that a GPU shows."""
NAMES = [(need, name) for need in NEEDS for name in need.names]


def notes(words: str) -> tuple[str, ...]:
    for place in ("{own}", "{copy}"):
        words = words.replace(place, "/own")
    return parse(words_of(f"{SMALL} {words.replace(OPS, '')}", Path("/base"))).notes


def has_none(name: str, said: tuple[str, ...]) -> list[str]:
    """Why it is said to have no effect."""
    found = []
    for note in said:
        flags, _, why = note.partition(" no effect: ")
        if why and flag_of(name) in flags.replace(",", "").split():
            found.append(why)
    return found


@pytest.mark.parametrize(("need", "name"), NAMES, ids=[name for _, name in NAMES])
def test_what_an_argument_lacks_is_said(need: Need, name: str) -> None:
    more = GPU.get(name) or SHOWN[name].more
    assert has_none(name, notes(f"{more} {WITHOUT.get(name, '')}")) == [need.why]


@pytest.mark.parametrize("name", [name for name in SHOWN if name != "data_parallel_size"])
def test_an_argument_that_has_an_effect_is_not_said_to_have_none(name: str) -> None:
    assert has_none(name, notes(f"{SHOWN[name].beside} {SHOWN[name].more}")) == []


def test_several_that_lack_the_same_are_said_in_one_line() -> None:
    said = "--guard-window, --guard-spike have no effect: without --guard no step is judged"
    assert notes("--guard-spike 3 --guard-window 64") == (said,)

"""What a `Checkpointer` is given, checked before its keeper hears of it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic.checkpoint import Checkpointer, arguments
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError


@pytest.mark.parametrize("given", [1.0, float("nan"), "1", True, None, np.float32(1)])
def test_what_counts_is_a_whole_number(given: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^step is a whole number, not "):
        arguments.whole("step", given)


def test_a_step_has_a_folder() -> None:
    for number in (np.int64(3), torch.tensor(3), 3):
        assert type(arguments.whole("step", number)) is int
    assert manifest.step_of(manifest.folder(manifest.MOST_STEP)) == manifest.MOST_STEP
    with pytest.raises(CheckpointError, match="at most"):
        arguments.whole("step", manifest.MOST_STEP + 1)


@pytest.mark.parametrize("given", [0, -1])
def test_a_rule_is_1_or_more(given: int) -> None:
    assert arguments.rule("keep", None) is None
    with pytest.raises(CheckpointError, match=f"^keep is 1 or more, not {given}$"):
        arguments.rule("keep", given)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("", "empty"),
        (b"", "empty"),
        ("a\0b", "zero byte"),
        ("a\ud800", "UTF-8"),
        ("s3://", "names no folder"),
        ("memory:///", "names no folder"),
    ],
)
def test_a_path_names_a_folder(path: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        Checkpointer(path)


def test_a_path_is_any_of_os() -> None:
    for path in (b"a/../b", "b", Path("b"), f"file://{os.getcwd()}/b"):
        assert arguments.place(path) == os.path.abspath("b")  # type: ignore[arg-type]
    assert arguments.place("s3://bucket/") == "s3://bucket"


def test_a_slip_ends_nothing(tmp_path: Path) -> None:
    """The keeper hangs up on what it cannot read, which is the end of all snapshots."""
    state = {"w": torch.ones(2)}
    wrong: Any = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path) as checkpoint:
        for bad in (2.0, float("nan"), 10**30):
            with pytest.raises(CheckpointError, match=r"^a step is"):
                checkpoint.save(bad, state)  # type: ignore[arg-type]
            with pytest.raises(CheckpointError, match=r"^a step is"):
                checkpoint.load(state, step=bad)  # type: ignore[arg-type]
        for call in (lambda: checkpoint.save(1, wrong), lambda: checkpoint.load(wrong)):
            with pytest.raises(CheckpointError, match=r"such as .*, not a Linear$"):
                call()
        with pytest.raises(CheckpointError, match=r"^only is a list of names: \['w'\]$"):
            checkpoint.load(state, only="w")
        checkpoint.save(1, state, persist=True)
        checkpoint.wait(60)
        assert checkpoint.load(state, step=np.int64(1)) == 1  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"^this Checkpointer is closed$"):
        checkpoint.save(2, state)

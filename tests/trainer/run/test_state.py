"""How a run goes on from what was saved of it, and what it must not take over."""

from pathlib import Path
from typing import Any

import torch

from elastic.checkpoint import Checkpointer
from elastic.data import Skips
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.run import state as states
from elastic.trainer.watch import guard
from tests.trainer import forks
from tests.trainer.run.agreeing import SIZES

CONFIG = {"num_layers": 1}


def state(conditions: str, *, skips: tuple[tuple[int, int], ...] = ()) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    return {
        "identity": CONFIG, "conditions": {"tensor parallel": conditions}, "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()), "tops": torch.zeros(2, dtype=torch.int64),
        "guard": guard.to_json(guard.State(skips=Skips(ranges=skips))),
    }  # fmt: skip


def saved(folder: Path) -> dict[str, Any]:
    """What a run of other conditions has saved, which leaves samples out."""
    held = state("of before", skips=((8, 16),))
    with Checkpointer(folder) as checkpoint:
        checkpoint.save(3, held, persist=True)
        checkpoint.wait()
    return held


def test_conditions_that_are_asked_for_are_those_of_what_is_saved_from_then_on(
    tmp_path: Path,
) -> None:
    before, now = saved(tmp_path), state("of now")
    flags = CheckpointFlags(save=str(tmp_path), other_conditions=True)
    with Checkpointer(tmp_path) as checkpoint:
        assert states.resume(checkpoint, now, flags, exact=True) == 3
    assert now["conditions"] == {"tensor parallel": "of now"}
    assert now["guard"] == before["guard"]
    assert torch.equal(now["model"].weight, before["model"].weight)


def test_samples_that_were_left_out_stay_so_where_a_run_is_begun_from_another(
    tmp_path: Path,
) -> None:
    before, now = saved(tmp_path), state("of now")
    flags = CheckpointFlags(load=str(tmp_path), no_load_optim=True)
    assert states.begin(now, flags) == (3, "")
    assert guard.from_json(now["guard"]).skips.ranges == ((8, 16),)
    assert now["conditions"] == {"tensor parallel": "of now"}
    assert torch.equal(now["model"].weight, before["model"].weight)


def test_a_node_with_other_data_is_found_before_the_first_step(tmp_path: Path) -> None:
    told = forks.told("tests.trainer.run.agreeing", tmp_path, SIZES)
    assert told["alike"] == ["", ""]
    assert len(set(told["other data"])) == 1, "all ranks end with the same line"
    assert told["other data"][0].startswith("data of rank 2 is not that of rank 0")

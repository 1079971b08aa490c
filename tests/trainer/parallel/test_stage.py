"""What a pipeline's stage has received is not held longer than a leaf is under way, and what it raises is not hidden."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from elastic.proto.errors import UsageError
from elastic.trainer.model.gpt import GPT
from elastic.trainer.parallel.pipeline import Pipeline
from elastic.trainer.parallel.program import Program
from elastic.trainer.watch import memory
from tests.trainer import forks
from tests.trainer.model.shapes import GPT2
from tests.trainer.parallel.holding import COUNTS, SCHEDULES, SIZES


def test_what_stages_hold_does_not_grow_with_the_number_of_leaves(tmp_path: Path) -> None:
    told = forks.told("tests.trainer.parallel.holding", tmp_path, SIZES)
    few, many = COUNTS
    for name, ranks in told.items():
        for found in ranks:
            assert found["afterwards"] == 0, name
            assert found[f"evaluation of {many}"] == found[f"evaluation of {few}"], (name, found)
            if name != "gpipe":  # whose leaves all are
                assert found[f"training of {many}"] <= found[f"training of {few}"] + 2, (
                    name,
                    found,
                )
    assert max(found[f"training of {many}"] for found in told["gpipe"]) >= many
    assert all(max(found[f"evaluation of {few}"] for found in ranks) > 0 for ranks in told.values())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a world of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_forward_raises_is_what_is_raised(
    schedule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's mistake, memory that ran out, and a script's own error with what it is from."""

    def script() -> None:
        raise ValueError("its own") from KeyError("cause")

    def run(step: Any) -> None:
        programs = [Program(GPT(GPT2), step, last=True) for _ in range(2)]
        several = "virtual" in SCHEDULES[schedule]
        pipeline = Pipeline(
            programs if several else programs[1:], init_device_mesh("cpu", (1,)), schedule=schedule,
            hidden=(1, 16, 32), dtype=torch.float32, tokens=16,
        )  # fmt: skip
        pipeline.run({"tokens": torch.zeros(2, 16)}, torch.ones(2))

    with pytest.raises(UsageError, match=r"^forward_step returned") as mistake:
        run(lambda batches, model: 5)
    assert mistake.value.__cause__ is None
    with pytest.raises(RuntimeError) as ran_out:
        run(lambda batches, model: torch.empty(2**50))
    assert memory.ran_out(ran_out.value)
    with pytest.raises(ValueError, match=r"^its own$") as own:
        run(lambda batches, model: script())
    assert isinstance(own.value.__cause__, KeyError)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR], "one line is told"

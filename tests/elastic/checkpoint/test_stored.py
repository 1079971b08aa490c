"""Steps that programs without a job write and read."""

from pathlib import Path

import pytest
import torch
from torch import nn

from elastic.checkpoint import stored
from elastic.checkpoint.storage.folder import Folder
from elastic.checkpoint.tools import inspection
from elastic.proto.errors import CheckpointError
from tests.elastic.checkpoint.steps import flip


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    found = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    found[1].weight = found[0].weight
    return found


def test_a_state_that_is_saved_is_loaded_or_read_by_the_tensor(tmp_path: Path) -> None:
    stored.save(tmp_path, {"model": model(1), "n": 3}, step=7)
    other = {"model": model(2), "n": 0}
    assert stored.load(tmp_path, other) == 7
    assert other["n"] == 3
    found = stored.Stored(tmp_path, 7)
    assert (found.has("n"), found.has("optimizer")) == (True, False)
    for name, tensor in model(1).state_dict().items():
        assert torch.equal(other["model"].state_dict()[name], tensor)  # type: ignore[attr-defined]
        assert torch.equal(found.tensor(f"model.{name}"), tensor)
    with pytest.raises(CheckpointError, match=r"model\.2"):
        found.tensor("model.2")
    with pytest.raises(CheckpointError, match="has a step 7 already"):
        stored.save(tmp_path, {"n": 4}, step=7)


def test_tensors_are_got_when_they_are_wanted(tmp_path: Path) -> None:
    asked = list[str]()

    def bias() -> torch.Tensor:
        asked.append("bias")
        return torch.full((4,), 5.0)

    given = {"model.0.bias": bias}
    stored.save(tmp_path, {"model": model(1)}, step=1, tensors=given)
    assert asked == ["bias"]
    found = stored.Stored(tmp_path, 1)
    assert torch.equal(found.tensor("model.0.bias"), torch.full((4,), 5.0))
    assert torch.equal(found.tensor("model.1.bias"), model(1).state_dict()["1.bias"])


def test_nothing_is_left_of_what_fails(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        stored.save(tmp_path, {"model": model(1)}, step=1, tensors={"model.0.bias": fail})
    assert Folder(tmp_path).listing() == {}


def test_what_is_damaged_is_no_tensor(tmp_path: Path) -> None:
    stored.save(tmp_path, {"a": torch.ones(1000), "b": torch.ones(10)}, step=1)
    step = inspection.pick(Folder(tmp_path), None).manifest
    assert step is not None
    flip(tmp_path / "step-00000001" / step.shards[0].file, "a")
    with pytest.raises(CheckpointError, match="a is damaged"):
        stored.Stored(tmp_path, 1).tensor("a")

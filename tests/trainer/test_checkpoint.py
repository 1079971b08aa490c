from pathlib import Path

import pytest
import torch

from elastic.trainer import checkpoint, optimizer
from elastic.trainer.files import replace_atomically
from elastic.trainer.model import GPT, GPTConfig, init_weights

SHAPE = GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=20)


def trained(steps: int, seed: int = 1) -> tuple[GPT, torch.optim.AdamW]:
    model = GPT(SHAPE)
    init_weights(model, seed, 0.02)
    adam = optimizer.build(model, weight_decay=0.1, betas=(0.9, 0.95))
    train_on(model, adam, steps)
    return model, adam


def train_on(model: GPT, adam: torch.optim.AdamW, steps: int) -> None:
    optimizer.set_lr(adam, 0.01)
    for _ in range(steps):
        torch.autograd.backward(model(torch.arange(10).view(2, 5)))
        adam.step()
        adam.zero_grad()


def test_what_was_saved_trains_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, adam = trained(3)
    checkpoint.save(tmp_path, 3, model, adam, {"seed": 1})
    other, its_adam = trained(0, seed=2)
    checkpoint.load(tmp_path, 3, other, its_adam)
    train_on(model, adam, 2)
    train_on(other, its_adam, 2)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])
    assert checkpoint.read_identity(tmp_path, 3) == {"seed": 1}


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    model, adam = trained(1)
    for step in (5, 10, 100):
        checkpoint.save(tmp_path, step, model, adam, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000010.safetensors",
        "step-00000100.safetensors",
    ]
    assert checkpoint.newest(tmp_path) == 100


def test_a_draft_of_a_killed_writer_is_neither_loaded_nor_kept(tmp_path: Path) -> None:
    model, adam = trained(1)
    whole = checkpoint.save(tmp_path, 5, model, adam, {})
    for name in (".step-00000010.safetensors.x.draft", "step-00000010.safetensors.draft"):
        (tmp_path / name).write_bytes(whole.read_bytes())
    assert checkpoint.newest(tmp_path) == 5
    checkpoint.save(tmp_path, 6, model, adam, {})
    assert not list(tmp_path.glob(".step-*"))


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_torn_file_is_passed_over(tmp_path: Path, size: int) -> None:
    model, adam = trained(1)
    raw = checkpoint.save(tmp_path, 5, model, adam, {}).read_bytes()
    checkpoint.path_of(tmp_path, 6).write_bytes(raw[:size])
    assert checkpoint.newest(tmp_path) == 5


def test_no_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") is None


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replace_atomically(path) as draft:  # noqa: PT012
        draft.write_text("ne")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

"""Models that `transformers` wrote, with what it computes of them (scripts/hf_golden.py)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elastic.trainer import checkpoints
from elastic.trainer.convert import reading, writing

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
WORDS = 40


def tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for f in sorted(folder.glob("model*")) for k, v in _tensors(f).items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    return load_file(file) if file.suffix == ".safetensors" else {}


def test_there_are_models_of_each_kind() -> None:
    assert {"gpt2", "gpt2-untied", "llama", "llama-bias", "llama-tied", "qwen2"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    weights, _ = reading.read(GOLDEN / name)
    model = checkpoints.load_model(weights)
    found = model.logits(expected["tokens"])
    assert (found - expected["logits"]).abs().max() < 1e-5
    assert sum(one.numel() for one in model.parameters()) == weights.config.parameter_count


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_every_bit_is_the_same(name: str, tmp_path: Path) -> None:
    """Through a checkpoint, whose vocabulary is padded, and files of a few tensors each."""
    weights, _ = reading.read(GOLDEN / name, divisible_by=64, seq_length=8)
    checkpoints.save_model(str(tmp_path / "ours"), weights, step=3)
    found = checkpoints.opened(str(tmp_path / "ours"))
    assert found.config == weights.config
    assert (found.step, found.config.vocab_size, found.config.seq_length) == (3, 64, 8)
    files = writing.write(
        found, tmp_path / "theirs", vocabulary=WORDS, dtype=torch.float32, 
        shard_bytes=4000,
    )  # fmt: skip
    assert files > 1
    again, before = tensors(tmp_path / "theirs"), tensors(GOLDEN / name)
    assert again.keys() == before.keys()
    for key, tensor in before.items():
        assert torch.equal(again[key], tensor), key
    assert reading.read(tmp_path / "theirs")[0].config == reading.read(GOLDEN / name)[0].config


@pytest.mark.parametrize("name", NAMES)
def test_words_that_are_made_up_are_as_unlikely_as_promised(name: str) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    weights, _ = reading.read(GOLDEN / name, divisible_by=64)
    found = checkpoints.load_model(weights).logits(expected["tokens"])
    assert torch.allclose(found[..., :WORDS], expected["logits"], atol=1e-5)
    more = found.logsumexp(-1) - expected["logits"].logsumexp(-1)
    assert float(more.max()) <= torch.tensor(64 / WORDS).log() + 1e-5


def test_bf16_is_what_rounding_makes_of_it(tmp_path: Path) -> None:
    weights, _ = reading.read(GOLDEN / "llama")
    writing.write(
        weights, tmp_path / "theirs", vocabulary=WORDS, dtype=torch.bfloat16, 
        shard_bytes=10**9,
    )  # fmt: skip
    found, settings = reading.read(tmp_path / "theirs")
    assert settings["torch_dtype"] == "bfloat16"
    assert settings["eos_token_id"] is None
    for name in ("embedding.words.weight", "blocks.1.attention.qkv.weight", "head.weight"):
        assert torch.equal(found.tensor(name), weights.tensor(name).bfloat16())
    assert checkpoints.load_model(found).head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]

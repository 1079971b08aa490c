"""Against `transformers` itself, where it is installed: it is none of our dependencies."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.trainer.checkpoints import Weights
from elastic.trainer.convert import reading, writing
from elastic.trainer.data import tokenizers
from elastic.trainer.data.prepare import learn
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from tests.trainer.model.shapes import GPT2, LLAMA

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPES = {
    "gpt2": GPT2,
    "untied": replace(GPT2, tied=False),
    "llama": LLAMA,
    "tied": replace(LLAMA, tied=True, kv_channels=6),
    "bias": replace(LLAMA, bias=True),
    "qwen": replace(LLAMA, qkv_bias=True),
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_it_loads_what_is_exported_and_computes_the_same(name: str, tmp_path: Path) -> None:
    config: GPTConfig = SHAPES[name]
    model = GPT(config)
    initialize(model, config, 1, 0.2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    words = learn(["to be or not to be"] * 3, 300)
    words.save(tmp_path)
    known = tokenizers.load(tmp_path)
    assert isinstance(known, tokenizers.TextTokenizer)
    parameters = dict(model.named_parameters())
    weights = Weights(config=config, tensor=lambda name: parameters[name].detach())
    writing.write(
        weights, tmp_path / "hf", vocabulary=words.vocab_size, dtype=torch.float32,
        tokenizer=known, files=writing.tokenizer_files(tmp_path), shard_bytes=20_000,
    )  # fmt: skip
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    encoder = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = encoder("not to be", return_tensors="pt")["input_ids"]
    assert ids.tolist() == words.encode(["not to be"])
    assert encoder.decode(ids[0]) == "not to be"
    assert encoder.eos_token_id == theirs.config.eos_token_id == 0
    tokens = torch.randint(0, words.vocab_size, (2, config.seq_length))
    with torch.no_grad():
        expected, found = theirs.eval()(tokens).logits, model.logits(tokens)
    assert (found[..., : words.vocab_size] - expected).abs().max() < 1e-4
    theirs.save_pretrained(tmp_path / "again")
    back, _ = reading.read(tmp_path / "again")
    for one in ("embedding.words.weight", "blocks.1.attention.qkv.weight", "head.norm.weight"):
        assert torch.equal(back.tensor(one), parameters[one][: len(back.tensor(one))])

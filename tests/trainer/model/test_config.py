"""Parameter counts, as published or as `transformers` counts them."""

from typing import Any

import pytest
import torch

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT

LLAMA: dict[str, Any] = {
    "position": "rope", "normalization": "RMSNorm", "activation": "swiglu", "bias": False,
    "tied": False,
}  # fmt: skip


def gpt2(layers: int, hidden: int, heads: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=1024,
        vocab_size=50257,
    )  # fmt: skip


def llama(
    layers: int, hidden: int, heads: int, groups: int, inner: int, words: int, **more: Any
) -> GPTConfig:
    return GPTConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_query_groups=groups,
        ffn_hidden_size=inner, vocab_size=words, seq_length=4096, **(LLAMA | more),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count"),
    [
        pytest.param(gpt2(12, 768, 12), 124_439_808, id="gpt2"),
        pytest.param(gpt2(24, 1024, 16), 354_823_168, id="gpt2-medium"),
        pytest.param(gpt2(36, 1280, 20), 774_030_080, id="gpt2-large"),
        pytest.param(gpt2(48, 1600, 25), 1_557_611_200, id="gpt2-xl"),
        pytest.param(llama(32, 4096, 32, 32, 11008, 32000), 6_738_415_616, id="llama-2-7b"),
        pytest.param(llama(40, 5120, 40, 40, 13824, 32000), 13_015_864_320, id="llama-2-13b"),
        pytest.param(llama(80, 8192, 64, 8, 28672, 32000), 68_976_648_192, id="llama-2-70b"),
        pytest.param(llama(32, 4096, 32, 8, 14336, 128256), 8_030_261_248, id="llama-3-8b"),
        pytest.param(
            llama(16, 2048, 32, 8, 8192, 128256, tied=True), 1_235_814_400, id="llama-3.2-1b"
        ),
        pytest.param(
            llama(24, 896, 14, 2, 4864, 151936, tied=True, qkv_bias=True), 494_032_768,
            id="qwen2-0.5b",
        ),
    ],
)  # fmt: skip
def test_counts_are_the_known_ones_and_those_of_the_tensors(config: GPTConfig, count: int) -> None:
    assert config.parameter_count == count
    with torch.device("meta"):
        assert sum(one.numel() for one in GPT(config).parameters()) == count
    if config.position == "learned":
        layers, hidden = config.num_layers, config.hidden_size
        rows = config.vocab_size + config.seq_length
        assert count == 12 * layers * hidden**2 + 13 * layers * hidden + 2 * hidden + rows * hidden

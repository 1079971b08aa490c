from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.convert.names import links
from elastic.trainer.convert.shapes import described, family_of, understood
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from tests.trainer.model.shapes import GPT2, LLAMA


@st.composite
def shapes(draw: st.DrawFn) -> GPTConfig:
    """What Hugging Face has a model for."""
    heads, width = draw(st.integers(1, 6)), draw(st.integers(1, 3)) * 2
    common: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 3)), "num_attention_heads": heads,
        "seq_length": draw(st.integers(1, 9)), "vocab_size": draw(st.integers(1, 9)),
        "ffn_hidden_size": draw(st.integers(1, 20)), "tied": draw(st.booleans()),
        "norm_epsilon": draw(st.sampled_from([1e-5, 1e-6])),
    }  # fmt: skip
    if draw(st.booleans()):
        return GPTConfig(hidden_size=heads * width, **common)
    groups = draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))
    bias = draw(st.booleans())
    return GPTConfig(
        hidden_size=draw(st.integers(1, 9)), kv_channels=width, num_query_groups=groups,
        position="rope", normalization="RMSNorm", activation="swiglu", bias=bias,
        qkv_bias=not bias and draw(st.booleans()), rotary_base=draw(st.sampled_from([1e4, 5e5])),
        **common,
    )  # fmt: skip


@given(config=shapes())
def test_names_and_shapes_are_the_models_and_each_tensor_comes_back(config: GPTConfig) -> None:
    found = list(links(family_of(config), config))
    with torch.device("meta"):
        parameters = dict(GPT(config).named_parameters())
    assert {link.ours: link.shape for link in found} == {
        name: tuple(one.shape) for name, one in parameters.items()
    }
    theirs = [name for link in found for name in link.theirs]
    assert len(theirs) == len(set(theirs))
    for number, link in enumerate(found):
        tensor = torch.randn(link.shape, generator=torch.Generator().manual_seed(number))
        there = link.to_theirs(tensor, config, config.vocab_size)
        assert [tuple(one.shape) for one in there] == link.shapes(config, config.vocab_size)
        assert torch.equal(link.to_ours(there, config), tensor), link.ours


@given(config=shapes())
def test_a_shape_comes_back_from_config_json(config: GPTConfig) -> None:
    family, found = understood(described(config, config.vocab_size, "float32"))
    assert family == family_of(config)
    assert found.parameter_count == config.parameter_count
    assert described(found, config.vocab_size, "float32") == described(
        config, config.vocab_size, "float32"
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (replace(GPT2, position="none"), "position none"),
        (replace(GPT2, normalization="RMSNorm"), "normalization RMSNorm"),
        (replace(GPT2, activation="swiglu"), "activation swiglu"),
        (replace(GPT2, bias=False), "bias False"),
        (replace(GPT2, num_query_groups=2), "num_query_groups 2"),
        (replace(GPT2, kv_channels=4), "kv_channels 4"),
        (replace(LLAMA, normalization="LayerNorm"), "normalization LayerNorm"),
        (replace(LLAMA, activation="gelu"), "activation gelu"),
        (replace(LLAMA, rotary_percent=0.5), r"rotary_percent 0\.5"),
    ],
)
def test_what_no_model_of_theirs_has_is_refused_by_its_name(config: GPTConfig, named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}: "):
        family_of(config)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "mamba"),
        ("model_type", None),
        ("activation_function", "gelu"),
        ("n_layer", "12"),
        ("n_layer", 0),
        ("n_layer", 10**30),
        ("n_embd", True),
        ("layer_norm_epsilon", "small"),
        ("layer_norm_epsilon", float("nan")),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_setting_of_theirs_that_ours_cannot_have_is_refused_by_its_name(
    setting: str, value: object
) -> None:
    settings = described(GPT2, 320, "float32") | {setting: value}
    with pytest.raises(UsageError, match=setting):
        understood(settings)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_theta": -1.0}),
        ("rope_parameters", [1]),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("use_sliding_window", True),
    ],
)
def test_so_is_one_of_a_llamas(setting: str, value: object) -> None:
    settings = described(LLAMA, 320, "float32") | {setting: value}
    with pytest.raises(UsageError):
        understood(settings)

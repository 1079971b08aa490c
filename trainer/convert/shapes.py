"""A model's shape in Hugging Face's words (config.json), and back. Pure.

Three of their models can be ours: GPT2LMHeadModel, LlamaForCausalLM and Qwen2ForCausalLM, which is a
Llama whose queries, keys and values have biases.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from elastic.proto.errors import UsageError
from elastic.trainer.model.config import GPTConfig

Family = Literal["gpt2", "llama", "qwen2"]
"""Hugging Face's `model_type`."""

ARCHITECTURES: Mapping[Family, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}

_NEEDED: Mapping[Family, Mapping[str, Any]] = {
    "gpt2": {
        "normalization": "LayerNorm",
        "activation": "gelu",
        "bias": True,
    },
    "llama": {"normalization": "RMSNorm", "activation": "swiglu", "rotary_percent": 1.0},
    "qwen2": {"normalization": "RMSNorm", "activation": "swiglu", "rotary_percent": 1.0},
}
"""Fields of `GPTConfig`."""


def family_of(config: GPTConfig) -> Family:
    """The one that can be this model. Raises `UsageError`, which names the setting, where none can."""
    if config.position == "none":
        raise UsageError("position none: no model of Hugging Face that is known here goes without")
    biased = config.qkv_bias and not config.bias
    family: Family = "gpt2" if config.position == "learned" else "qwen2" if biased else "llama"
    for name, wanted in _NEEDED[family].items():
        has = getattr(config, name)
        if has != wanted:
            raise UsageError(
                f"{name} {has}: {ARCHITECTURES[family]}, Hugging Face's model with {config.position} "
                f"positions, has {wanted}"
            )
    if family == "gpt2":
        heads = config.num_attention_heads
        if config.groups != heads:
            raise UsageError(
                f"num_query_groups {config.groups}: GPT2LMHeadModel has one for each of {heads} heads"
            )
        if config.head_width * heads != config.hidden_size:
            raise UsageError(
                f"kv_channels {config.head_width}: GPT2LMHeadModel's {heads} heads share the hidden "
                f"size {config.hidden_size} out"
            )
    return family


def described(
    config: GPTConfig, vocabulary: int, dtype: str, end: int | None = None
) -> dict[str, Any]:
    """config.json of a model. Raises `UsageError` as `family_of`.

    vocabulary: words without padding; dtype: of the weights, torch's name; end: the id of the token
    that ends a text, where that is known.
    """
    family = family_of(config)
    common = {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "torch_dtype": dtype,
        "vocab_size": vocabulary, "tie_word_embeddings": config.tied,
        "bos_token_id": end if family == "gpt2" else None, "eos_token_id": end,
    }  # fmt: skip
    if family == "gpt2":
        return common | {
            "n_embd": config.hidden_size, "n_layer": config.num_layers,
            "n_head": config.num_attention_heads, "n_positions": config.positions,
            "n_inner": config.mlp_width, "layer_norm_epsilon": config.norm_epsilon,
            "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }  # fmt: skip
    # transformers 4 reads rope_theta, 5 the parameters.
    rope = {"rope_type": "default", "rope_theta": config.rotary_base}
    return common | {
        "hidden_size": config.hidden_size, "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.groups, "head_dim": config.head_width,
        "max_position_embeddings": config.positions, "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu", "rope_theta": config.rotary_base, "rope_parameters": rope,
        "attention_bias": config.bias, "mlp_bias": config.bias, "attention_dropout": 0.0,
    }  # fmt: skip


def understood(settings: Mapping[str, Any]) -> tuple[Family, GPTConfig]:
    """The shape that a config.json describes, with its vocabulary as it is.

    Raises `UsageError`, which names the setting, for a model that cannot be ours.
    """
    found = _Settings(settings)
    family = found.of("model_type", None, get_args(Family))
    config = _gpt2(found) if family == "gpt2" else _llama(found, qwen=family == "qwen2")
    if family_of(config) != family:
        raise UsageError(f"config.json: a {family} with these settings is not known here")
    return family, _plain(config)


def _plain(config: GPTConfig) -> GPTConfig:
    """Without what says no more than its default, as who starts a run leaves it out."""
    if config.mlp_width == replace(config, ffn_hidden_size=None).mlp_width:
        config = replace(config, ffn_hidden_size=None)
    if config.groups == config.num_attention_heads:
        config = replace(config, num_query_groups=None)
    if config.head_width * config.num_attention_heads == config.hidden_size:
        config = replace(config, kv_channels=None)
    return config


def _gpt2(found: "_Settings") -> GPTConfig:
    found.of("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh"))
    found.of("scale_attn_weights", True, (True,))
    found.of("scale_attn_by_inverse_layer_idx", False, (False,))
    found.of("add_cross_attention", False, (False,))
    return GPTConfig(
        num_layers=found.number("n_layer"),
        hidden_size=found.number("n_embd"),
        num_attention_heads=found.number("n_head"),
        seq_length=found.number("n_positions"),
        vocab_size=found.number("vocab_size"),
        ffn_hidden_size=found.number("n_inner", 0) or None,
        norm_epsilon=found.real("layer_norm_epsilon", 1e-5),
        tied=found.of("tie_word_embeddings", True, (True, False)),
    )


def _llama(found: "_Settings", *, qwen: bool) -> GPTConfig:
    found.of("hidden_act", "silu", ("silu",))
    found.of("use_sliding_window", False, (False,))
    bias = not qwen and found.of("attention_bias", False, (True, False))
    found.of("mlp_bias", bias, (bias,))  # a Llama's are all or none, here
    return GPTConfig(
        num_layers=found.number("num_hidden_layers"),
        hidden_size=found.number("hidden_size"),
        num_attention_heads=found.number("num_attention_heads"),
        num_query_groups=found.number("num_key_value_heads", 0) or None,
        kv_channels=found.number("head_dim", 0) or None,
        ffn_hidden_size=found.number("intermediate_size"),
        seq_length=found.number("max_position_embeddings"),
        vocab_size=found.number("vocab_size"),
        position="rope",
        rotary_base=found.rotary_base(),
        normalization="RMSNorm",
        norm_epsilon=found.real("rms_norm_eps", 1e-6),
        activation="swiglu",
        bias=bias,
        qkv_bias=qwen,
        tied=found.of("tie_word_embeddings", False, (True, False)),
    )


class _Settings:
    """config.json, whose values may be of any type."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found

    def of(self, name: str, default: Any, allowed: tuple[Any, ...]) -> Any:
        """One of those that can be ours."""
        has = self._found.get(name, default)
        if not any(has is one or (isinstance(one, str) and has == one) for one in allowed):
            raise UsageError(
                f"config.json: {name} is {has!r}; a model of this trainer has "
                f"{' or '.join(map(repr, allowed))}"
            )
        return has

    def number(self, name: str, default: int | None = None) -> int:
        """From 1 up, unless it is the default."""
        has = self._found.get(name)
        has = default if has is None else has
        if type(has) is not int or (has < 1 and has != default) or has >= 2**40:
            raise UsageError(f"config.json: {name} is {has!r}, and no number from 1 up")
        return has

    def real(self, name: str, default: float) -> float:
        has = self._found.get(name, default)
        if type(has) not in (int, float) or not 0 < has < 1e30:
            raise UsageError(f"config.json: {name} is {has!r}, and no number above 0")
        return float(has)

    def rotary_base(self) -> float:
        """Of positions that are turned in the plain way; `rope_parameters` is what transformers 5 writes."""
        inner = self._found.get("rope_parameters") or self._found.get("rope_scaling") or {}
        if not isinstance(inner, dict):
            raise UsageError(f"config.json: rope_parameters is {inner!r}, and no object")
        rope = _Settings(inner)
        for name in ("rope_type", "type"):
            rope.of(name, "default", ("default",))
        if rope.real("partial_rotary_factor", 1.0) != 1.0:
            raise UsageError("config.json: partial_rotary_factor is not 1")
        return rope.real("rope_theta", self.real("rope_theta", 10_000.0))

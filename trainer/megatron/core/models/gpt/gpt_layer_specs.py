"""What a layer is made of: there is one kind, whose norms and biases are the arguments'."""

from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.megatron import absent

__getattr__ = absent.attributes(__name__)

LAYER = "layer"
"""The spec, which `GPTModel` takes."""


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    *others: Any,
    normalization: str | None = None,
    kitchen_attention_backend: str = "sdpa",
    **named: Any,
) -> str:
    """The layer. Raises `UsageError` for one of another kind."""
    asked = {
        "num_experts": num_experts, "moe_grouped_gemm": moe_grouped_gemm,
        "qk_layernorm": qk_layernorm, "multi_latent_attention": multi_latent_attention,
        **{str(value): value for value in others}, **named,
    }  # fmt: skip
    for name, value in asked.items():
        if value:
            raise UsageError(f"a layer's spec: {name} is not here, there is one kind of layer")
    return LAYER


get_gpt_layer_with_transformer_engine_spec = get_gpt_layer_local_spec


def get_gpt_decoder_block_spec(
    config: Any,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    **named: Any,
) -> str:
    """All layers."""
    return get_gpt_layer_local_spec(**named)


get_gpt_decoder_layer_specs = get_gpt_decoder_block_spec

"""The model that a run trains, under Megatron's names. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.options import flag_of, spelled
from elastic.trainer.model.config import GPTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """The model's shape, its first weights and dropout."""

    num_layers: int
    """Blocks."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Heads of each attention."""
    ffn_hidden_size: int | None = None
    """Width inside an MLP; if not given 4 x the hidden size, with --swiglu two thirds of that."""
    kv_channels: int | None = None
    """Width of a head; if not given hidden size / heads."""
    group_query_attention: bool = False
    """Several queries share a key and a value."""
    num_query_groups: int | None = None
    """Heads of keys and values with --group-query-attention; if not given 1."""
    max_position_embeddings: int | None = None
    """Positions that there are embeddings for; if not given the sequence length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = spelled(
        "learned_absolute", meaning={"--use-rotary-position-embeddings": "rope"}
    )
    """How a token's position gets into the model."""
    rotary_base: float = 10_000.0
    """Longest wave length of rotary positions, over 2 pi."""
    rotary_percent: float = 1.0
    """Part of a head that rotary positions turn."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """The norms' kind."""
    norm_epsilon: float = spelled(1e-5, "--layernorm-epsilon")
    """What norms add to the variance."""
    swiglu: bool = False
    """SwiGLU in the MLPs in place of GELU."""
    add_bias_linear: bool = spelled(True, off=("--disable-bias-linear",))
    """Linear layers have a bias."""
    add_qkv_bias: bool = False
    """Queries, keys and values have one even with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = False
    """The head has weights of its own."""
    init_method_std: float = 0.02
    """Deviation of the first weights; what writes to the residual stream has it / sqrt(2 layers)."""
    hidden_dropout: float = 0.1
    """Part of the embedding, and of what a block adds to the residual stream, that is dropped."""
    attention_dropout: float = 0.1
    """Part of what a position looks at that is dropped; no fused kernel computes it."""
    seed: int = 1234
    """Decides first weights, dropout and the order of samples."""

    def __post_init__(self) -> None:
        if self.num_query_groups is not None and not self.group_query_attention:
            raise UsageError("--num-query-groups wants --group-query-attention: give both or none")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed is between 0 and 2^32 - 1, not {self.seed}")
        for name in ("ffn_hidden_size", "kv_channels", "num_query_groups"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{flag_of(name)} is at least 1, not {getattr(self, name)}")
        for name in ("init_method_std", "norm_epsilon"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{flag_of(name)} is at least 0, not {getattr(self, name)}")
        if not 0 < self.rotary_percent <= 1:
            raise UsageError(
                f"--rotary-percent is above 0 and at most 1, not {self.rotary_percent}"
            )
        if not 0 < self.rotary_base < math.inf:
            raise UsageError(f"--rotary-base is above 0, not {self.rotary_base}")

    def config(self, *, seq_length: int, vocab_size: int) -> GPTConfig:
        """The model's shape, with so many token ids, padding among them."""
        if (self.max_position_embeddings or seq_length) < seq_length:
            raise UsageError(
                f"--max-position-embeddings {self.max_position_embeddings} is less than --seq-length "
                f"{seq_length}: give at least that"
            )
        position = self.position_embedding_type
        groups = (self.num_query_groups or 1) if self.group_query_attention else None
        return GPTConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            seq_length=seq_length,
            vocab_size=vocab_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_query_groups=groups,
            kv_channels=self.kv_channels,
            max_positions=self.max_position_embeddings,
            position="learned" if position == "learned_absolute" else position,
            rotary_base=self.rotary_base,
            rotary_percent=self.rotary_percent,
            normalization=self.normalization,
            norm_epsilon=self.norm_epsilon,
            activation="swiglu" if self.swiglu else "gelu",
            bias=self.add_bias_linear,
            qkv_bias=self.add_qkv_bias,
            tied=not self.untie_embeddings_and_output_weights,
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
        )

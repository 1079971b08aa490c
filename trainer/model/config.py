"""The shape of a GPT: what is needed to build it again for its weights."""

from dataclasses import dataclass
from typing import Literal

from elastic.proto.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """A decoder of pre-norm blocks: GPT-2, GPT-3 and Llama are settings of it."""

    num_layers: int
    """Blocks."""
    hidden_size: int
    """Width H of the residual stream."""
    num_attention_heads: int
    """Heads A of each attention."""
    seq_length: int
    """Longest sequence S, in tokens."""
    vocab_size: int
    """Token ids V, those that only pad the vocabulary included."""
    ffn_hidden_size: int | None = None
    """Width F inside an MLP; None: 4 H, and two thirds of that for `swiglu`, as Megatron has it."""
    num_query_groups: int | None = None
    """Heads of keys and values G, each for A / G of the queries' (grouped-query attention); None: A."""
    kv_channels: int | None = None
    """Width D of a head; None: H / A."""
    position: Literal["learned", "rope", "none"] = "learned"
    """How a token's position gets into the model."""
    max_positions: int | None = None
    """Rows of the `learned` positions; None: S."""
    rotary_base: float = 10_000.0
    """Longest wave length of `rope`, over 2 pi."""
    rotary_percent: float = 1.0
    """Part of a head that `rope` turns."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """The norms' kind."""
    norm_epsilon: float = 1e-5
    """What norms add to the variance."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """An MLP's function."""
    bias: bool = True
    """Whether linear layers have one."""
    qkv_bias: bool = False
    """Whether queries, keys and values have one where others have none."""
    tied: bool = True
    """Whether the head is the token embedding."""
    hidden_dropout: float = 0.0
    """Part of the embedding, and of what a block adds to the residual stream, that training drops."""
    attention_dropout: float = 0.0
    """Part of what a position looks at that training drops; no fused kernel computes it."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "seq_length",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be from 0 to less than 1, not {getattr(self, name)}")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise UsageError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_attention_heads}: give kv_channels"
            )
        if self.position == "rope" and self.rotary_width % 2:
            raise UsageError(
                f"rotary_percent {self.rotary_percent} of {self.head_width} channels a head are "
                f"{self.rotary_width}, which are no pairs: give another"
            )
        if self.positions < self.seq_length:
            raise UsageError(
                f"{self.positions} positions are too few for samples of {self.seq_length} tokens"
            )
        if self.num_attention_heads % self.groups:
            raise UsageError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_query_groups {self.groups}"
            )

    @property
    def drops(self) -> bool:
        """Whether training drops anything."""
        return self.hidden_dropout > 0 or self.attention_dropout > 0

    @property
    def groups(self) -> int:
        """Heads of keys and values G."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def positions(self) -> int:
        """Rows of the learned positions."""
        return self.seq_length if self.max_positions is None else self.max_positions

    @property
    def head_width(self) -> int:
        """D."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """Channels of a head that `rope` turns, in pairs."""
        return int(self.head_width * self.rotary_percent)

    @property
    def mlp_width(self) -> int:
        """F."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return (4 * self.hidden_size * 2 // 3) // 64 * 64 or 4 * self.hidden_size * 2 // 3
        return 4 * self.hidden_size

    @property
    def qkv_width(self) -> int:
        """(A + 2 G) D."""
        return (self.num_attention_heads + 2 * self.groups) * self.head_width

    @property
    def parameter_count(self) -> int:
        """All parameters, what is tied counted once; for GPT-2's shapes 12 L H^2 + 13 L H + 2 H +
        (V + S) H."""
        hidden, inner = self.hidden_size, self.num_attention_heads * self.head_width
        linear = [(hidden, self.qkv_width, self.bias or self.qkv_bias), (inner, hidden, self.bias)]
        linear += [(hidden, self.mlp_width, self.bias)] * (2 if self.activation == "swiglu" else 1)
        linear += [(self.mlp_width, hidden, self.bias)]
        norm = hidden * (2 if self.normalization == "LayerNorm" else 1)
        block = 2 * norm + sum(i * o + o * bias for i, o, bias in linear)
        words = self.vocab_size * hidden * (1 if self.tied else 2)
        learned = self.positions * hidden * (self.position == "learned")
        return self.num_layers * block + norm + words + learned

    def check_split(self, tp: int, *, sequence: bool = False) -> None:
        """Raises `UsageError` where `tp` ranks cannot share out each layer, or with `sequence` the residual stream's
        positions."""
        parts = {
            "num_attention_heads": self.num_attention_heads, "num_query_groups": self.groups,
            "ffn_hidden_size": self.mlp_width, "the padded vocabulary": self.vocab_size,
        }  # fmt: skip
        if sequence:
            parts["--sequence-parallel's seq_length"] = self.seq_length
        for name, count in parts.items():
            if count % tp:
                raise UsageError(
                    f"--tensor-model-parallel-size {tp} does not divide {name} {count}"
                )

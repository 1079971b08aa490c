"""GPT: a decoder of pre-norm blocks with learned positions and tied embeddings.

Shapes: B samples, S positions, H hidden size, A heads, D = H / A, V vocabulary.
Weights at step 0 depend on (seed, parameter name) alone: any world starts from the same model.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The model's shape: all that is needed to build it again for its weights."""

    num_layers: int
    """Number of blocks."""
    hidden_size: int
    """Width H of the residual stream."""
    num_attention_heads: int
    """Heads A of each attention; divides `hidden_size`."""
    seq_length: int
    """Longest sequence S, in tokens; each position has a learned embedding."""
    vocab_size: int
    """Number of token ids V."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )

    @property
    def parameter_count(self) -> int:
        """12 L H^2 + 13 L H + 2 H + (V + S) H, the tied embedding counted once."""
        layers, hidden = self.num_layers, self.hidden_size
        blocks = layers * (12 * hidden**2 + 13 * hidden)
        return blocks + 2 * hidden + (self.vocab_size + self.seq_length) * hidden


class Attention(nn.Module):
    """Causal self-attention over all heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        batch, length, width = hidden.shape
        # Rows of `qkv` are ordered (head, q|k|v, D), so that a cut by heads is a contiguous one.
        fused = self.qkv(hidden).view(batch, length, self.num_heads, 3, width // self.num_heads)
        query, key, value = fused.permute(3, 0, 2, 1, 4).unbind(0)  # each [B, A, S, D]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.output = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.output(F.gelu(self.up(hidden), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The whole model; its weights are unset until `init_weights` or a checkpoint."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each position: [B, S] int64 -> [B, S, V]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)  # [B, S, H]
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.final_norm(hidden), self.token_embedding.weight)

    def forward(self, samples: Tensor) -> Tensor:
        """Sum of the cross entropies of all predictions, in nats.

        `samples` is [B, S + 1] int64: inputs and targets overlap by all but one token. A sum, not
        a mean, since only the caller knows how many tokens the global batch has. B may be 0.
        """
        logits = self.logits(samples[:, :-1])  # [B, S, V]
        return F.cross_entropy(
            logits.flatten(0, 1).float(), samples[:, 1:].flatten(), reduction="sum"
        )


def init_weights(model: GPT, seed: int, std: float) -> None:
    """Set every parameter of `model` in place, each from a generator of its own.

    Matrices are normal with deviation `std`; those that write to the residual stream are scaled
    by 1 / sqrt(2 L), so that its variance does not grow with depth (GPT-2). Norms are identity.
    """
    residual_std = std / (2 * model.config.num_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                scale = residual_std if name.endswith(".output.weight") else std
                parameter.copy_(_normal(parameter.shape, seed, name) * scale)


def _normal(shape: torch.Size, seed: int, name: str) -> Tensor:
    # Always drawn on the CPU in fp32: a GPU's generator gives other numbers.
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32)

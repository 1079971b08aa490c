"""A block of the GPT: attention and MLP, each behind a norm and added to the residual stream.

Shapes: B samples, S positions, s of them on this rank under sequence parallelism (else S), H hidden size;
A heads, G of keys and values, D their width, F inside an MLP; a, g, f this rank's share of A, G, F.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from elastic.trainer.model.attention import causal
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.dropout import Dropout, attend
from elastic.trainer.model.recompute import again
from elastic.trainer.model.tensor_parallel import Column, Row, TensorParallel

_IN_ATTENTION, _AFTER_ATTENTION, _AFTER_MLP = range(3)
"""A layer's dropouts."""


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, on the residual stream."""

    def __init__(self, config: GPTConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.epsilon, width = tp, config.norm_epsilon, config.hidden_size
        self.weight = tp.stored(nn.Parameter(torch.empty(width)), Replicate())
        centred = config.normalization == "LayerNorm"
        self.bias = tp.stored(nn.Parameter(torch.empty(width)), Replicate()) if centred else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, s, H] -> [B, s, H]."""
        weight = self.tp.on_stream(self.weight)
        if self.bias is None:
            return F.rms_norm(hidden, weight.shape, weight, self.epsilon)
        bias = self.tp.on_stream(self.bias)
        return F.layer_norm(hidden, weight.shape, weight, bias, self.epsilon)


class Rotary(nn.Module):
    """Rotary positions, halves of a head against one another, as Llama and Megatron have them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.rotary_width
        self.base = config.rotary_base

    def turns(self, positions: Tensor) -> Tensor:
        """Angles in radians, [..., S] -> [..., S, width]; fp32, whatever is computed in."""
        device = positions.device
        frequency = torch.arange(0, self.width, 2, device=device, dtype=torch.float32) / self.width
        angles = positions.float().unsqueeze(-1) * self.base**-frequency
        return torch.cat((angles, angles), dim=-1)

    def forward(self, heads: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, A, S, D] -> [B, A, S, D]. positions: of each sample's tokens, [B, S]; None: from 0 up."""
        turned, rest = heads[..., : self.width], heads[..., self.width :]
        if positions is None:
            angles = self.turns(torch.arange(heads.shape[-2], device=heads.device))
        else:
            angles = self.turns(positions).unsqueeze(1)
        left, right = turned.float().chunk(2, dim=-1)
        swapped = torch.cat((-right, left), dim=-1)
        turned = (turned.float() * angles.cos() + swapped * angles.sin()).to(heads.dtype)
        return torch.cat((turned, rest), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over this rank's heads."""

    def __init__(self, config: GPTConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden, self.width = config.hidden_size, config.head_width
        self.groups = config.groups // tp.size
        self.queries = config.num_attention_heads // config.groups
        """A / G: queries for each head of keys and values."""
        self.tp = tp
        bias = config.bias or config.qkv_bias
        self.qkv = Column(hidden, config.qkv_width, tp, bias=bias)
        self.output = Row(config.num_attention_heads * self.width, hidden, tp, bias=config.bias)
        self.rotary = Rotary(config) if config.position == "rope" else None
        self.dropout = config.attention_dropout
        self.heads = tp.piece(config.num_attention_heads)
        self.recomputed = False
        """Whether what lies between the two linear layers is computed again in backward."""

    def forward(self, hidden: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, s, H] -> [B, s, H]."""
        fused = self.qkv(self.tp.enter(hidden))
        # torch 2.13 fails to compile it where parameters are DTensors: there Inductor alone decides.
        compiled = torch.compiler.is_compiling() and self.tp.mesh is not None
        if self.recomputed and not compiled:
            return self.output(again(self.core, fused, key))  # type: ignore[no-any-return]
        return self.output(self.core(fused, key))  # type: ignore[no-any-return]

    def core(self, fused: Tensor, dropout_key: Tensor | None) -> Tensor:
        """Queries, keys and values [B, S, (a + 2 g) D] -> [B, S, a D]."""
        query, key, value = self.parts(fused)
        if self.dropout > 0 and dropout_key is not None:
            mixed = attend(
                query, key, value, dropout_key=dropout_key, site=_IN_ATTENTION, heads=self.heads.start,
                rate=self.dropout,
            )  # fmt: skip
        else:
            mixed = causal(query, key, value)
        return mixed.transpose(1, 2).flatten(2)

    def parts(
        self, fused: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same -> [B, a, S, D], [B, g, S, D] and [B, g, S, D], turned; positions as `Rotary` has them."""
        batch, length, _ = fused.shape
        # Rows of `qkv` are ordered (group, its queries | key | value, D), as Megatron's: a cut by
        # groups is a contiguous one.
        fused = fused.view(batch, length, self.groups, self.queries + 2, self.width)
        fused = fused.permute(0, 2, 3, 1, 4)  # [B, g, A/G + 2, S, D]
        query = fused[:, :, : self.queries].flatten(1, 2)
        key, value = fused[:, :, self.queries], fused[:, :, self.queries + 1]
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        return query, key, value


class MLP(nn.Module):
    """Two linear layers around a GELU; or SwiGLU, whose `gate` decides how much of `up` passes."""

    def __init__(self, config: GPTConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden, width, self.tp = config.hidden_size, config.mlp_width, tp
        gated = config.activation == "swiglu"
        self.gate = Column(hidden, width, tp, bias=config.bias) if gated else None
        self.up = Column(hidden, width, tp, bias=config.bias)
        self.output = Row(width, hidden, tp, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, s, H] -> [B, s, H]."""
        entered = self.tp.enter(hidden)
        up = self.up(entered)  # [B, S, f]
        if self.gate is None:
            return self.output(F.gelu(up, approximate="tanh"))  # type: ignore[no-any-return]
        return self.output(F.silu(self.gate(entered)) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then MLP."""

    def __init__(self, config: GPTConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.attention_norm = Norm(config, tp)
        self.attention = Attention(config, tp)
        self.mlp_norm = Norm(config, tp)
        self.mlp = MLP(config, tp)
        self.after_attention = Dropout(config.hidden_dropout, _AFTER_ATTENTION, tp.part)
        self.after_mlp = Dropout(config.hidden_dropout, _AFTER_MLP, tp.part)

    def forward(self, hidden: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, s, H] -> [B, s, H]. key: int64 [], of this leaf and layer; None: nothing is dropped."""
        mixed = self.attention(self.attention_norm(hidden), key)
        hidden = hidden + self.after_attention(mixed, key)
        return hidden + self.after_mlp(self.mlp(self.mlp_norm(hidden)), key)  # type: ignore[no-any-return]

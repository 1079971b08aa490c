"""Which of Hugging Face's tensors are which of ours, and how one is made of the other. Pure.

Shapes: H hidden size, A heads of queries, G of keys and values, D their width, V words. Ours keep queries,
keys and values in one matrix whose rows are ordered (group, its queries | key | value, D); GPT-2 in one
that is ordered (queries | keys | values), and all of its matrices transposed; Llama in three.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from elastic.trainer.convert.shapes import Family
from elastic.trainer.model.config import GPTConfig

Kind = Literal["same", "transposed", "words", "fused", "split"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One tensor of ours, and what it is there."""

    ours: str
    theirs: tuple[str, ...]
    """One; three of a `split`: queries, keys, values."""
    kind: Kind
    shape: tuple[int, ...]
    """Of ours."""

    def to_theirs(self, tensor: Tensor, config: GPTConfig, vocabulary: int) -> list[Tensor]:
        """Views where they can be. vocabulary: words that are kept."""
        if self.kind == "words":
            return [tensor[:vocabulary]]
        if self.kind in ("same", "transposed"):
            return [tensor.t() if self.kind == "transposed" else tensor]
        parts = _apart(tensor, config)
        return [torch.cat(parts).t()] if self.kind == "fused" else parts

    def to_ours(self, tensors: Sequence[Tensor], config: GPTConfig) -> Tensor:
        """Words beyond theirs are made up: the mean of all, whose score no text makes large (it is at
        most the mean's, so P of them add at most P / V to a softmax's sum)."""
        (tensor, *_) = tensors
        if self.kind == "words":
            more = config.vocab_size - len(tensor)
            mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
            return torch.cat([tensor, mean.expand(more, -1)]) if more else tensor
        if self.kind in ("same", "transposed"):
            return tensor.t() if self.kind == "transposed" else tensor
        if self.kind == "split":
            return _together(tensors, config)
        return _together(torch.split(tensor.t(), _widths(config)), config)

    def shapes(self, config: GPTConfig, vocabulary: int) -> list[tuple[int, ...]]:
        """Of theirs."""
        rest = self.shape[1:]
        if self.kind == "words":
            return [(vocabulary, *rest)]
        if self.kind == "split":
            return [(width, *rest) for width in _widths(config)]
        return [self.shape if self.kind == "same" else self.shape[::-1]]


def links(family: Family, config: GPTConfig) -> Iterator[Link]:
    """All of a model, one by one: nothing is made of a number of layers that may be a lie."""
    hidden, words = config.hidden_size, (config.vocab_size, config.hidden_size)
    gpt2 = family == "gpt2"
    front = "transformer" if gpt2 else "model"
    embedding = f"{front}.{'wte' if gpt2 else 'embed_tokens'}.weight"
    yield Link(ours="embedding.words.weight", theirs=(embedding,), kind="words", shape=words)
    if gpt2:
        yield Link(
            ours="embedding.positions", theirs=("transformer.wpe.weight",), kind="same",
            shape=(config.positions, hidden),
        )  # fmt: skip
    for number in range(config.num_layers):
        for link in _gpt2_block(config) if gpt2 else _llama_block(config):
            there = f"{front}.{'h' if gpt2 else 'layers'}.{number}."
            yield Link(
                ours=f"blocks.{number}.{link.ours}",
                theirs=tuple(there + name for name in link.theirs),
                kind=link.kind,
                shape=link.shape,
            )
    for name, shape in _both("weight", "bias", gpt2, (hidden,)):
        theirs = f"{front}.{'ln_f' if gpt2 else 'norm'}.{name}"
        yield Link(ours=f"head.norm.{name}", theirs=(theirs,), kind="same", shape=shape)
    if not config.tied:
        yield Link(ours="head.weight", theirs=("lm_head.weight",), kind="words", shape=words)


def _both(
    first: str, second: str, has: bool, shape: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...]]]:
    return [(first, shape), (second, shape[:1])] if has else [(first, shape)]


def _gpt2_block(config: GPTConfig) -> Iterator[Link]:
    hidden, inner = config.hidden_size, config.mlp_width
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        for name in ("weight", "bias"):
            yield Link(
                ours=f"{ours}.{name}", theirs=(f"{theirs}.{name}",), kind="same", shape=(hidden,)
            )
    layers: list[tuple[str, str, Kind, tuple[int, int]]] = [
        ("attention.qkv", "attn.c_attn", "fused", (config.qkv_width, hidden)),
        ("attention.output", "attn.c_proj", "transposed", (hidden, hidden)),
        ("mlp.up", "mlp.c_fc", "transposed", (inner, hidden)),
        ("mlp.output", "mlp.c_proj", "transposed", (hidden, inner)),
    ]
    for ours, theirs, kind, shape in layers:
        yield Link(ours=f"{ours}.weight", theirs=(f"{theirs}.weight",), kind=kind, shape=shape)
        kept: Kind = "fused" if kind == "fused" else "same"
        yield Link(ours=f"{ours}.bias", theirs=(f"{theirs}.bias",), kind=kept, shape=shape[:1])


def _llama_block(config: GPTConfig) -> Iterator[Link]:
    hidden, inner = config.hidden_size, config.mlp_width
    width = config.num_attention_heads * config.head_width
    for ours, theirs in (
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
    ):
        yield Link(
            ours=f"{ours}.weight", theirs=(f"{theirs}.weight",), kind="same", shape=(hidden,)
        )
    layers: list[tuple[str, tuple[str, ...], Kind, tuple[int, int], bool]] = [
        (
            "attention.qkv", tuple(f"self_attn.{one}_proj" for one in "qkv"), "split",
            (config.qkv_width, hidden), config.bias or config.qkv_bias,
        ),
        ("attention.output", ("self_attn.o_proj",), "same", (hidden, width), config.bias),
        ("mlp.gate", ("mlp.gate_proj",), "same", (inner, hidden), config.bias),
        ("mlp.up", ("mlp.up_proj",), "same", (inner, hidden), config.bias),
        ("mlp.output", ("mlp.down_proj",), "same", (hidden, inner), config.bias),
    ]  # fmt: skip
    for ours, layer, kind, whole, bias in layers:
        for name, shape in _both("weight", "bias", bias, whole):
            names = tuple(f"{one}.{name}" for one in layer)
            yield Link(ours=f"{ours}.{name}", theirs=names, kind=kind, shape=shape)


def _widths(config: GPTConfig) -> list[int]:
    """Rows of queries, of keys, of values."""
    width = config.head_width
    return [config.num_attention_heads * width, config.groups * width, config.groups * width]


def _apart(tensor: Tensor, config: GPTConfig) -> list[Tensor]:
    """[(A + 2 G) D, ...] -> [A D, ...], [G D, ...], [G D, ...]."""
    rest = tensor.shape[1:]
    queries = config.num_attention_heads // config.groups
    groups = tensor.reshape(config.groups, queries + 2, config.head_width, *rest)
    parts = (groups[:, :queries], groups[:, queries], groups[:, queries + 1])
    return [part.reshape(-1, *rest) for part in parts]


def _together(parts: Sequence[Tensor], config: GPTConfig) -> Tensor:
    """The way back."""
    groups, width, rest = config.groups, config.head_width, parts[0].shape[1:]
    shaped = [part.reshape(groups, -1, width, *rest) for part in parts]
    return torch.cat(shaped, dim=1).reshape(-1, *rest)

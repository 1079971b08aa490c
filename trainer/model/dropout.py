"""Dropout whose masks are functions of (seed, step, leaf, layer, place), and of nothing else.

No generator has any state: whether an element is dropped is a hash of where it is in the leaf, keyed for
each layer of each leaf. A leaf goes by the place of its first sample in the run, which is step and leaf in
one. So masks are the same whoever shares out tensors, layers and leaves in what way, in a recomputed
forward, and compiled.

Shapes: n leaves, B samples of a leaf, S positions, s of them on this rank under sequence parallelism, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from elastic.trainer.transfers import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Those of a run."""

    seed: int
    """The run's."""
    layers: int
    """L of the whole model."""
    device: torch.device
    """Where they are wanted."""

    def of(self, places: Sequence[int]) -> Tensor:
        """The keys of leaves, by the places of their first samples: of embedding and layers, int64
        [n, 1 + L]."""
        drawn = [
            np.random.SeedSequence((self.seed, place)).generate_state(1 + self.layers, np.uint64)
            for place in places
        ]
        keys = torch.from_numpy((np.stack(drawn) >> np.uint64(1)).astype(np.int64))
        return to_device(keys, self.device)


def kept(key: Tensor, site: int, rows: Tensor, columns: int, rate: float) -> Tensor:
    """Which elements stay: bool [..., columns], all but a part `rate` of them.

    key: int64 []; site: which of a layer's dropouts; rows: int64 [...], a number of its own for each.
    """
    low, high = _words(key)
    row_low, row_high = _words(rows)
    word = _hash(row_low ^ low)
    word = _hash(word ^ row_high ^ high ^ _signed(site * 0x9E3779B9))
    column = _hash(torch.arange(columns, device=key.device, dtype=torch.int32))
    return _hash(word.unsqueeze(-1) ^ column) >= int(rate * 2**32) - 2**31


class Dropout(nn.Module):
    """On the residual stream; what stays is scaled up, so that means stay."""

    def __init__(self, rate: float, site: int, part: int) -> None:
        """part: which part of the positions this rank has."""
        super().__init__()
        self.rate, self.site, self.part = rate, site, part

    def forward(self, hidden: Tensor, key: Tensor | None) -> Tensor:
        """[B, s, H] -> [B, s, H]. key: of the layer, []; None: nothing is dropped."""
        if key is None or self.rate == 0:
            return hidden
        batch, length, width = hidden.shape
        sample = torch.arange(batch, device=hidden.device, dtype=torch.int64).unsqueeze(1)
        position = torch.arange(length, device=hidden.device, dtype=torch.int64)
        rows = (sample << 32) + position + self.part * length
        mask = kept(key, self.site, rows, width, self.rate)
        return torch.where(mask, hidden * (1 / (1 - self.rate)), 0.0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout_key: Tensor,
    site: int,
    heads: int,
    rate: float,
) -> Tensor:
    """Causal attention that drops a part `rate` of what each position looks at.

    No fused kernel: theirs have masks of their own. All scores are held, B x a x S x S.
    query: [B, a, S, D]; key and value: [B, g, S, D], g divides a; dropout_key: of the layer, []; heads: the
    first of this rank's in the whole layer. Returns [B, a, S, D].
    """
    batch, mine, length, width = query.shape
    key, value = (
        shared.repeat_interleave(mine // shared.shape[1], dim=1) for shared in (key, value)
    )
    scores = (query @ key.transpose(-1, -2)).float() * width**-0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    shares = scores.masked_fill(future, float("-inf")).softmax(-1)
    sample, head, position = (
        torch.arange(count, device=query.device, dtype=torch.int64).view(shape)
        for count, shape in ((batch, (-1, 1, 1)), (mine, (-1, 1)), (length, (-1,)))
    )
    rows = (sample << 48) + ((head + heads) << 32) + position
    mask = kept(dropout_key, site, rows, length, rate)
    return torch.where(mask, shares * (1 / (1 - rate)), 0.0).to(query.dtype) @ value


def _words(number: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the higher half of int64, int32 each."""
    return number.to(torch.int32), (number >> 32).to(torch.int32)


def _hash(word: Tensor) -> Tensor:
    """A permutation of int32 in which each bit depends on each; products wrap around."""
    word = (word ^ (word >> 16 & 0xFFFF)) * 0x7FEB352D
    word = (word ^ (word >> 15 & 0x1FFFF)) * _signed(0x846CA68B)
    return word ^ (word >> 16 & 0xFFFF)


def _signed(word: int) -> int:
    """The lower 32 bits, as int32 has them."""
    return (word + 2**31) % 2**32 - 2**31

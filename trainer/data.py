"""Which tokens step n trains on, and which of them are mine.

The global batch is a list of samples that (seed, step) alone decides. A rank takes every
world-size-th of them, so any world trains on the same batch, and a resumed run goes on where it
was with nothing to restore. No state belongs to a rank.

Shapes: T tokens, N samples an epoch, B samples a global batch, b of them mine, S tokens each.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastic.proto.errors import UsageError

TOKEN_TYPE = np.dtype("<u2")
"""How a token lies on disk: little-endian uint16, so ids are below 65536."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """An encoded corpus: documents one after the other, each ended by the end token."""

    path: Path
    """The file: T tokens of `TOKEN_TYPE`, no header."""
    vocab_size: int
    """All ids are below this."""
    digest: str
    """SHA-256 of the file, in hex: what a resumed run must find again."""

    def tokens(self) -> NDArray[np.uint16]:
        """All tokens, [T], mapped into memory and not writable."""
        return np.memmap(self.path, dtype=TOKEN_TYPE, mode="r")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The sequence of global batches of one run; UsageError when the corpus is too short for it."""

    tokens: NDArray[np.uint16]
    """The corpus, [T]."""
    seed: int
    """Decides the order of samples in every epoch."""
    global_batch_size: int
    """Samples B of a step, whatever the world."""
    seq_length: int
    """Tokens S that a sample predicts; it has one more, to predict from."""

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, not {self.global_batch_size}")
        if self.sample_count < 1:
            raise UsageError(
                f"{len(self.tokens)} tokens are too few for one sample of {self.seq_length} tokens"
            )

    @property
    def sample_count(self) -> int:
        """Samples N in an epoch: neighbours share one token, a last partial one is left out."""
        return (len(self.tokens) - 1) // self.seq_length

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """Ids of step's global batch, [B], each in 0..N-1; `step` counts from 0.

        Epochs follow each other without a gap, so a batch may end one and begin the next.
        """
        first = step * self.global_batch_size
        places = np.arange(first, first + self.global_batch_size)
        epochs, offsets = np.divmod(places, self.sample_count)
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = _epoch_order(self.seed, int(epoch), self.sample_count)[offsets[chosen]]
        return ids

    def local(self, step: int, rank: int, world_size: int) -> Tensor:
        """This rank's samples of the step, [b, S + 1] int64 on the CPU; b may be 0."""
        starts = share(self.sample_ids(step), rank, world_size) * self.seq_length
        rows = starts[:, None] + np.arange(self.seq_length + 1)
        return torch.from_numpy(self.tokens[rows].astype(np.int64))


def share(ids: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """Rank's part of a global batch: ids rank, rank + world_size, ...; sizes differ by one."""
    return ids[rank::world_size]


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, sample_count: int) -> NDArray[np.int64]:
    # RandomState, not Generator: numpy promises that its numbers never change.
    return np.random.RandomState([seed, epoch]).permutation(sample_count).astype(np.int64)

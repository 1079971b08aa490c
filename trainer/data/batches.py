"""Which tokens step n trains on, and which of them are mine.

`elastic.data` decides the samples of each global batch, by (seed, step) alone, so a resumed run goes
on where it was with nothing to restore. No state belongs to a rank.

Shapes: T tokens, N samples an epoch, B samples a global batch, b of them mine, S tokens each.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastic.data import Order, places
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

    def local(self, step: int, rank: int, world_size: int) -> Tensor:
        """This rank's samples of the step, which counts from 0: [b, S + 1] int64 on the CPU; b may be 0."""
        order = Order(length=self.sample_count, seed=self.seed)
        mine = places(step * self.global_batch_size, self.global_batch_size, rank, world_size)
        starts = order.ids(mine) * self.seq_length
        rows = starts[:, None] + np.arange(self.seq_length + 1)
        return torch.from_numpy(self.tokens[rows].astype(np.int64))

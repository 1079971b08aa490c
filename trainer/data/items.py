"""From the tokens of a sample to what a model trains on. Pure.

Shapes: S positions.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elastic.proto.errors import UsageError

Item = dict[str, NDArray[Any]]
"""One sample: `tokens`, `labels` and `position_ids`, int64 [S]; `loss_mask`, fp32 [S], 0 where nothing is
learnt; `dataset_id`, int64 [], which of the blended data it comes from."""


class Dataset(Protocol):
    """Samples by their number. The same number gives the same sample, in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Item: ...


class Vocabulary(Protocol):
    """What data need to know of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How items are made. As Megatron's `_get_ltor_masks_and_position_ids` has it."""

    vocab_size: int
    """Ids are below this."""
    eod: int | None = None
    """Id that ends a document; needed for what follows."""
    eod_mask_loss: bool = False
    """Where an end of document is the input, nothing is learnt."""
    reset_position_ids: bool = False
    """Positions count from 0 after each end of document."""

    @property
    def told(self) -> str:
        """What items of the same tokens are made the same by."""
        return f"eod {self.eod}, masked {self.eod_mask_loss}, reset {self.reset_position_ids}"

    def item(self, text: NDArray[np.int64], dataset: int, name: str) -> Item:
        """Of S + 1 tokens of a sample. name: of where they come from, for a message.

        UsageError for an id that the vocabulary does not have: on a device, that would end the process.
        """
        low, high = int(text.min()), int(text.max())
        if low < 0 or high >= self.vocab_size:
            raise UsageError(
                f"{name} has token id {low if low < 0 else high}, and the vocabulary {self.vocab_size}: give the tokenizer "
                "that it was preprocessed with"
            )
        tokens, labels = text[:-1], text[1:]
        mask = np.ones(len(tokens), np.float32)
        positions = np.arange(len(tokens))
        if self.eod_mask_loss:
            mask[tokens == self.eod] = 0
        if self.reset_position_ids:
            starts = np.zeros(len(tokens), np.int64)
            ends = np.flatnonzero(tokens[:-1] == self.eod)
            starts[ends + 1] = ends + 1
            positions -= np.maximum.accumulate(starts)
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": mask,
            "position_ids": positions,
            "dataset_id": np.array(dataset),
        }

"""Data without files: `--mock-data`. Each sample is a function of (seed, split, number).

Documents count up by one, as Megatron's do, from a random id over a random length, and end with the end
of document. So a model learns them soon, and down to the entropy of where documents begin and end.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from elastic.trainer.data import splits
from elastic.trainer.data.items import Form, Item

IDS = 1024
"""Ids that are counted through, at most: a small model learns them in minutes."""
WHOLE = 64
"""Samples of a set of which no number is asked for."""
LONGEST = 64
"""Tokens of a document, at most: short enough that samples are hardly ever the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MockDataset:
    """As many samples as are asked for."""

    name: str
    """Of its split."""
    samples: int
    """How many."""
    seq_length: int
    """Tokens S that a sample predicts."""
    seed: int
    """Decides them all."""
    form: Form

    @property
    def digest(self) -> str:
        """What two runs of the same data agree on."""
        whole = f"mock-{self.name}-{self.seed}-{self.seq_length}-{self.form.vocab_size}"
        return f"{whole} ({self.form.told})"

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Item:
        if not 0 <= number < self.samples:
            raise IndexError(f"sample {number} of {self.samples}")
        return self.form.item(self._text(number), 0, "mock data")

    def _text(self, number: int) -> NDArray[np.int64]:
        """S + 1 tokens."""
        # Raw words only: numpy keeps their sequence for all time, and that of its distributions not.
        words = Philox(key=self.seed, counter=[0, 0, splits.NAMES.index(self.name), number])
        ids = max(1, min(IDS, self.form.vocab_size - 1))
        first = length = np.empty(0, np.int64)  # of each document, its end included
        while length.sum() <= self.seq_length:
            drawn = words.random_raw(2 * (1 + self.seq_length * 2 // LONGEST))
            first = np.append(first, (drawn[::2] % ids).astype(np.int64))
            length = np.append(length, (drawn[1::2] % LONGEST).astype(np.int64) + 1)
        document = np.repeat(np.arange(len(length)), length)[: self.seq_length + 1]
        place = np.arange(self.seq_length + 1) - (np.cumsum(length) - length)[document]
        # The end of document is the last id, or wherever a tokenizer has it.
        return np.where(place + 1 < length[document], (place + first[document]) % ids, self._eod)

    @property
    def _eod(self) -> int:
        return self.form.vocab_size - 1 if self.form.eod is None else self.form.eod

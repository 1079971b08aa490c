"""This rank's leaves of batch after batch, read ahead of the steps."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from elastic.data import Leaf
from elastic.trainer.data.items import Dataset
from elastic.trainer.data.loader import Loader
from elastic.trainer.run.step import Share


class Feed(Iterator[Share]):
    """Shares of a run's steps, or of an evaluation's. To be closed."""

    def __init__(
        self,
        dataset: Dataset,
        batches: Iterator[Sequence[Leaf]],
        *,
        device: torch.device,
        workers: int,
    ) -> None:
        """batches: this rank's leaves of each, in order; workers: threads that read."""
        self._leaves: deque[Sequence[Leaf]] = deque()
        self._device = device
        self._loader = Loader(
            dataset, self._numbers(batches), workers=workers, pin=device.type == "cuda"
        )

    def __next__(self) -> Share:
        found = next(self._loader)
        batch = {name: one.to(self._device, non_blocking=True) for name, one in found.items()}
        return Share(self._leaves.popleft(), batch)

    def close(self) -> None:
        self._loader.close()

    def _numbers(self, batches: Iterator[Sequence[Leaf]]) -> Iterator[NDArray[np.int64]]:
        for leaves in batches:
            self._leaves.append(leaves)
            yield np.concatenate([leaf.places for leaf in leaves])

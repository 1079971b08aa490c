"""Samples, read ahead of the step that trains on them.

Threads, not processes: a sample is a few slices of mapped files, so there is little for an interpreter to
do, and threads neither hold memory of their own nor outlive their run. A batch is what its numbers say,
whoever reads it and when; so nothing here is state.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from elastic.trainer.data.items import Dataset

Batch = dict[str, Tensor]
"""Samples one below the other: an item's arrays, each with a dimension [b] in front."""

AHEAD = 4
"""Batches that are read before they are asked for, for each thread."""


class Loader(Iterator[Batch]):
    """Batches of the samples with the numbers that it is given, in that order.

        with Loader(dataset, leaves, workers=2) as batches:
            for batch in batches: ...

    What goes wrong with a batch is raised in its place. To be closed, by `with` or by `close`.
    """

    def __init__(
        self,
        dataset: Dataset,
        numbers: Iterable[Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]],
        *,
        workers: int = 2,
        pin: bool = False,
    ) -> None:
        """numbers: of the samples of each batch; may be endless, and is drawn from by who asks.

        workers: threads; with 0 a batch is read when it is asked for. pin: into memory from which a CUDA
        device copies by itself.
        """
        self._dataset = dataset
        self._numbers = iter(numbers)
        self._pin = pin
        self._ahead = AHEAD * workers
        self._coming: deque[Future[Batch]] = deque()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None

    def __next__(self) -> Batch:
        if self._threads is None:
            return self._read(next(self._numbers))
        self._fill(self._threads)
        if not self._coming:
            raise StopIteration
        batch = self._coming.popleft().result()
        self._fill(self._threads)
        return batch

    def _fill(self, threads: ThreadPoolExecutor) -> None:
        while len(self._coming) < self._ahead:
            try:
                numbers = next(self._numbers)
            except StopIteration:
                return
            self._coming.append(threads.submit(self._read, numbers))

    def _read(self, numbers: Iterable[int]) -> Batch:
        items = [self._dataset[int(number)] for number in numbers]
        batch = {
            name: torch.from_numpy(np.stack([np.asarray(item[name]) for item in items]))
            for name in items[0]
        }
        return {name: one.pin_memory() for name, one in batch.items()} if self._pin else batch

    def close(self) -> None:
        """Stop reading; returns when nothing is read any more."""
        if self._threads is not None:
            self._coming.clear()
            self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

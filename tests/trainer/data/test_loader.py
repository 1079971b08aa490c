import threading
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch

from elastic.proto.errors import UsageError
from elastic.trainer.data.items import Item
from elastic.trainer.data.loader import AHEAD, Loader


class Numbers:
    """Sample n is [n, n]; 13 is no sample."""

    def __init__(self, last: int = -1) -> None:
        self.read: list[int] = []
        self.last, self.come = last, threading.Event()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> Item:
        self.read.append(number)
        if number == self.last:
            self.come.set()
        if number == 13:
            raise UsageError("sample 13 is damaged")
        return {"tokens": np.full(2, number), "dataset_id": np.array(number % 2)}


def threads() -> set[str]:
    return {one.name for one in threading.enumerate() if one.name.startswith("data")}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_in_the_order_of_their_numbers(workers: int) -> None:
    with Loader(Numbers(), ([k, k + 1] for k in range(0, 12, 2)), workers=workers) as batches:
        found = list(batches)
    assert [one["tokens"].tolist() for one in found] == [
        [[k, k], [k + 1, k + 1]] for k in range(0, 12, 2)
    ]
    assert found[0]["dataset_id"].tolist() == [0, 1]
    assert found[0]["tokens"].dtype == torch.int64
    assert not threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_goes_wrong_is_raised_in_its_place(workers: int) -> None:
    with Loader(Numbers(), ([k] for k in count(10)), workers=workers) as batches:
        assert [next(batches)["tokens"].tolist() for _ in range(3)] == [
            [[10, 10]],
            [[11, 11]],
            [[12, 12]],
        ]
        with pytest.raises(UsageError, match="sample 13 is damaged"):
            next(batches)
        assert next(batches)["tokens"].tolist() == [[14, 14]]
    assert not threads()


def test_it_reads_ahead_and_no_further() -> None:
    dataset = Numbers(last=20 + AHEAD)
    with Loader(dataset, ([k] for k in count(20)), workers=1) as batches:
        next(batches)
        assert dataset.come.wait(60), dataset.read
    assert dataset.read == list(range(20, 20 + AHEAD + 1))


def test_what_numbers_raise_is_not_lost() -> None:
    def broken() -> Iterator[list[int]]:
        yield [1]
        raise RuntimeError("no more")

    with Loader(Numbers(), broken()) as batches, pytest.raises(RuntimeError, match="no more"):
        list(batches)
    assert not threads()

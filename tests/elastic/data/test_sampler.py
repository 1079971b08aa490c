"""A real DataLoader with four workers that read ahead, interrupted anywhere, at another world size."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from elastic.data import ElasticSampler, Order, places
from elastic.proto.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")


class Ids(Dataset[int]):
    """Each sample is its own id."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def plain(batch: list[int]) -> list[int]:
    return batch


def loader_of(sampler: Any, length: int, workers: int = 0, **options: Any) -> DataLoader[int]:
    return DataLoader(
        Ids(length), batch_sampler=sampler, num_workers=workers, collate_fn=plain, **options
    )


def rank_of(
    world: int, rank: int, length: int, batch: int, workers: int, place: dict[str, Any] | None
) -> tuple[ElasticSampler, Iterator[list[int]]]:
    """A sampler and its batches, epoch after epoch."""
    sampler = ElasticSampler(length, batch, seed=3, rank=rank, num_replicas=world)
    if place is not None:
        sampler.load_state_dict(place)
    loader = loader_of(sampler, length, workers)

    def forever() -> Iterator[list[int]]:
        while True:
            yield from sampler.batches(loader)

    return sampler, forever()


def test_what_workers_read_ahead_is_not_consumed() -> None:
    """Lives of other worlds, killed at random points, see what one that never dies sees."""
    length, batch, chance = 103, 12, random.Random(7)
    place: dict[str, Any] | None = None
    seen: list[int] = []
    for world in (2, 3, 1, 5):
        ranks = [rank_of(world, rank, length, batch, 4, place) for rank in range(world)]
        for _ in range(chance.randrange(1, 12)):
            shares = [next(batches) for _, batches in ranks]
            assert sorted(map(len, shares)) == sorted(
                len(places(0, batch, rank, world)) for rank in range(world)
            )
            for turn in range(max(map(len, shares))):
                seen += [share[turn] for share in shares if turn < len(share)]
            states = [sampler.state_dict() for sampler, _ in ranks]
            assert all(state == states[0] for state in states)
            place = states[0]
    assert len(seen) > length
    assert seen == Order(length=length, seed=3).ids(places(0, len(seen))).tolist()
    assert place is not None
    assert place["consumed"] == len(seen)


def test_an_epoch_ends_and_the_next_goes_on_behind_it() -> None:
    length, batch = 10, 4
    sampler = ElasticSampler(length, batch, shuffle=False)
    loader = loader_of(sampler, length)
    assert (len(loader), sampler.epoch) == (3, 0)
    assert list(sampler.batches(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert (len(loader), sampler.epoch) == (2, 1)
    assert list(sampler.batches(loader)) == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert (len(loader), sampler.epoch) == (3, 2)


def test_a_loop_that_is_left_is_gone_on_with() -> None:
    sampler = ElasticSampler(12, 4, shuffle=False)
    loader = loader_of(sampler, 12)
    assert next(sampler.batches(loader)) == [0, 1, 2, 3]
    assert list(sampler.batches(loader)) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_workers_that_stay_begin_where_training_is() -> None:
    sampler = ElasticSampler(20, 2, shuffle=False)
    loader = loader_of(sampler, 20, 4, persistent_workers=True)
    assert list(islice(sampler.batches(loader), 3)) == [[0, 1], [2, 3], [4, 5]]
    assert [ids[0] for ids in sampler.batches(loader)] == [6, 8, 10, 12, 14, 16, 18]
    assert next(sampler.batches(loader)) == [0, 1]


def test_another_batch_size_goes_on_from_the_same_sample() -> None:
    first = ElasticSampler(12, 4, seed=1)
    taken = next(first.batches(loader_of(first, 12)))
    second = ElasticSampler(12, 8, seed=1)
    second.load_state_dict(first.state_dict())
    taken += next(second.batches(loader_of(second, 12)))
    assert sorted(taken) == list(range(12))


def test_the_world_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = ElasticSampler(12, 6, shuffle=False)
    assert next(sampler.batches(loader_of(sampler, 12))) == [1, 4]


def iterate(sampler: ElasticSampler) -> None:
    list(loader_of(sampler, 12))


def as_sampler(sampler: ElasticSampler) -> None:
    next(sampler.batches(DataLoader(Ids(12), sampler=sampler)))


def out_of_order(sampler: ElasticSampler) -> None:
    next(sampler.batches(loader_of(sampler, 12, 4, in_order=False)))


def of_somebody_else(sampler: ElasticSampler) -> None:
    next(sampler.batches(DataLoader(Ids(12))))


def loaded_meanwhile(sampler: ElasticSampler) -> None:
    for _ in sampler.batches(loader_of(sampler, 12)):
        sampler.load_state_dict(sampler.state_dict())


def twice_at_a_time(sampler: ElasticSampler) -> None:
    loader = loader_of(sampler, 12)
    for _ in sampler.batches(loader):
        next(sampler.batches(loader))


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (iterate, "not over the loader"),
        (as_sampler, "batch_sampler=sampler"),
        (out_of_order, "in_order=True"),
        (of_somebody_else, "from elsewhere"),
        (loaded_meanwhile, "in a loop over them"),
        (twice_at_a_time, "in a loop over them"),
    ],
)
def test_what_would_count_wrong_is_refused(
    mistake: Callable[[ElasticSampler], None], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        mistake(ElasticSampler(12, 4))


@pytest.mark.parametrize("other", [{"length": 13}, {"seed": 1}, {"shuffle": False}])
def test_a_place_in_other_samples_is_refused(other: dict[str, Any]) -> None:
    state = ElasticSampler(12, 4).state_dict()
    (name,) = other
    with pytest.raises(UsageError, match=f"saved with {name} "):
        ElasticSampler(12, 4).load_state_dict(state | other)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"consumed": -5}, "consumed is at least 0, not -5"),
        ({"consumed": 5.5}, r"consumed is a whole number, not 5\.5"),
        ({"consumed": None}, "consumed is a whole number, not None"),
    ],
)
def test_a_state_that_is_none_is_refused(other: dict[str, Any], why: str) -> None:
    sampler = ElasticSampler(12, 4)
    with pytest.raises(UsageError, match=why):
        sampler.load_state_dict(sampler.state_dict() | other)
    with pytest.raises(UsageError, match=r"^a sampler's state has consumed, and this has not"):
        sampler.load_state_dict({})
    assert sampler.consumed == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 2, "rank": 0, "num_replicas": 3}, "a step over all ranks"),
        ({"batch_size": 4, "rank": 3, "num_replicas": 3}, "no rank 3 of 3"),
        ({"batch_size": 4, "rank": 0}, "both, or neither"),
        ({"batch_size": 0}, "batch_size is at least 1, not 0"),
        ({"batch_size": 4.0}, r"batch_size is a whole number, not 4\.0"),
        ({"batch_size": 4, "leaf_size": "2"}, "leaf_size is a whole number, not '2'"),
        ({"batch_size": 4, "rank": 0, "num_replicas": "1"}, "ranks is a whole number, not '1'"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ElasticSampler(12, **options)

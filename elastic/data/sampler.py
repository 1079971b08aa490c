"""A sampler whose place is what training has consumed, and means the same to any world."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from elastic.data.leaves import Leaves
from elastic.data.order import Order, check_rank, places, whole
from elastic.proto import env
from elastic.proto.errors import UsageError

T = TypeVar("T")


class LoadedLeaf(NamedTuple, Generic[T]):
    """What a rank runs next of its leaves."""

    batch: T
    """Of `leaf_size` samples, as the loader gives them."""
    weight: float
    """What the sum of their losses is multiplied by: 1 / batch_size, 0 for padding."""
    last: bool
    """Whether the step ends with it."""


class ElasticSampler(Sampler[list[int]]):
    """In DistributedSampler's place: shares each global batch out among the ranks.

        sampler = ElasticSampler(dataset, batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        step = checkpoint.load(state)
        while sampler.epoch < epochs:
            for batch in sampler.batches(loader):
                train(batch)
                step += 1
                checkpoint.save(step, state)

    With `leaf_size` the loader's batches are leaves, and `leaves` takes the place of `batches`.

    A batch counts as consumed when `batches` hands it out, however far workers have read ahead, so
    save after training on it. The state is the same on every rank.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        num_replicas: int | None = None,
        leaf_size: int | None = None,
    ) -> None:
        """dataset: it, or how many samples it has; batch_size: samples of a step over all ranks.

        rank, num_replicas: which part of each batch is this process's; by default of all ranks.
        leaf_size: samples of a micro-batch; then any number of ranks will do.
        Raises `UsageError` for a batch with fewer samples than there are ranks, or that is no whole
        number of leaves.
        """
        if (rank is None) != (num_replicas is None):
            raise UsageError("ElasticSampler takes rank and num_replicas both, or neither")
        self._rank, self._world_size = _world() if rank is None else (rank, num_replicas or 0)
        check_rank(self._rank, self._world_size)
        whole("batch_size", batch_size, least=1)
        self._leaves = (
            None if leaf_size is None else Leaves(batch_size=batch_size, leaf_size=leaf_size)
        )
        if self._leaves is None and batch_size < self._world_size:
            raise UsageError(
                f"a batch of {batch_size} samples has none for some of {self._world_size} ranks: "
                "ElasticSampler's batch_size is that of a step over all ranks"
            )
        self.batch_size = batch_size
        self.consumed = 0
        """Samples that training has had, over all ranks and epochs."""
        self._order = Order(
            length=dataset if isinstance(dataset, int) else len(dataset), seed=seed, shuffle=shuffle
        )
        self._iteration: object | None = None
        """The one that counts."""
        self._awaited = False
        """`batches` has asked a loader that has not asked us yet."""

    @property
    def epoch(self) -> int:
        """In which the next batch begins. A batch that ends an epoch is filled from the next one."""
        return self.consumed // self._order.length

    def __len__(self) -> int:
        """Batches, or this rank's leaves, up to the end of this epoch."""
        return len(self._starts) * (self._leaves.per_rank(self._world_size) if self._leaves else 1)

    @property
    def _starts(self) -> range:
        """The samples consumed before each of them."""
        return range(self.consumed, (self.epoch + 1) * self._order.length, self.batch_size)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches up to the end of this epoch, from the place where training is."""
        if self._leaves:
            raise UsageError(
                "a sampler with leaf_size has leaves: loop over sampler.leaves(loader)"
            )
        for batch in self._read(loader):
            self.consumed += self.batch_size
            yield batch

    def leaves(self, loader: Iterable[T]) -> Iterator[LoadedLeaf[T]]:
        """The loader's leaves up to the end of this epoch, from the place where training is.

            for batch, weight, last in sampler.leaves(loader):
                (losses(model(batch)).sum() * weight).backward()
                if last:
                    optimizer.step()

        The gradients of all ranks' leaves add up to that of the mean of the global batch. A batch is
        consumed when its last leaf is handed out.
        """
        if not self._leaves:
            raise UsageError("a sampler has leaves with leaf_size=, the samples of one")
        mine = self._leaves.of(0, self._rank, self._world_size)
        for number, batch in enumerate(self._read(loader)):
            leaf = mine[number % len(mine)]
            last = leaf is mine[-1]
            self.consumed += self.batch_size if last else 0
            yield LoadedLeaf(batch, leaf.weight, last)

    def _read(self, loader: Iterable[T]) -> Iterator[T]:
        """What the loader has drawn from this sampler, and in its order."""
        if getattr(loader, "sampler", None) is self:
            raise UsageError("an ElasticSampler makes batches: DataLoader(batch_sampler=sampler)")
        if not getattr(loader, "in_order", True):
            raise UsageError("an ElasticSampler needs its batches in order: in_order=True")
        self._iteration = mine = object()
        self._awaited = True
        for batch in loader:
            if self._iteration is not mine:
                raise UsageError("the sampler was loaded or asked for batches in a loop over them")
            if self._awaited:
                raise UsageError("this loader takes its samples from elsewhere, not this sampler")
            yield batch

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of this rank's ids; to be drawn by a loader only."""
        if not self._awaited:
            raise UsageError(
                "loop over sampler.batches(loader), or leaves(loader), not over the loader: a loader "
                "reads ahead, and the sampler would not know what was consumed"
            )
        return self._drawn(self._starts)

    def _drawn(self, starts: range) -> Iterator[list[int]]:
        self._awaited = False  # a loader may make several iterators, and draws from one
        for consumed in starts:
            for mine in self._shares(consumed):
                yield self._order.ids(mine).tolist()

    def _shares(self, consumed: int) -> list[NDArray[np.int64]]:
        """The places of each batch that the loader makes of one step."""
        rank, size = self._rank, self._world_size
        if self._leaves:
            return [leaf.places for leaf in self._leaves.of(consumed, rank, size)]
        return [places(consumed, self.batch_size, rank, size)]

    def state_dict(self) -> dict[str, Any]:
        """The place, and what it is a place in."""
        order = self._order
        return {
            "consumed": self.consumed,
            "length": order.length,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a place; with any world and batch size, but only in the same samples.

        Raises `UsageError` where length, seed or shuffle is another, and where it is no sampler's state.
        """
        for name, mine in self.state_dict().items():
            if name not in state_dict:
                raise UsageError(f"a sampler's state has {name}, and this has not: it is another's")
            if name != "consumed" and state_dict[name] != mine:
                raise UsageError(
                    f"the sampler was saved with {name} {state_dict[name]}, not {mine}: with that "
                    "its samples have another order"
                )
        self.consumed = whole("consumed", state_dict["consumed"], least=0)
        self._iteration = None


def _world() -> tuple[int, int]:
    """Rank and number of ranks, as the process group has them or the launcher; else one alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    variables = env.process_environment()
    return int(variables.get("RANK", "0")), int(variables.get("WORLD_SIZE", "1"))

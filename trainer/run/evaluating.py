"""The model on samples that it is not trained on."""

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from elastic.data import Leaf, Leaves
from elastic.trainer.data.items import Dataset
from elastic.trainer.parallel.layout import Laid
from elastic.trainer.run.feed import Feed
from elastic.trainer.run.step import Share, Stepper
from elastic.trainer.run.told import watched
from elastic.trainer.watch.evaluation import Piece, Reading, pieces
from elastic.trainer.watch.probes import ProbeSet


def evaluate(
    stepper: Stepper,
    laid: Laid,
    dataset: Dataset,
    reading: Reading,
    leaves: Leaves,
    *,
    workers: int,
) -> dict[str, float]:
    """Means over what `reading` reads, by name, on every rank; the same in any world. What has no tokens in it
    is left out.

    leaves: how a batch is cut; workers: threads that read. Raises UsageError for an empty set.
    """
    with stepper.anew():
        totals, unnamed = _totals(stepper, laid, dataset, reading, leaves, workers)
        if unnamed:  # a later batch reports what the first did not: all of them once more
            stepper.agree()
            totals, _ = _totals(stepper, laid, dataset, reading, leaves, workers)
    return {name: float(total / of) for name, (total, of) in totals.items() if of}


def probe(
    stepper: Stepper, laid: Laid, probes: ProbeSet, leaves: Leaves
) -> dict[str, dict[str, float]]:
    """What probes come to, on every rank. leaves: of a batch of all of them. Raises UsageError where there is no loss
    to look at."""
    mine = leaves.of(0, laid.place.dp, laid.grid.dp)
    feed = Feed(probes, iter([mine]), device=laid.device, workers=0)
    try:
        with stepper.anew():
            means = stepper.means(next(feed), leaves)
        return probes.results(means[watched(means, "--probe-file")].tolist())
    finally:
        feed.close()


def _totals(
    stepper: Stepper, laid: Laid, dataset: Dataset, reading: Reading, leaves: Leaves, workers: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Of all batches, and how many leaves reported what is not among it."""
    batches = functools.partial(pieces, reading, leaves, laid.place.dp, laid.grid.dp)
    feed = Feed(dataset, _leaves(batches()), device=laid.device, workers=workers)
    totals: dict[str, Tensor] = {}
    unnamed = torch.zeros((), device=laid.device)
    try:
        for share, mine in zip(feed, batches(), strict=True):
            sums = stepper.evaluate(_counted(share, mine), leaves)
            unnamed = unnamed + sums.unnamed
            for name, total in sums.totals.items():
                totals[name] = totals.get(name, torch.zeros_like(total)) + total
    finally:
        feed.close()
    return totals, unnamed


def _leaves(batches: Iterable[Sequence[Piece]]) -> Iterator[list[Leaf]]:
    for mine in batches:
        yield [Leaf(number=one.number, places=one.ids, weight=1.0) for one in mine]


def _counted(share: Share, mine: Sequence[Piece]) -> Share:
    """Without the samples that only fill up."""
    counts = torch.cat([torch.from_numpy(one.counts) for one in mine])
    mask = share.batch["loss_mask"]
    counted = counts.to(mask).view(-1, *[1] * (mask.dim() - 1))  # a team's may be one a sample
    return Share(share.leaves, share.batch | {"loss_mask": mask * counted})

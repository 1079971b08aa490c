"""Which samples each step of a run has, and how they are cut into leaves. Pure."""

from dataclasses import dataclass, replace

from elastic.data import Leaf, Leaves, Skips
from elastic.trainer.schedules import BatchSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Of a whole run, in any world."""

    sizes: BatchSizes
    """Samples of each batch."""
    steps: int
    """Of the run."""
    leaf_size: int
    """Samples of a leaf."""
    multiple: int = 1
    """Leaves of a rank are a multiple of this, and..."""
    at_least: int = 1
    """...at least so many: what the pipeline's schedule wants."""

    def leaves(self, step: int) -> Leaves:
        """How the batch of `step` is cut; steps count from 0."""
        return self.cut(self.sizes.at(self.consumed(step)))

    def cut(self, batch_size: int) -> Leaves:
        """How a batch of so many samples is cut."""
        return Leaves(
            batch_size=batch_size,
            leaf_size=self.leaf_size,
            multiple=self.multiple,
            at_least=self.at_least,
        )

    def consumed(self, step: int) -> int:
        """Samples before `step`."""
        return self.sizes.consumed(step)

    @property
    def samples(self) -> int:
        """Of the whole run."""
        return self.consumed(self.steps)

    def of(self, step: int, skips: Skips, rank: int, size: int) -> list[Leaf]:
        """What one of `size` replicas runs of `step`, with what the run leaves out left out; what is then
        missing at the end of its samples is read from their beginning."""
        mine, line = self.leaves(step).of(self.consumed(step), rank, size), self.line(skips)
        return [replace(leaf, places=line.places(leaf.places) % self.samples) for leaf in mine]

    def line(self, skips: Skips) -> Skips:
        """What is left out where the run's samples follow one another twice."""
        again = ((first + self.samples, end + self.samples) for first, end in skips.ranges)
        return Skips.of([*skips.ranges, *again])

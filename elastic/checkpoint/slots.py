"""A rank's own slots: which one is written next, and the writing."""

import mmap
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from elastic.checkpoint.image import Image
from elastic.proto import slot, sums
from elastic.proto.errors import ProtocolMismatch, SlotError
from elastic.proto.moment import Moment
from elastic.proto.slot import Snapshot, Stamp
from elastic.proto.sums import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a slot holds, as far as its reuse goes."""

    moment: Moment | None
    """None: nothing that is whole in itself."""
    whole: bool = False
    """Every rank is known to hold the same moment."""


def reusable(
    contents: Sequence[Content],
    now: int,
    loaded: Moment | None,
    keep: Collection[Moment] = (),
) -> list[int]:
    """The slots that may be written over, in the order in which they are to be tried. Pure.

    now: the round of these ranks; loaded: what they went on from; keep: what the master wants kept,
    since it is, or is being, replicated. Kept are, beside that, what was loaded, until this
    round has something whole, and of this round the newest whole moment and what may still become
    whole. What else earlier rounds left is void once something was loaded; until then it is kept from
    the newest whole moment on, since others may know of a newer one.
    """
    newest = max((c.moment for c in contents if c.whole and c.moment is not None), default=None)

    def spent(content: Content) -> bool:
        if content.moment is None:
            return True
        if content.moment in keep:
            return False
        if content.moment == loaded:
            return newest is not None and newest.round == now and newest > loaded
        if content.moment.round < now and (loaded is not None or newest is None):
            return True
        return newest is not None and content.moment < newest

    free = [index for index, content in enumerate(contents) if spent(content)]
    return sorted(free, key=lambda index: contents[index].moment or Moment(-1, -1))


class Slots:
    """The slots that a keeper has given to this rank, mapped."""

    def __init__(self, fds: Sequence[int]) -> None:
        """fds: ours from here on. Raises OSError where their memory cannot be had."""
        self._fds = list(fds)
        self._views: list[memoryview] = []
        self._generation = 0
        for fd in fds:
            size = os.fstat(fd).st_size
            os.posix_fallocate(
                fd, 0, size
            )  # an error now, where a page's absence is a SIGBUS later
            self._views.append(memoryview(mmap.mmap(fd, size)))
        for snapshot in self._snapshots():
            if snapshot is not None:
                self._generation = max(self._generation, snapshot.stamp.generation)

    @property
    def bytes(self) -> int:
        """Of the smallest one."""
        return min(map(len, self._views), default=0)

    def contents(self) -> list[Content]:
        return [
            Content(moment=None)
            if snapshot is None
            else Content(
                moment=Moment(snapshot.stamp.round, snapshot.stamp.step),
                whole=bool(snapshot.all_units),
            )
            for snapshot in self._snapshots()
        ]

    def _snapshots(self) -> list[Snapshot | None]:
        found: list[Snapshot | None] = []
        for view in self._views:
            try:
                found.append(slot.read(view))
            except (SlotError, ProtocolMismatch):
                found.append(None)
        return found

    def write(
        self,
        order: Sequence[int],
        stamp: Callable[[int], Stamp],
        image: Image,
        fill: Callable[[memoryview], tuple[list[Chunk], tuple[int, ...]]],
    ) -> int | None:
        """Write a snapshot into the first slot of `order` that nobody reads; None where all are read.

        stamp: makes one of a generation; fill: fills the image but for its table, and returns its
        chunks and units.
        """
        for index in order:
            claim = slot.claim(self._fds[index], exclusive=True)
            if claim is None:
                continue
            try:
                self._generation += 1
                view = self._views[index]
                count = image.sums_bytes // sums.ENTRY
                writing = slot.Writing(view, stamp(self._generation), image.nbytes, count)
                writing.commit(*fill(writing.image))
            finally:
                os.close(claim)
            return index
        return None

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._views.clear()

"""A rank's own slots: which one is written next, and the writing."""

import errno
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Self

from elastic.checkpoint.memory import host, lanes
from elastic.checkpoint.memory.lanes import Lane
from elastic.checkpoint.save import claims
from elastic.checkpoint.state.image import Image
from elastic.proto import slot, sums
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError
from elastic.proto.moment import Moment
from elastic.proto.slot import Belief, Head, Stamp, Writing
from elastic.proto.sums import Chunk

PART = 16 << 20
"""Bytes of a slot that are touched, and registered, at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a slot holds, as far as its reuse goes."""

    moment: Moment | None
    """None: nothing that is whole in itself, or may be whole on every rank."""
    whole: bool = False
    """Every rank is known to hold the same moment."""
    due: bool = False
    """It is to be written to storage, and is not known to be there."""


def reusable(
    contents: Sequence[Content],
    now: int,
    loaded: Moment | None,
    keep: Collection[Moment] = (),
) -> list[int]:
    """The slots that may be written over, in the order in which they are to be tried: what is still to
    go to storage comes last. Pure.

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
    return sorted(
        free, key=lambda index: (contents[index].due, contents[index].moment or Moment(-1, -1))
    )


def choices(
    contents: Sequence[Content],
    now: int,
    loaded: Moment | None,
    keep: Collection[Moment] = (),
) -> tuple[list[int], list[int]]:
    """What a save may write over, in the order in which it is tried: slots in whose place nothing is owed
    to storage, then others, in whose place a snapshot goes there. Pure."""
    order = reusable(contents, now, loaded, keep)
    late = [index for index in order if contents[index].due]
    return [index for index in order if index not in late], late


class NoMemory(CheckpointError):
    """The pages of a slot cannot be had."""


class GivenBack(Exception):
    """These slots are used no more."""


def _known(memory: memoryview) -> bool:
    """It was touched and registered ahead."""
    return lanes.registered(memory) is not None


class Draft:
    """A slot that is claimed and written; given up where it is not committed."""

    def __init__(self, index: int, claimed: int, writing: Writing) -> None:
        self.index = index
        self.image = writing.image
        self._claimed = claimed
        self._writing = writing

    def commit(
        self, chunks: Sequence[Chunk], units: Sequence[int], beliefs: Sequence[Belief] = ()
    ) -> None:
        """The image is filled but for its table, of these chunks."""
        self._writing.commit(chunks, units, beliefs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        claims.release(self._claimed)


class Slots:
    """The slots that a keeper has given to this rank, mapped. For several threads."""

    def __init__(
        self,
        fds: Sequence[int],
        threads: int = 1,
        lane: Lane | None = None,
    ) -> None:
        """fds: ours from here on; threads: as many touch a slot's pages; lane: each part (`PART`) of a
        slot is registered with it before it is written."""
        self._fds = list(fds)
        self._threads = threads
        self._lane = lane
        self._views = [host.shared(fd) for fd in fds]
        self._preparing = [Lock() for _ in fds]
        self._prepared = [lane is not None and _known(view) for view in self._views]
        self._awaited = [False] * len(fds)
        self._generation = 0
        self._closed = False
        for head in self._heads():
            if head is not None:
                self._generation = max(self._generation, head.stamp.generation)

    @property
    def bytes(self) -> int:
        """Of the smallest one."""
        return min(map(len, self._views), default=0)

    @property
    def count(self) -> int:
        return len(self._fds)

    @property
    def views(self) -> Sequence[memoryview]:
        return self._views

    @property
    def prepared(self) -> int:
        """How many can be written without waiting for their pages."""
        return sum(self._prepared)

    def leave_to_another(self) -> None:
        """Another thread prepares each of them once: until then none is written that is not prepared."""
        self._awaited = [not prepared for prepared in self._prepared]

    def awaited(self, indices: Sequence[int]) -> bool:
        """Whether another thread is still to prepare one of them."""
        return any(self._awaited[index] for index in indices)

    def prepare(self, index: int) -> None:
        """Have all pages of a slot there, so that none is missing when it is written, which would be a
        SIGBUS. Raises `NoMemory`."""
        try:
            self._prepare(index)
        finally:
            self._awaited[index] = False

    def _prepare(self, index: int) -> None:
        with self._preparing[index]:
            if self._prepared[index]:
                return
            view, fd = self._views[index], self._fds[index]

            def part(at: int) -> None:
                if self._closed:
                    raise GivenBack
                if _known(view[at : at + PART]):
                    return
                huge = self._lane is not None
                error = host.populate(view[at : at + PART], write=True, huge=huge)
                if error == errno.EINVAL:  # a kernel before 5.14
                    try:
                        os.posix_fallocate(fd, at, min(PART, len(view) - at))
                    except OSError as failed:
                        error = failed.errno or errno.ENOMEM
                if error not in (0, errno.EINVAL):
                    raise NoMemory(f"no memory for a slot: {os.strerror(error)}")
                if self._lane is not None:
                    self._lane.register(view[at : at + PART])

            enter = None if self._lane is None else self._lane.enter
            host.each(part, range(0, len(view), PART), self._threads, enter)
            self._prepared[index] = True

    def contents(self) -> list[Content]:
        return [
            Content(moment=None)
            if head is None
            else Content(
                moment=Moment(head.stamp.round, head.stamp.step),
                whole=bool(head.all_units),
                due=head.stamp.persist,
            )
            for head in self._heads()
        ]

    def _heads(self) -> list[Head | None]:
        found: list[Head | None] = []
        for view in self._views:
            try:
                found.append(slot.look(view))
            except (SlotError, ProtocolMismatch):
                found.append(None)
        return found

    def begin(
        self, order: Sequence[int], stamp: Callable[[int], Stamp], image: Image
    ) -> Draft | None:
        """The first slot of `order` that nobody reads, to be written; None where all are read or awaited.
        Those whose pages are there come first.

        stamp: makes one of a generation.
        """
        for index in sorted(order, key=lambda index: not self._prepared[index]):
            if self._awaited[index]:
                continue
            claimed = claims.claim(self._fds[index], exclusive=True)
            if claimed is None:
                continue
            try:
                self.prepare(index)
                self._generation += 1
                writing = Writing(
                    self._views[index],
                    stamp(self._generation),
                    image.nbytes,
                    image.sums_bytes // sums.ENTRY,
                )
                return Draft(index, claimed, writing)
            except BaseException:
                claims.release(claimed)
                raise
        return None

    def mark_persist(self, moment: Moment) -> bool:
        """What this rank has of it is to be written to storage; whether it has any."""
        for view, content in zip(self._views, self.contents(), strict=True):
            if content.moment == moment:
                slot.mark_persist(view)
                return True
        return False

    def give_up(self) -> None:
        """What is being prepared need not be."""
        self._closed = True

    def close(self) -> None:
        """When nothing is prepared or written any more."""
        if self._lane is not None:
            for view in self._views:
                self._lane.forget(view)
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._views.clear()

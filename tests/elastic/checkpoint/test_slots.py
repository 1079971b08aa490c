"""Which slot is written over: never one that a later round may need, and always some in the end."""

import functools
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from elastic.checkpoint import host, lanes
from elastic.checkpoint.image import Image, lay_out
from elastic.checkpoint.slots import PART, Content, GivenBack, Slots, early, reusable
from elastic.proto import slot, sums
from elastic.proto.moment import Moment
from elastic.proto.slot import Stamp
from elastic.proto.sums import Chunk

NONE = Moment(0, 0)


class Extent(NamedTuple):
    """How far the model goes."""

    slots: int
    steps: int
    rounds: int
    flushing: bool = False
    """A flusher may hold one moment of each rank, from any time on, for as long as it likes."""
    kept: int = 0
    """So many whole moments the master may name, to be kept since they are replicated; of those that
    become one too many, the oldest goes."""


class Rank(NamedTuple):
    """One of two: what its slots hold, and whether that is known to be whole; NONE: nothing."""

    held: tuple[tuple[Moment, bool], ...]
    told: Moment
    """The newest that it was told is whole."""
    step: int
    pinned: Moment = NONE
    """What of it the flusher reads; with claims, so that is never written over."""
    kept: tuple[Moment, ...] = ()
    """What it was told to keep, the oldest first."""

    def moments(self) -> set[Moment]:
        return {moment for moment, _ in self.held} - {NONE}

    def reusable(self, now: int, loaded: Moment | None) -> list[int]:
        """What can be written over now."""
        order = of_those(self.held, now, loaded, self.kept)
        return [i for i in order if self.held[i][0] == NONE or self.held[i][0] != self.pinned]

    def put(self, index: int, moment: Moment) -> "Rank":
        rest = self.held[:index] + self.held[index + 1 :]
        return self._replace(held=tuple(sorted([*rest, (moment, False)])))

    def hear(self, whole: Moment) -> "Rank":
        held = tuple((moment, known or moment == whole) for moment, known in self.held)
        return self._replace(held=held, told=whole)


@functools.cache
def of_those(
    held: tuple[tuple[Moment, bool], ...],
    now: int,
    loaded: Moment | None,
    kept: tuple[Moment, ...],
) -> list[int]:
    contents = [Content(moment=None if m == NONE else m, whole=whole) for m, whole in held]
    return reusable(contents, now, loaded, kept)


class World(NamedTuple):
    round: int
    loaded: Moment | None
    whole: frozenset[Moment]
    """What both held at once, at any time; of that, what is still news to one of them."""
    ranks: tuple[Rank, ...]

    def common(self) -> set[Moment]:
        """What both hold, but for what is void: it is beyond what this round went on from."""
        both = self.ranks[0].moments() & self.ranks[1].moments()
        if self.loaded is None:
            return both
        return {moment for moment in both if moment.round == self.round or moment == self.loaded}


def world(round_: int, loaded: Moment | None, whole: frozenset[Moment], *ranks: Rank) -> World:
    """The same for worlds that differ by the order of ranks, or by news that nobody waits for."""
    at = World(round_, loaded, whole, tuple(sorted(ranks)))
    oldest = min(rank.told for rank in ranks)
    return at._replace(whole=frozenset(m for m in whole | at.common() if m >= oldest))


def following(at: World, extent: Extent) -> Iterator[World]:
    common = at.common()
    for rank, other in (at.ranks, at.ranks[::-1]):
        held = [moment for moment, _ in rank.held]
        if rank.step < extent.steps and NONE in held:  # a write ends
            written = rank.put(held.index(NONE), Moment(at.round, rank.step + 1))
            yield world(at.round, at.loaded, at.whole, written._replace(step=rank.step + 1), other)
        elif rank.step < extent.steps:  # a write begins, in any of them: others may be read
            for index in rank.reusable(at.round, at.loaded):
                yield world(at.round, at.loaded, at.whole, rank.put(index, NONE), other)
        for moment in at.whole:
            if moment > rank.told:
                yield world(at.round, at.loaded, at.whole, rank.hear(moment), other)
        if rank.pinned != NONE:  # a flush ends, or goes on for as long as it likes
            yield world(at.round, at.loaded, at.whole, rank._replace(pinned=NONE), other)
        elif extent.flushing:
            for moment in common:
                yield world(at.round, at.loaded, at.whole, rank._replace(pinned=moment), other)
        for moment in common if extent.kept else ():
            if moment > max(rank.kept, default=NONE):
                kept = (*rank.kept, moment)[-extent.kept :]
                yield world(at.round, at.loaded, at.whole, rank._replace(kept=kept), other)
    if at.round < extent.rounds:
        # somebody died; what is gone on from is the newest, or was asked for
        for loaded in common or [None]:
            told = loaded or NONE
            ranks = (rank._replace(step=told.step, told=told) for rank in at.ranks)
            yield world(at.round + 1, loaded, frozenset(common & {loaded}), *ranks)


def check(at: World) -> None:
    common = at.common()
    if at.whole:
        assert common, at
        assert max(common) >= min(rank.told for rank in at.ranks), at
    last = min(at.ranks, key=lambda rank: rank.step)
    if at.whole and max(at.whole) > last.told:
        last = last.hear(max(at.whole))
    assert last.reusable(at.round, at.loaded), f"the last one waits for nobody: {at}"


def explore(extent: Extent) -> int:
    """Check every world that can come about; how many there are."""
    rank = Rank(held=((NONE, False),) * extent.slots, told=NONE, step=0)
    start = world(1, None, frozenset(), rank, rank)
    seen, edge = {start}, [start]
    while edge:
        found = []
        for at in edge:
            check(at)
            for after in following(at, extent):
                if after not in seen:
                    seen.add(after)
                    found.append(after)
        edge = found
    return len(seen)


@pytest.mark.parametrize(
    "extent",
    [
        Extent(slots=2, steps=4, rounds=3),
        Extent(slots=3, steps=3, rounds=3),
        Extent(slots=3, steps=3, rounds=2, flushing=True),
        Extent(slots=4, steps=2, rounds=2, flushing=True),
        pytest.param(Extent(slots=3, steps=4, rounds=3), marks=pytest.mark.soak),
        pytest.param(Extent(slots=4, steps=3, rounds=3, flushing=True), marks=pytest.mark.soak),
        pytest.param(Extent(slots=4, steps=4, rounds=1, kept=2), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_what_both_hold_is_never_lost_and_the_last_one_never_waits(extent: Extent) -> None:
    assert explore(extent) > 500


@pytest.mark.parametrize(
    "extent",
    [
        Extent(slots=2, steps=3, rounds=1, flushing=True),
        Extent(slots=3, steps=4, rounds=1, kept=2),
        Extent(slots=3, steps=3, rounds=1, flushing=True, kept=1),
    ],
    ids=str,
)
def test_who_reads_or_keeps_takes_a_slot_of_its_own(extent: Extent) -> None:
    """So one fewer is too few, and the model would tell."""
    with pytest.raises(AssertionError, match="waits for nobody"):
        explore(extent)


def test_the_oldest_is_tried_first_and_what_is_empty_before() -> None:
    moments = (Moment(2, 7), Moment(1, 9), None, Moment(2, 8))
    contents = [Content(moment=moment, whole=moment == Moment(2, 8)) for moment in moments]
    assert reusable(contents, 2, Moment(1, 9)) == [2, 1, 0]


def test_what_was_loaded_is_kept_until_this_round_has_something_whole() -> None:
    loaded = Content(moment=Moment(1, 9), whole=True)
    contents = [loaded, Content(moment=Moment(2, 10)), Content(moment=None)]
    assert reusable(contents, 2, loaded.moment) == [2]
    contents[1] = Content(moment=Moment(2, 10), whole=True)
    assert reusable(contents, 2, loaded.moment) == [2, 0]


def test_what_a_round_left_that_is_not_gone_on_from_is_void() -> None:
    """Else a round that dies each time once one rank has saved leaves no slot to the next."""
    contents = [Content(moment=Moment(1, 5), whole=True)]
    contents += [Content(moment=Moment(round_, 6)) for round_ in (1, 2, 3)]
    assert reusable(contents, 4, Moment(1, 5)) == [1, 2, 3]


def test_who_loads_nothing_keeps_what_may_be_whole() -> None:
    contents = [Content(moment=Moment(1, 5), whole=True), Content(moment=Moment(1, 6))]
    assert reusable(contents, 2, None) == []


# --- memory --------------------------------------------------------------------------------------

IMAGE = lay_out([], {}, 3)


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [slot.create(slot.bytes_for(IMAGE.nbytes)) for _ in range(3)]
    yield made
    for fd in made:
        os.close(fd)


def opened(fds: list[int]) -> Slots:
    return Slots([os.dup(fd) for fd in fds])


def write(slots: Slots, step: int, order: list[int], image: Image = IMAGE) -> int | None:
    def stamp(generation: int) -> Stamp:
        return Stamp(job="j", step=step, round=1, rank=0, world_size=1, generation=generation)

    draft = slots.begin(order, stamp, image)
    if draft is None:
        return None
    with draft:
        chunks, at = [], 0
        for end in image.chunk_ends():
            chunks.append(Chunk(end, sums.checksum(draft.image[at:end])))
            at = end
        draft.commit(chunks, (step,))
    return draft.index


def generations(fds: list[int]) -> list[int]:
    found = []
    for fd in fds:
        data = memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
        found.append(slot.read(data).stamp.generation if data[:8] == slot.MAGIC else 0)
    return found


def test_a_slot_that_is_read_is_not_written(fds: list[int]) -> None:
    slots = opened(fds)
    assert write(slots, 1, [0]) == 0
    reader = slot.claim(fds[0], exclusive=False)
    assert reader is not None
    assert write(slots, 2, [0, 1]) == 1
    assert write(slots, 3, [0]) is None
    assert [c.moment for c in slots.contents()] == [Moment(1, 1), Moment(1, 2), None]
    os.close(reader)
    assert write(slots, 4, [0, 1]) == 0
    slots.close()


def test_nobody_reads_while_it_is_written(fds: list[int]) -> None:
    slots = opened(fds)
    stamp = Stamp(job="j", step=1, round=1, rank=0, world_size=1, generation=1)
    draft = slots.begin([0], lambda generation: stamp, IMAGE)
    assert draft is not None
    with draft:
        assert slot.claim(fds[0], exclusive=False) is None
    assert slots.contents()[0] == Content(moment=None)
    reader = slot.claim(fds[0], exclusive=False)
    assert reader is not None
    os.close(reader)
    slots.close()


def test_generations_grow_over_the_death_of_a_rank(fds: list[int]) -> None:
    first = opened(fds)
    assert [write(first, step, [step]) for step in range(3)] == [0, 1, 2]
    first.close()
    assert generations(fds) == [1, 2, 3]
    second = opened(fds)
    assert write(second, 3, [0]) == 0
    assert generations(fds) == [4, 2, 3]
    second.close()


def test_what_is_marked_whole_is_known_to_be(fds: list[int]) -> None:
    slots = opened(fds)
    write(slots, 5, [1])
    page = memoryview(bytearray(os.pread(fds[1], slot.PAGE, 0)))
    slot.mark_whole(page, 3)
    os.pwrite(fds[1], page, 0)
    assert slots.contents()[1] == Content(moment=Moment(1, 5), whole=True)
    assert slots.bytes == slot.bytes_for(IMAGE.nbytes)
    slots.close()


UNKNOWN = 9999
"""No kernel has this advice."""


@pytest.mark.parametrize("lacks", [(), ("_COLLAPSE",), ("_COLLAPSE", "_POPULATE_WRITE")])
def test_all_pages_of_a_prepared_slot_are_there_and_registered(
    monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...]
) -> None:
    for advice in lacks:  # as of older kernels
        monkeypatch.setattr(host, advice, UNKNOWN)
    size = PART + 3 * slot.PAGE
    fd = slot.create(size)
    slots = Slots([os.dup(fd)], 2, lanes.Host())
    view = host.shared(fd)
    assert slots.prepared == 0
    assert lanes.registered(view) is None
    assert os.fstat(fd).st_blocks * 512 < PART
    for _ in range(2):
        slots.prepare(0)
    assert slots.prepared == 1
    assert os.fstat(fd).st_blocks * 512 >= size
    assert list(map(len, lanes.registered(view) or ())) == [PART, 3 * slot.PAGE]
    assert list(map(len, lanes.registered(view[PART - 5 : PART + 2]) or ())) == [5, 2]
    slots.close()
    assert lanes.registered(view[:1]) is None
    os.close(fd)


def test_what_is_prepared_is_written_first(fds: list[int]) -> None:
    slots = opened(fds)
    slots.prepare(1)
    assert write(slots, 1, [0, 1]) == 1
    slots.close()


def test_slots_that_are_given_up_are_prepared_no_more(fds: list[int]) -> None:
    slots = opened(fds)
    slots.give_up()
    with pytest.raises(GivenBack):
        slots.prepare(0)
    slots.close()


def test_where_others_may_have_skipped_nobody_waits_for_them() -> None:
    def held(*moments: tuple[int, int], whole: int | None = None) -> list[Content]:
        return [Content(moment=Moment(*m), whole=n == whole) for n, m in enumerate(moments)]

    loaded = Moment(1, 9)
    skipped = held((2, 14), (1, 9), (2, 12), (2, 16))
    assert reusable(skipped, 2, loaded) == []
    assert early(skipped, 2, loaded) == [2, 0, 3]
    assert early(held((2, 14), (1, 9), (2, 12), whole=2), 2, loaded) == []
    assert early(held((1, 9), (2, 12), whole=0), 2, loaded) == [1]


def test_what_is_still_to_go_to_storage_is_written_over_last() -> None:
    held = [
        Content(moment=Moment(1, 4), whole=True, due=True),
        Content(moment=Moment(1, 5), whole=True),
        Content(moment=Moment(1, 6), whole=True),
        Content(moment=None),
    ]
    assert reusable(held, 1, None) == [3, 1, 0]

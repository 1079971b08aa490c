"""A model of the rule for slots, explored to its end: what every rank has is never lost, whoever writes, hears
or reads in whatever order, and somebody can always write."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from elastic.checkpoint.save.slots import Content, choices
from elastic.proto.moment import Moment

NONE = Moment(0, 0)


class Extent(NamedTuple):
    """How far the model goes."""

    slots: int
    steps: int
    rounds: int
    ranks: int = 2
    flushing: bool = False
    """A flusher may hold one moment of each rank, from any time on, for as long as it likes."""
    kept: int = 0
    """So many whole moments the master may name, to be kept since they are replicated; of those that
    become one too many, the oldest goes."""
    due: int = 0
    """The steps that are multiples of it are due: to be written to storage."""
    skips: bool = False
    """A rank may leave out what is not due, and says so: its memory is not ready, or there is too little."""
    loaded: bool = False
    """The first of these rounds goes on from a step in memory."""


class Held(NamedTuple):
    """What a slot holds, as its rank knows it."""

    moment: Moment = NONE
    """NONE: nothing, or it is being written."""
    whole: bool = False
    due: bool = False
    """It, or what is being written, is to go to storage and is not known to be there."""


class Rank(NamedTuple):
    held: tuple[Held, ...]
    told: Moment = NONE
    """The newest that it was told is whole."""
    step: int = 0
    pinned: Moment = NONE
    """What of it the flusher reads; with claims, so that is never written over."""
    kept: tuple[Moment, ...] = ()
    """What it was told to keep, the oldest first."""
    left: frozenset[Moment] = frozenset()
    """What it was told that another has left out."""

    def moments(self) -> set[Moment]:
        return {one.moment for one in self.held} - {NONE}

    def owes(self, extent: Extent) -> bool:
        """What it is to save next goes to storage."""
        due = extent.due > 0 and (self.step + 1) % extent.due == 0
        return due or Held(due=True) in self.held

    def choices(self, now: int, loaded: Moment | None) -> list[tuple[int, bool]]:
        """What can be written over now, and whether what is written there goes to storage for it."""
        free, late = of_those(self.held, now, loaded, self.kept, self.left)
        held = self.held
        both = [(index, False) for index in free] + [(index, True) for index in late]
        return [one for one in both if held[one[0]].moment != self.pinned or self.pinned == NONE]

    def put(self, index: int, one: Held) -> "Rank":
        rest = self.held[:index] + self.held[index + 1 :]
        return self._replace(held=tuple(sorted([*rest, one])))

    def hear(self, whole: Moment, due: set[Moment]) -> "Rank":
        """That it is whole; before that its agent notes what is to go to storage for any rank."""
        held = tuple(
            one._replace(whole=one.whole or one.moment == whole, due=one.due or one.moment in due)
            for one in self.held
        )
        return self._replace(held=tuple(sorted(held)), told=whole)

    def hear_stored(self, stored: Moment) -> "Rank":
        held = tuple(
            Held(one.moment, whole=True)
            if stored.round == one.moment.round and one.moment <= stored
            else one
            for one in self.held
        )
        return self._replace(held=held)

    def begin(self, told: Moment) -> "Rank":
        """Another round, that goes on from there. What was due before is the agent's to write."""
        held = tuple(one._replace(due=False) for one in self.held)
        return self._replace(held=held, step=told.step, told=told, left=frozenset())


@functools.cache
def of_those(
    held: tuple[Held, ...],
    now: int,
    loaded: Moment | None,
    kept: tuple[Moment, ...],
    left: frozenset[Moment],
) -> tuple[list[int], list[int]]:
    contents = [
        Content(
            moment=None
            if one.moment == NONE or (one.moment in left and not one.due)
            else one.moment,
            whole=one.whole,
            due=one.due,
        )
        for one in held
    ]
    return choices(contents, now, loaded, kept)


class World(NamedTuple):
    round: int
    loaded: Moment | None
    whole: frozenset[Moment]
    """What all held at once, at any time; of that, what is still news to one of them."""
    ranks: tuple[Rank, ...]
    owed: Moment = NONE
    """The newest that was whole and due, until something that is no older is on storage."""
    left: frozenset[Moment] = frozenset()
    """What a rank of this round has left out, as far as another holds it or may yet."""

    def common(self) -> set[Moment]:
        """What all hold, but for what is void: it is beyond what this round went on from."""
        found = set.intersection(*(rank.moments() for rank in self.ranks))
        if self.loaded is None:
            return found
        return {moment for moment in found if moment.round == self.round or moment == self.loaded}

    def due(self) -> set[Moment]:
        """What some rank has to go to storage."""
        return {one.moment for rank in self.ranks for one in rank.held if one.due}


def settled(at: World) -> World:
    """The same for worlds that differ by the order of ranks, or by news that nobody waits for."""
    at = at._replace(ranks=tuple(sorted(at.ranks)))
    oldest = min(rank.told for rank in at.ranks)
    common = at.common()
    owed = max({at.owed} | (common & at.due()))
    at = at._replace(whole=frozenset(m for m in at.whole | common if m >= oldest), owed=owed)
    if not at.left:
        return at
    slowest = min(rank.step for rank in at.ranks)
    held = set().union(*(rank.moments() for rank in at.ranks))
    left = frozenset(m for m in at.left if m in held or m.step > slowest)
    ranks = (rank._replace(left=rank.left & left & rank.moments()) for rank in at.ranks)
    return at._replace(left=left, ranks=tuple(sorted(ranks)))


def following(at: World, extent: Extent) -> Iterator[World]:
    common = at.common()
    for number, rank in enumerate(at.ranks):
        others = at.ranks[:number] + at.ranks[number + 1 :]
        for after in [*saves(at, extent, rank), *hears(at, extent, rank, common)]:
            yield settled(at._replace(ranks=(after, *others)))
        if extent.skips and rank.step < extent.steps and not rank.owes(extent):
            step = Moment(at.round, rank.step + 1)
            ranks = (rank._replace(step=step.step), *others)
            yield settled(at._replace(ranks=ranks, left=at.left | {step}))
    for moment in common & at.due():  # a flush of all ranks ends
        ranks = tuple(rank.hear_stored(moment) for rank in at.ranks)
        yield settled(at._replace(ranks=ranks, owed=NONE if moment >= at.owed else at.owed))
    if at.round < extent.rounds:
        # somebody died; what is gone on from is the newest, or was asked for
        for loaded in common or [None]:
            ranks = tuple(rank.begin(loaded or NONE) for rank in at.ranks)
            yield settled(World(at.round + 1, loaded, frozenset(common & {loaded}), ranks))


def saves(at: World, extent: Extent, rank: Rank) -> Iterator[Rank]:
    if rank.step == extent.steps:
        return
    step = rank.step + 1
    due = extent.due > 0 and step % extent.due == 0
    for index, one in enumerate(rank.held):
        if one.moment == NONE:  # a write ends; the slots that are empty are all alike
            written = rank.put(index, Held(Moment(at.round, step), due=one.due or due))
            yield written._replace(step=step)
            return
    for index, goes in rank.choices(at.round, at.loaded):
        # a write begins, in any of them: others may be read
        yield rank.put(index, Held(due=goes))


def hears(at: World, extent: Extent, rank: Rank, common: set[Moment]) -> Iterator[Rank]:
    for moment in at.whole:
        if moment > rank.told:
            yield rank.hear(moment, common & at.due())
    for moment in (at.left & rank.moments()) - rank.left:
        yield rank._replace(left=rank.left | {moment})
    if rank.pinned != NONE:  # a flush ends, or goes on for as long as it likes
        yield rank._replace(pinned=NONE)
    elif extent.flushing:
        for moment in common:
            yield rank._replace(pinned=moment)
    for moment in common if extent.kept else ():
        if moment > max(rank.kept, default=NONE):
            yield rank._replace(kept=(*rank.kept, moment)[-extent.kept :])


def check(at: World, extent: Extent) -> None:
    common = at.common()
    if at.whole:
        assert common, f"what was whole is lost: {at}"
        told = min(rank.told for rank in at.ranks)
        assert max(common) >= told, f"what all were told of is lost: {at}"
    last = min(at.ranks, key=lambda rank: rank.step)
    if at.whole and max(at.whole) > last.told:
        last = last.hear(max(at.whole), common & at.due())
    last = last._replace(left=at.left & last.moments())
    free = last.choices(at.round, at.loaded)
    assert free, f"the last one waits for nobody: {at}"
    due = [one.moment for rank in at.ranks for one in rank.held if one.due]
    goes = any(moment == NONE or moment >= at.owed for moment in due)
    assert at.owed == NONE or goes, f"nothing goes to storage in its place: {at}"
    over = all(rank.step == extent.steps for rank in at.ranks)
    if at.owed != NONE and over and not extent.skips:  # a rank may leave out what is in its place
        assert any(moment >= at.owed for moment in common & at.due()), f"nothing can: {at}"


def explore(extent: Extent) -> int:
    """Check every world that can come about; how many there are."""
    rank = Rank(held=(Held(),) * extent.slots)
    start = World(1, None, frozenset(), (rank,) * extent.ranks)
    if extent.loaded:
        loaded = Moment(0, 1)
        rank = rank.put(0, Held(loaded, whole=True)).begin(loaded)
        start = World(1, loaded, frozenset({loaded}), (rank,) * extent.ranks)
    seen, edge = {start}, [start]
    while edge:
        found = []
        for at in edge:
            check(at, extent)
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
        Extent(slots=2, steps=3, rounds=2, ranks=3),
        Extent(slots=2, steps=8, rounds=1, skips=True, loaded=True),
        Extent(slots=2, steps=3, rounds=2, skips=True),
        Extent(slots=3, steps=3, rounds=1, skips=True, flushing=True),
        Extent(slots=3, steps=3, rounds=1, ranks=3, skips=True),
        Extent(slots=3, steps=4, rounds=2, due=2),
        Extent(slots=3, steps=5, rounds=1, due=3, skips=True),
        pytest.param(Extent(slots=3, steps=11, rounds=1, due=6), marks=pytest.mark.soak),
        pytest.param(Extent(slots=3, steps=3, rounds=2, ranks=3), marks=pytest.mark.soak),
        pytest.param(
            Extent(slots=4, steps=6, rounds=1, due=3, skips=True, loaded=True),
            marks=pytest.mark.soak,
        ),
        pytest.param(Extent(slots=3, steps=4, rounds=3), marks=pytest.mark.soak),
        pytest.param(Extent(slots=4, steps=3, rounds=3, flushing=True), marks=pytest.mark.soak),
        pytest.param(Extent(slots=4, steps=4, rounds=1, kept=2), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_what_all_hold_is_never_lost_and_the_last_one_never_waits(extent: Extent) -> None:
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
def test_who_reads_or_keeps_or_is_late_takes_a_slot_of_its_own(extent: Extent) -> None:
    """So one fewer is too few, and the model would tell."""
    with pytest.raises(AssertionError, match=r"waits for nobody|is lost"):
        explore(extent)

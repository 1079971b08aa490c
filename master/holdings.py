"""What nodes say that they hold of a checkpoint, and what follows for one moment of it. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elastic.master.events import Incarnation, NodeId
from elastic.master.rendezvous import Labels
from elastic.proto.moment import Moment, Span

NOTHING = Moment(0, 0)
"""In the place of what is on storage, where nothing is."""


class Shard(NamedTuple):
    """One rank's file on storage."""

    bytes: int
    digest: int
    """xxh3 of its table of checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one node has of one moment."""

    world_size: int
    """Of the moment's round."""
    ranks: frozenset[int] = frozenset()
    """Whose images are in this node's memory, its own ranks' or replicas."""
    nodes: tuple[range, ...] = ()
    """The ranks of the nodes that those images are of, in order."""
    units: frozenset[int] = frozenset()
    """What those images hold; images that hold the same are the same unit."""
    all_units: int = 0
    """How many units the whole state has, where this node was told so."""
    slot_bytes: int = 0
    """Of the largest of those images' slots."""
    persist: bool = False
    """To be written to storage."""
    durable: Mapping[int, Shard] = field(default_factory=dict[int, Shard])
    """What this node has written to storage, for good, by rank."""
    committed: bool = False
    """This node has written the manifest."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where other nodes' images are."""

    base: str
    ranks: tuple[int, ...]
    needed: bool
    """Else they are second copies, for what is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What the ranks of a round load: all the same."""

    round: int
    moment: Moment | None
    """None: nothing, it begins anew."""
    from_memory: bool = False
    load: int = 1
    """Which load of that round it is for."""
    error: str = ""
    """Why there is no moment, where that is no beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """That rank 0 is to look on storage."""

    round: int
    load: int
    """For which load of that round."""
    known: Moment = NOTHING
    """What is known to be there: once more is, it is to look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What it has found."""

    look: Look
    stored: Moment | None = None
    """The newest that is committed there, or the step that is wanted."""
    error: str = ""
    """Why nothing is taken from there, though there is something, or that cannot be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """All that one node has to say of a checkpoint."""

    node_id: NodeId
    incarnation: Incarnation
    holdings: Mapping[Moment, Holding] = field(default_factory=dict[Moment, Holding])
    asks: int = 0
    """The round whose ranks want to know what to load; 0: they have not asked."""
    wanted: int | None = None
    """The step that they want; None: the newest."""
    load: int = 1
    """For which time in that round."""
    looked: Looked | None = None
    """The last that its rank 0 has found on storage."""
    committed: Moment | None = None
    """The newest on storage, as far as this node has heard; None: never."""
    answer: Restore | None = None
    """What a master has answered them already."""
    base: str = ""
    """Where it serves its images to other nodes; empty: not yet."""
    replicas: bool = False
    """It has room for replicas."""
    unfit: frozenset[Moment] = frozenset()
    """Of which it could not make replicas."""
    lost: Mapping[Moment, str] = field(default_factory=dict[Moment, str])
    """What is never whole for want of its ranks' images, and why."""
    left_out: tuple[Span, ...] = ()
    """What its ranks have taken no snapshots of."""
    read_only: bool = False
    """Its ranks only load from it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the standing round."""

    node_id: NodeId
    ranks: range
    labels: Labels = ()


def void(said: Said, before: int, kept: Moment, *, damaged: bool = False) -> Said:
    """What a node says, without what was undone: all that rounds up to `before` have saved, but for the
    moment that somebody went back to, which is on storage. damaged: it turned out to be, and whoever looks passes
    over it.
    """

    def gone(moment: Moment) -> bool:
        return moment.round <= before and moment != kept

    def left(moment: Moment | None) -> Moment | None:
        return kept if moment is not None and moment != NOTHING and gone(moment) else moment

    looked = said.looked
    if looked is not None and left(looked.stored) != looked.stored:
        looked = replace(looked, stored=kept)
        if damaged:
            why = f"step {kept.step}, which somebody went back to, is damaged"
            looked = replace(looked, stored=None, error=why)
    return replace(
        said,
        holdings={moment: held for moment, held in said.holdings.items() if not gone(moment)},
        looked=looked,
        committed=left(said.committed),
    )


def sound(said: Said, damaged: Collection[tuple[Moment, bool]]) -> Said:
    """What a node says, without what cannot be loaded: moments that are damaged in memory (true) or on
    storage."""

    def left(moment: Moment | None) -> Moment | None:
        return None if (moment, False) in damaged else moment

    holdings = dict(said.holdings)
    for moment, held in said.holdings.items():
        if (moment, True) in damaged:
            held = Holding(
                world_size=held.world_size, durable=held.durable, committed=held.committed
            )
        if (moment, False) in damaged:
            held = replace(held, persist=False, durable={}, committed=False)
        holdings[moment] = held
    looked = said.looked
    if looked is not None and (looked.stored, False) in damaged:
        looked = None
    return replace(said, holdings=holdings, looked=looked, committed=left(said.committed))


def trusted(said: Said, number: int, after: int) -> Said:
    """What a node says, without what round `number` has saved after a step."""

    def left(moment: Moment | None) -> Moment | None:
        doubted = moment is not None and moment.round == number and moment.step > after
        return None if doubted else moment

    looked = said.looked
    if looked is not None and looked.stored is not None and left(looked.stored) is None:
        looked = None
    return replace(
        said,
        holdings={moment: held for moment, held in said.holdings.items() if left(moment)},
        looked=looked,
        committed=left(said.committed),
    )


Holdings = Mapping[NodeId, Holding]
"""Of one moment, in the order of the nodes' names."""


def of(said: Mapping[NodeId, Said], moment: Moment) -> dict[NodeId, Holding]:
    """The nodes that have something of a moment."""
    return {
        node_id: said[node_id].holdings[moment]
        for node_id in sorted(said)
        if moment in said[node_id].holdings
    }


def world(holdings: Holdings) -> int:
    return max((holding.world_size for holding in holdings.values()), default=0)


def whole(holdings: Holdings) -> int:
    """How many units the whole state has, if every rank's image of it is in memory, or all that any
    image held; else 0."""
    ranks: set[int] = set()
    units: set[int] = set()
    told = 0
    for holding in holdings.values():
        ranks |= holding.ranks
        units |= holding.units
        told = max(told, holding.all_units)
    size = world(holdings)
    if size and ranks >= set(range(size)):
        return len(units)
    return told if told and len(units) >= told else 0


def writable(holdings: Holdings) -> bool:
    """Every rank's image is in some memory, or on storage already."""
    present = {rank for h in holdings.values() for rank in (*h.ranks, *h.durable)}
    size = world(holdings)
    return size > 0 and present >= set(range(size))


def survives(holdings: Holdings, units: int, going: Collection[NodeId]) -> bool:
    """Whether those who stay have all of that many units."""
    staying = (holding.units for node_id, holding in holdings.items() if node_id not in going)
    return len(frozenset[int]().union(*staying)) >= units


class Images:
    """What there is in memory of one moment, reckoned once for all nodes that are to load it."""

    def __init__(self, said: Mapping[NodeId, Said], moment: Moment) -> None:
        self.holdings = of(said, moment)
        self.world_size = world(self.holdings)
        self._bases = {node_id: said[node_id].base for node_id in self.holdings}
        self._together: dict[int, range] = {}
        """The ranks of the node that a rank was on."""
        self._serving: dict[int, list[str]] = {}
        """Where each rank's image is served."""
        for node_id, holding in self.holdings.items():
            self._together.update((rank, node) for node in holding.nodes for rank in node)
            for rank in holding.ranks:
                bases = self._serving.setdefault(rank, [])
                if self._bases[node_id]:
                    bases.append(self._bases[node_id])
        cover: set[int] = set()
        units: set[int] = set()
        for holding in sorted(self.holdings.values(), key=lambda h: -len(h.units)):
            if not holding.units <= units:
                units |= holding.units
                cover |= holding.ranks
        self._cover = frozenset(cover)
        """Ranks whose images hold all units together."""
        self._units = len(units)

    def missing(self, member: Member, world_size: int) -> frozenset[int]:
        """The images that a node's ranks need and that are not in its memory: those of all ranks
        that saved together with them, which have shares of what they held equal; in another world
        as many as hold all units.

        Empty: it has what it needs. What is nowhere in memory is left out, if equal images make up
        for it.
        """
        own = self._own(member)
        needed = self._saved_with(member)
        if self.world_size == world_size and needed <= self._serving.keys():
            return needed - own.ranks
        return self._cover - own.ranks if len(own.units) < self._units else frozenset()

    def sources(self, member: Member, world_size: int) -> tuple[Source, ...] | None:
        """Where a node's ranks find what it has not, and second copies of what they load.

        None where what they need is with a node that does not serve it yet.
        """
        needed = self.missing(member, world_size)
        loaded = self._own(member).ranks
        if self.world_size == world_size:
            loaded &= self._saved_with(member)
        first: dict[str, list[int]] = {}
        second: dict[str, list[int]] = {}
        for rank in sorted(needed | loaded):
            bases = self._serving[rank]
            if rank in needed:
                if not bases:
                    return None
                first.setdefault(bases[0], []).append(rank)
                bases = bases[1:]
            for base in bases:
                if base != self._bases.get(member.node_id):
                    second.setdefault(base, []).append(rank)
        return tuple(
            Source(base, tuple(ranks), needed=found is first)
            for found in (first, second)
            for base, ranks in found.items()
        )

    def _own(self, member: Member) -> Holding:
        return self.holdings.get(member.node_id, Holding(world_size=0))

    def _saved_with(self, member: Member) -> frozenset[int]:
        """Its ranks, and those of the nodes that they were on."""
        found = set(member.ranks)
        for rank in member.ranks:
            found.update(self._together.get(rank, ()))
        return frozenset(found)


def sources(
    said: Mapping[NodeId, Said], moment: Moment, members: Sequence[Member]
) -> dict[NodeId, tuple[Source, ...]] | None:
    """Of every node of a round that has not all in its own memory; None where one cannot have what it
    needs yet."""
    images = Images(said, moment)
    world_size = sum(len(member.ranks) for member in members)
    found: dict[NodeId, tuple[Source, ...]] = {}
    for member in members:
        one = images.sources(member, world_size)
        if one is None:
            return None
        if one:
            found[member.node_id] = one
    return found


def bases(said: Mapping[NodeId, Said], members: Sequence[Member]) -> bool:
    """Every node of a round serves its images, and has room for another's."""
    return all(
        (one := said.get(member.node_id)) is not None and one.base and one.replicas
        for member in members
    )

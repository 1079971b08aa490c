"""What nodes say that they hold of a checkpoint, and what follows for one moment of it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.master.events import Incarnation, NodeId
from elastic.master.rendezvous import Labels
from elastic.proto.moment import Moment


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
    stored: Moment | None = None
    """The newest that is committed on storage, or that step, as far as this node has looked."""
    answer: Restore | None = None
    """What a master has answered them already."""
    base: str = ""
    """Where it serves its images to other nodes; empty: not yet."""
    replicas: bool = False
    """It has room for replicas."""
    unfit: frozenset[Moment] = frozenset()
    """Of which it could not make replicas."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the standing round."""

    node_id: NodeId
    ranks: range
    labels: Labels = ()


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


def missing(holdings: Holdings, member: Member, world_size: int) -> frozenset[int]:
    """The images that a node's ranks need and that are not in its memory: those of all ranks that
    saved together with them, which have shares of what they held equal; in another world all, or as
    many as hold all units.

    Empty: it has what it needs. What is nowhere in memory is left out, if equal images make up for it.
    """
    own = holdings.get(member.node_id, Holding(world_size=0))
    there = frozenset(rank for holding in holdings.values() for rank in holding.ranks)
    if world(holdings) == world_size:
        together = _together(member.ranks, holdings.values())
        if together <= there:
            return together - own.ranks
    if len(own.units) >= whole(holdings):
        return frozenset()
    lacking: set[int] = set()
    units = set(own.units)
    for holding in sorted(holdings.values(), key=lambda h: -len(h.units)):
        if not holding.units <= units:
            units |= holding.units
            lacking |= holding.ranks - own.ranks
    return frozenset(lacking)


def _together(ranks: Iterable[int], holdings: Iterable[Holding]) -> frozenset[int]:
    """These ranks, and those of the nodes that they were on."""
    found = set(ranks)
    for holding in holdings:
        for node in holding.nodes:
            if not found.isdisjoint(node):
                found.update(node)
    return frozenset(found)


def sources(
    said: Mapping[NodeId, Said], moment: Moment, member: Member, world_size: int
) -> tuple[Source, ...] | None:
    """Where a node's ranks find what it has not, and second copies of what they load.

    None where what they need is with a node that does not serve it yet.
    """
    holdings = of(said, moment)
    needed = missing(holdings, member, world_size)
    own = holdings.get(member.node_id, Holding(world_size=0))
    together = _together(member.ranks, [own]) & own.ranks
    found: list[Source] = []
    lacking = set(needed)
    for node_id, holding in holdings.items():
        base = said[node_id].base
        if node_id == member.node_id or not base:
            continue
        if first := sorted(lacking & holding.ranks):
            found.append(Source(base, tuple(first), needed=True))
            lacking.difference_update(first)
        if second := sorted((together | needed) & holding.ranks - set(first)):
            found.append(Source(base, tuple(second), needed=False))
    if lacking:
        return None
    return tuple(sorted(found, key=lambda source: not source.needed))


def bases(said: Mapping[NodeId, Said], members: Sequence[Member]) -> bool:
    """Every node of a round serves its images, and has room for another's."""
    return all(
        (one := said.get(member.node_id)) is not None and one.base and one.replicas
        for member in members
    )

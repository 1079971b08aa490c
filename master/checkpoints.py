"""Which snapshot is whole, which one a round goes on from, what goes to storage, who commits it. Pure.

Each node says, whole and each time, what it holds of a checkpoint (`Said`). Nothing of it is journaled:
a master that starts again is told again, and comes to the same orders. What must not be forgotten by
all at once, the commit, is a file on storage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elastic.master.events import Incarnation, NodeId
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
    units: frozenset[int] = frozenset()
    """What those images hold; images that hold the same are the same unit."""
    all_units: int = 0
    """How many units the whole state has, where this node was told so."""
    persist: bool = False
    """To be written to storage."""
    durable: Mapping[int, Shard] = field(default_factory=dict[int, Shard])
    """What this node has written to storage, for good, by rank."""
    committed: bool = False
    """This node has written the manifest."""


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
    answer: "Restore | None" = None
    """What a master has answered them already."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the standing round."""

    node_id: NodeId
    ranks: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What the ranks of a round load: all the same."""

    round: int
    moment: Moment | None
    """None: nothing, it begins anew."""
    from_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A moment that every rank's image is there of."""

    moment: Moment
    units: int
    """How many different ones that makes: who still has as many has the whole state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Every shard is on storage: one node writes the manifest."""

    node_id: NodeId
    moment: Moment
    shards: Mapping[int, Shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the nodes should be doing about a checkpoint now."""

    whole: Whole | None
    flush: Mapping[NodeId, Mapping[Moment, frozenset[int]]]
    """Which ranks' shards each node writes to storage."""
    commits: tuple[Commit, ...]
    """The oldest first."""
    restore: Restore | None
    """The answer to those who ask."""
    committed: Moment | None
    """The newest that is on storage, as far as this master has heard."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint of the job, by what its nodes have said."""

    said: Mapping[NodeId, Said] = field(default_factory=dict[NodeId, Said])
    whole: Whole | None = None
    """The newest; it stays that when a node goes, until it turns out that it cannot be loaded."""
    images: Mapping[Moment, int] = field(default_factory=dict[Moment, int])
    """How many there are of each, replicas included."""
    asking: Mapping[int, int] = field(default_factory=dict[int, int])
    """How many nodes ask for each round."""
    restore: "Restore | None" = None
    """The last answer."""


def hear(state: Checkpoint, said: Said) -> Checkpoint:
    """A node says what it holds now."""
    state = _count(state, state.said.get(said.node_id), said)
    state = replace(state, said={**state.said, said.node_id: said})
    for moment in sorted(said.holdings, reverse=True):
        if state.whole is not None and moment <= state.whole.moment:
            break
        holding = said.holdings[moment]
        enough = state.images.get(moment, 0) >= holding.world_size or holding.all_units
        units = _whole(state, moment) if enough else 0
        if units:
            return replace(state, whole=Whole(moment=moment, units=units))
    return state


def forget(state: Checkpoint, node_id: NodeId, incarnation: Incarnation) -> Checkpoint:
    """A life of a node is over, with all that it held, as far as anybody knows."""
    said = state.said.get(node_id)
    if said is None or said.incarnation != incarnation:
        return state
    state = _count(state, said, None)
    return replace(state, said={k: v for k, v in state.said.items() if k != node_id})


def _count(state: Checkpoint, before: Said | None, after: Said | None) -> Checkpoint:
    """What is told by thousands is counted as it comes, not each time anew."""
    images, asking = dict(state.images), dict(state.asking)
    for said, sign in ((before, -1), (after, 1)):
        if said is None:
            continue
        for moment, holding in said.holdings.items():
            images[moment] = images.get(moment, 0) + sign * len(holding.ranks)
        if said.asks:
            asking[said.asks] = asking.get(said.asks, 0) + sign
    return replace(
        state,
        images={moment: count for moment, count in images.items() if count},
        asking={number: count for number, count in asking.items() if count},
    )


def decide(
    state: Checkpoint, number: int, members: Sequence[Member], *, ending: bool = False
) -> tuple[Checkpoint, Orders]:
    """What follows from all that was said.

    number, members: the standing round and its nodes, the one with rank 0 first. ending: the ranks
    are stopping, so the newest that is whole goes to storage whether or not it was due.
    """
    committed = max(
        (m for s in state.said.values() for m, h in s.holdings.items() if h.committed), default=None
    )
    restore, needed, reason = _restore(state, number, members, committed)
    if ending and state.whole is not None:
        needed = state.whole.moment
    flush, commits = _storage(state, committed, needed)
    if restore is not None:
        state = replace(state, restore=restore)
    return state, Orders(
        whole=state.whole,
        flush=flush,
        commits=commits,
        restore=restore,
        committed=committed,
        reason=reason,
    )


# --- memory --------------------------------------------------------------------------------------


def _holdings(state: Checkpoint, moment: Moment) -> list[tuple[NodeId, Holding]]:
    """The nodes that have something of a moment, in the order of their names."""
    return [
        (node_id, state.said[node_id].holdings[moment])
        for node_id in sorted(state.said)
        if moment in state.said[node_id].holdings
    ]


def _whole(state: Checkpoint, moment: Moment) -> int:
    """How many units the whole state has, if every rank's image of it is there, or all that any
    image held; else 0.
    """
    ranks: set[int] = set()
    units: set[int] = set()
    world, told = 0, 0
    for _, holding in _holdings(state, moment):
        ranks |= holding.ranks
        units |= holding.units
        world, told = holding.world_size, max(told, holding.all_units)
    if world and ranks >= set(range(world)):
        return len(units)
    return told if told and len(units) >= told else 0


# --- restore -------------------------------------------------------------------------------------


def _restore(
    state: Checkpoint, number: int, members: Sequence[Member], committed: Moment | None
) -> tuple[Restore | None, Moment | None, str]:
    """The same for every rank of a round, also once another master has begun to answer.

    Also the moment, if any, that must be on storage first, since it is in memory where those who
    load it cannot have it.
    """
    if state.restore is not None and state.restore.round == number:
        return state.restore, None, ""
    asking = state.asking.get(number, 0)
    if not members or asking < len(members):
        away = len(members) - asking
        return None, None, f"{away} nodes of round {number} have not asked yet" if asking else ""
    for said in state.said.values():
        if said.answer is not None and said.answer.round == number:
            return said.answer, None, ""
    present = [state.said[m.node_id] for m in members if m.node_id in state.said]
    asked = [said for said in present if said.asks == number]
    if len(asked) < len(members):
        return None, None, f"round {number} is asked for by nodes that are not in it"
    wanted, stored = asked[0].wanted, asked[0].stored
    if committed is not None and wanted in (None, committed.step):
        stored = committed if stored is None else max(stored, committed)
    held = {m for s in state.said.values() for m in s.holdings if wanted in (None, m.step)}
    for moment in sorted(held, reverse=True):
        if stored is not None and moment < stored:
            break
        if _whole(state, moment) and _at_home(state, moment, members):
            answer = Restore(round=number, moment=moment, from_memory=True)
            return answer, None, f"round {number} goes on from step {moment.step}, in memory"
        if moment != stored and _writable(state, moment):
            return None, moment, f"round {number} waits for step {moment.step} to be on storage"
    if stored is None:
        return Restore(round=number, moment=None), None, f"round {number} begins anew"
    answer = Restore(round=number, moment=stored)
    return answer, None, f"round {number} goes on from step {stored.step}, on storage"


def _at_home(state: Checkpoint, moment: Moment, members: Sequence[Member]) -> bool:
    """Every node has what its own ranks load: their own images, or all that there is."""
    world = sum(len(member.ranks) for member in members)
    units = _whole(state, moment)
    for member in members:
        holding = state.said[member.node_id].holdings.get(moment)
        if holding is None:
            return False
        own = holding.world_size == world and set(member.ranks) <= holding.ranks
        if not own and len(holding.units) < units:
            return False
    return True


# --- storage -------------------------------------------------------------------------------------


def _storage(
    state: Checkpoint, committed: Moment | None, needed: Moment | None
) -> tuple[dict[NodeId, dict[Moment, frozenset[int]]], tuple[Commit, ...]]:
    """Who writes what, and who writes a manifest since all of its shards are there.

    needed: to be written whether or not it is due.
    """
    flush: dict[NodeId, dict[Moment, frozenset[int]]] = {}
    commits: list[Commit] = []
    for moment in _due(state, committed, needed):
        if not _writable(state, moment):
            continue
        holdings = _holdings(state, moment)
        durable = {rank: shard for _, h in holdings for rank, shard in h.durable.items()}
        missing = set(range(_world(holdings))) - durable.keys()
        if not missing:
            writer = next(node_id for node_id, h in holdings if h.durable)
            commits.append(Commit(node_id=writer, moment=moment, shards=durable))
        for node_id, holding in holdings:
            if mine := missing & holding.ranks:
                flush.setdefault(node_id, {})[moment] = frozenset(mine)
                missing -= mine
    return flush, tuple(commits)


def _due(state: Checkpoint, committed: Moment | None, needed: Moment | None) -> list[Moment]:
    """What is to be written and is not committed, the oldest first."""
    due = {m for s in state.said.values() for m, h in s.holdings.items() if h.persist}
    if needed is not None:
        due.add(needed)
    return sorted(moment for moment in due if committed is None or moment > committed)


def _writable(state: Checkpoint, moment: Moment) -> bool:
    """Every rank's image is in some memory, or on storage already."""
    holdings = _holdings(state, moment)
    present = {rank for _, h in holdings for rank in (*h.ranks, *h.durable)}
    world = _world(holdings)
    return world > 0 and present >= set(range(world))


def _world(holdings: Sequence[tuple[NodeId, Holding]]) -> int:
    return max((holding.world_size for _, holding in holdings), default=0)

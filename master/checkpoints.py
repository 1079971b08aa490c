"""Which snapshot is whole, which one a round goes on from, what goes to storage, who commits it. Pure.

Each node says, whole and each time, what it holds of a checkpoint (`Said`). Nothing of it is journaled:
a master that starts again is told again, and comes to the same orders. What must not be forgotten by
all at once, the commit, is a file on storage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.master import holdings as held
from elastic.master import replicas
from elastic.master.events import Incarnation, NodeId
from elastic.master.holdings import Member, Restore, Said, Shard, Source
from elastic.master.replicas import Copying
from elastic.proto.moment import Moment


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
    sources: Mapping[NodeId, tuple[Source, ...]]
    """Where each node's ranks find what they load and it has not."""
    keep: tuple[Moment, ...]
    """Beside the newest that is whole, what must not be written over."""
    copying: Copying | None
    """The replicas that are to be made now."""
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
    due: Mapping[Moment, int] = field(default_factory=dict[Moment, int])
    """How many nodes have something of each that is to be written."""
    committed: Mapping[Moment, int] = field(default_factory=dict[Moment, int])
    """How many nodes have written the manifest of each."""
    asking: Mapping[int, int] = field(default_factory=dict[int, int])
    """How many nodes ask for each round."""
    restore: Restore | None = None
    """The last answer."""
    sources: Mapping[NodeId, tuple[Source, ...]] = field(
        default_factory=dict[NodeId, tuple[Source, ...]]
    )
    """What goes with it."""
    copying: Copying | None = None
    """What is being replicated."""
    replicated: Moment | None = None
    """The newest that no loss of a single node takes away."""
    unfit: Moment | None = None
    """The last whose replicas could not be made."""


def hear(state: Checkpoint, said: Said) -> Checkpoint:
    """A node says what it holds now."""
    state = _count(state, state.said.get(said.node_id), said)
    state = replace(state, said={**state.said, said.node_id: said})
    if state.copying is not None and state.copying.moment in said.unfit:
        state = replace(state, copying=None, unfit=state.copying.moment)
    for moment in sorted(said.holdings, reverse=True):
        if state.whole is not None and moment <= state.whole.moment:
            break
        holding = said.holdings[moment]
        enough = state.images.get(moment, 0) >= holding.world_size or holding.all_units
        units = held.whole(held.of(state.said, moment)) if enough else 0
        if units:
            return replace(state, whole=Whole(moment=moment, units=units))
    return state


def forget(state: Checkpoint, node_id: NodeId, incarnation: Incarnation) -> Checkpoint:
    """A life of a node is over, with all that it held, as far as anybody knows."""
    said = state.said.get(node_id)
    if said is None or said.incarnation != incarnation:
        return state
    state = _count(state, said, None)
    left = {k: v for k, v in state.said.items() if k != node_id}
    return replace(state, said=left, copying=None)  # who copied from it, or to it, does so in vain


def _count(state: Checkpoint, before: Said | None, after: Said | None) -> Checkpoint:
    """What is told by thousands is counted as it comes, not each time anew."""
    images, due, committed = dict(state.images), dict(state.due), dict(state.committed)
    asking = dict(state.asking)
    for said, sign in ((before, -1), (after, 1)):
        if said is None:
            continue
        for moment, holding in said.holdings.items():
            images[moment] = images.get(moment, 0) + sign * len(holding.ranks)
            due[moment] = due.get(moment, 0) + sign * holding.persist
            committed[moment] = committed.get(moment, 0) + sign * holding.committed
        if said.asks:
            asking[said.asks] = asking.get(said.asks, 0) + sign
    return replace(
        state,
        images={moment: count for moment, count in images.items() if count},
        due={moment: count for moment, count in due.items() if count},
        committed={moment: count for moment, count in committed.items() if count},
        asking={number: count for number, count in asking.items() if count},
    )


def decide(
    state: Checkpoint, number: int, members: Sequence[Member], *, ending: bool = False
) -> tuple[Checkpoint, Orders]:
    """What follows from all that was said.

    number, members: the standing round and its nodes, the one with rank 0 first. ending: the ranks
    are stopping, so the newest that is whole goes to storage whether or not it was due.
    """
    committed = max(state.committed, default=None)
    state, needed, reason = _restore(state, number, members, committed)
    if ending and state.whole is not None:
        needed = state.whole.moment
    flush, commits = _storage(state, number, members, committed, needed)
    state = _replicate(state, number, members)
    now = (state.replicated, None if state.copying is None else state.copying.moment)
    standing = state.restore is not None and state.restore.round == number
    return state, Orders(
        whole=state.whole,
        flush=flush,
        commits=commits,
        restore=state.restore if standing else None,
        sources=state.sources if standing else {},
        keep=tuple(sorted({moment for moment in now if moment is not None})),
        copying=state.copying,
        committed=committed,
        reason=reason,
    )


# --- restore -------------------------------------------------------------------------------------


def _restore(
    state: Checkpoint, number: int, members: Sequence[Member], committed: Moment | None
) -> tuple[Checkpoint, Moment | None, str]:
    """The same for every rank of a round, also once another master has begun to answer.

    Also the moment, if any, that must be on storage first, since those who load it cannot have it
    from where it is.
    """
    if state.restore is not None and state.restore.round == number:
        return state, None, ""
    asking = state.asking.get(number, 0)
    if not members or asking < len(members):
        away = len(members) - asking
        return state, None, f"{away} nodes of round {number} have not asked yet" if asking else ""
    for said in state.said.values():
        if said.answer is not None and said.answer.round == number:
            answer = said.answer
            there = None
            if answer.from_memory and answer.moment is not None:
                there = held.sources(state.said, answer.moment, members)
            return replace(state, restore=answer, sources=there or {}), None, ""
    present = [state.said[m.node_id] for m in members if m.node_id in state.said]
    asked = [said for said in present if said.asks == number]
    if len(asked) < len(members):
        return state, None, f"round {number} is asked for by nodes that are not in it"
    wanted, stored = asked[0].wanted, asked[0].stored
    if committed is not None and wanted in (None, committed.step):
        stored = committed if stored is None else max(stored, committed)
    moments = {m for s in state.said.values() for m in s.holdings if wanted in (None, m.step)}
    for moment in sorted(moments, reverse=True):
        if stored is not None and moment < stored:
            break
        holdings = held.of(state.said, moment)
        if held.whole(holdings):
            found = held.sources(state.said, moment, members)
            if found is not None:
                answer = Restore(round=number, moment=moment, from_memory=True)
                words = f"round {number} goes on from step {moment.step}, in memory"
                return replace(state, restore=answer, sources=found), None, words
        if moment != stored and held.writable(holdings):
            words = f"round {number} waits for step {moment.step} to be on storage"
            return state, moment, words
    if stored is None:
        answer, words = Restore(round=number, moment=None), f"round {number} begins anew"
    else:
        answer = Restore(round=number, moment=stored)
        words = f"round {number} goes on from step {stored.step}, on storage"
    return replace(state, restore=answer, sources={}), None, words


# --- replicas ------------------------------------------------------------------------------------


def _replicate(state: Checkpoint, number: int, members: Sequence[Member]) -> Checkpoint:
    """One moment at a time, whole; then the newest that there is."""
    copying = state.copying
    if copying is not None:
        if copying.moment.round != number:
            state = replace(state, copying=None)
        elif replicas.done(copying, held.of(state.said, copying.moment)):
            state = replace(state, copying=None, replicated=copying.moment)
    whole = None if state.whole is None else state.whole.moment
    if (
        state.copying is None
        and whole is not None
        and whole.round == number
        and whole != state.unfit
        and (state.replicated is None or state.replicated < whole)
        and len(members) > 1
        and held.bases(state.said, members)
    ):
        made = replicas.plan(whole, held.of(state.said, whole), members)
        if not made.copies:
            return replace(state, replicated=whole)
        replicated = _safe(state) if state.replicated is None else state.replicated
        return replace(state, copying=made, replicated=replicated)
    return state


def _safe(state: Checkpoint) -> Moment | None:
    """The newest that a master before this one has had replicated: it is kept until there is another."""
    moments = {moment for said in state.said.values() for moment in said.holdings}
    for moment in sorted(moments, reverse=True):
        if replicas.safe(held.of(state.said, moment)):
            return moment
    return None


# --- storage -------------------------------------------------------------------------------------


def _storage(
    state: Checkpoint,
    number: int,
    members: Sequence[Member],
    committed: Moment | None,
    needed: Moment | None,
) -> tuple[dict[NodeId, dict[Moment, frozenset[int]]], tuple[Commit, ...]]:
    """Who writes what, and who writes a manifest since all of its shards are there.

    needed: to be written whether or not it is due. A node writes what its own ranks saved, and of a
    replica only what nobody else has.
    """
    seats = {member.node_id: frozenset(member.ranks) for member in members}
    flush: dict[NodeId, dict[Moment, frozenset[int]]] = {}
    commits: list[Commit] = []
    for moment in _due(state, committed, needed):
        holdings = held.of(state.said, moment)
        if not held.writable(holdings):
            continue
        durable = {rank: shard for h in holdings.values() for rank, shard in h.durable.items()}
        missing = set(range(held.world(holdings))) - durable.keys()
        if not missing:
            writer = next(node_id for node_id, h in holdings.items() if h.durable)
            commits.append(Commit(node_id=writer, moment=moment, shards=durable))
        writes: dict[NodeId, set[int]] = {}
        if moment.round == number:
            for node_id, holding in holdings.items():
                writes[node_id] = missing & holding.ranks & seats.get(node_id, frozenset())
            missing.difference_update(*writes.values())
        for node_id, holding in holdings.items():
            mine = writes.setdefault(node_id, set())
            mine |= missing & holding.ranks
            missing -= mine
            if mine:
                flush.setdefault(node_id, {})[moment] = frozenset(mine)
    return flush, tuple(commits)


def _due(state: Checkpoint, committed: Moment | None, needed: Moment | None) -> list[Moment]:
    """What is to be written and is not committed, the oldest first."""
    due = set(state.due)
    if needed is not None:
        due.add(needed)
    return sorted(moment for moment in due if committed is None or moment > committed)

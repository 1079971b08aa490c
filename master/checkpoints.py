"""Which snapshot is whole, which one a round goes on from, what goes to storage, who commits it. Pure.

Each node says, whole and each time, what it holds of a checkpoint (`Said`). Nothing of it is journaled:
a master that starts again is told again, and comes to the same orders. What must not be forgotten by
all at once, the commit, is a file on storage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.master import holdings as held
from elastic.master import replicas
from elastic.master.events import Incarnation, NodeId
from elastic.master.holdings import NOTHING, Look, Looked, Member, Restore, Said, Shard, Source
from elastic.master.replicas import Copying
from elastic.proto.moment import Moment, Span, merged


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
    look: tuple[NodeId, Look] | None
    """The node whose rank 0 is to look on storage, since memory does not tell what is loaded."""
    keep: tuple[Moment, ...]
    """Beside the newest that is whole, what must not be written over."""
    copying: Copying | None
    """The replicas that are to be made now."""
    committed: Moment | None
    """The newest that is on storage, as far as this master has heard; `NOTHING`: nothing is."""
    lost: Mapping[Moment, str]
    """Of this round: what is never whole, and why."""
    left_out: tuple[Span, ...]
    """By ranks of this round: what is never whole either, the newest of it."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint of the job, by what its nodes have said."""

    said: Mapping[NodeId, Said] = field(default_factory=dict[NodeId, Said])
    whole: Whole | None = None
    """The newest; it stays that when a node goes, until it turns out that it cannot be loaded."""
    images: Mapping[Moment, int] = field(default_factory=dict[Moment, int])
    """How many there are of each, replicas included."""
    marked: Mapping[Moment, int] = field(default_factory=dict[Moment, int])
    """How many nodes have been told of each that it was whole."""
    due: Mapping[Moment, int] = field(default_factory=dict[Moment, int])
    """How many nodes have something of each that is to be written."""
    known: Moment | None = None
    """The newest that anybody has said to be on storage, or `NOTHING`; None: nobody has."""
    asking: Mapping[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """How many nodes ask for each load of each round."""
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
    savers: int = 0
    """How many nodes may have ranks that save to it."""
    read_only: bool = False
    """There were none when a node spoke last: it is what the job begins from, and nothing of its own."""


def hear(state: Checkpoint, said: Said) -> Checkpoint:
    """A node says what it holds now."""
    state = _count(state, state.said.get(said.node_id), said)
    heard = [moment for moment in (state.known, *_on_storage(said)) if moment is not None]
    state = replace(
        state,
        said={**state.said, said.node_id: said},
        known=max(heard, default=None),
        read_only=not state.savers,
    )
    if state.copying is not None and state.copying.moment in said.unfit:
        state = replace(state, copying=None, unfit=state.copying.moment)
    for moment in sorted(said.holdings, reverse=True):
        if state.whole is not None and moment <= state.whole.moment:
            break
        if state.images.get(moment, 0) >= said.holdings[moment].world_size:
            units = held.whole(held.of(state.said, moment))
            if units:
                return replace(state, whole=Whole(moment=moment, units=units))
    return state


def _by_units(state: Checkpoint) -> Checkpoint:
    """What was known as whole, and is, though some rank's image is gone: as a new master finds it. Once for
    all that was heard, since it is looked for in all that all nodes have."""
    for moment in sorted(state.marked, reverse=True):
        if state.whole is not None and moment <= state.whole.moment:
            break
        units = held.whole(held.of(state.said, moment))
        if units:
            return replace(state, whole=Whole(moment=moment, units=units))
    return state


def _on_storage(said: Said) -> Iterator[Moment | None]:
    """What a node says to be there."""
    yield said.committed
    yield from (moment for moment, holding in said.holdings.items() if holding.committed)
    if said.looked is not None and said.wanted is None and not said.looked.error:
        yield said.looked.stored or NOTHING


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
    images, due, asking = dict(state.images), dict(state.due), dict(state.asking)
    marked, savers = dict(state.marked), state.savers
    for said, sign in ((before, -1), (after, 1)):
        if said is None:
            continue
        savers += sign * (not said.read_only)
        for moment, holding in said.holdings.items():
            images[moment] = images.get(moment, 0) + sign * len(holding.ranks)
            due[moment] = due.get(moment, 0) + sign * holding.persist
            marked[moment] = marked.get(moment, 0) + sign * bool(holding.all_units)
        if said.asks:
            load = said.asks, said.load
            asking[load] = asking.get(load, 0) + sign
    return replace(
        state,
        images={moment: count for moment, count in images.items() if count},
        due={moment: count for moment, count in due.items() if count},
        marked={moment: count for moment, count in marked.items() if count},
        asking={load: count for load, count in asking.items() if count},
        savers=savers,
    )


def decide(
    state: Checkpoint, number: int, members: Sequence[Member], *, ending: bool = False
) -> tuple[Checkpoint, Orders]:
    """What follows from all that was said.

    number, members: the standing round and its nodes, the one with rank 0 first. ending: the ranks
    are stopping, so the newest that is whole goes to storage whether or not it was due.
    """
    state = _by_units(state)
    state, needed, look, reason = _restore(state, number, members)
    if ending and state.whole is not None:
        needed = state.whole.moment
    flush, commits = _storage(state, number, members, needed)
    state = _replicate(state, number, members)
    now = (state.replicated, None if state.copying is None else state.copying.moment)
    standing = state.restore is not None and state.restore.round == number
    return state, Orders(
        whole=state.whole,
        flush=flush,
        commits=commits,
        restore=state.restore if standing else None,
        sources=state.sources if standing else {},
        look=None if look is None else (members[0].node_id, look),
        keep=tuple(sorted({moment for moment in now if moment is not None})),
        copying=state.copying,
        committed=state.known,
        lost=lost(state, number),
        left_out=_left_out(state, number),
        reason=reason,
    )


def lost(state: Checkpoint, number: int) -> dict[Moment, str]:
    """What is never whole of a round: who waits for it on other nodes is to know, too. Of a moment of
    several nodes it is the last one's reason. What is damaged on one node may be whole by a replica."""
    reasons = {
        at: why
        for node_id in sorted(state.said)
        for at, why in state.said[node_id].lost.items()
        if at.round == number
    }
    return {at: why for at, why in reasons.items() if is_lost(state, at)}


def is_lost(state: Checkpoint, moment: Moment) -> bool:
    """Whether somebody has nothing of it, and nobody has what is missing."""
    return any(moment in said.lost for said in state.said.values()) and not held.writable(
        held.of(state.said, moment)
    )


def _left_out(state: Checkpoint, number: int) -> tuple[Span, ...]:
    spans = {span for said in state.said.values() for span in said.left_out}
    return merged(span for span in spans if span.round == number)


# --- restore -------------------------------------------------------------------------------------


_Restoring = tuple[Checkpoint, Moment | None, Look | None, str]
"""What follows for a load: the state, with the answer if there is one; what must be on storage first,
since those who load it cannot have it from where it is; whether rank 0 is to look there; and why."""


def _restore(state: Checkpoint, number: int, members: Sequence[Member]) -> _Restoring:
    """The same for every rank of a round, also once another master has begun to answer. Each load of a
    round is decided once all of its nodes ask for it."""
    last = state.restore
    done = last.load if last is not None and last.round == number else 0
    asking = {
        one: n for (round_, one), n in state.asking.items() if round_ == number and one > done
    }
    load = max((one for one, count in asking.items() if count >= len(members)), default=0)
    if not members or not load:
        away = len(members) - max(asking.values(), default=0)
        words = f"{away} nodes of round {number} have not asked yet" if asking and members else ""
        return state, None, None, words
    present = [state.said[m.node_id] for m in members if m.node_id in state.said]
    for said in state.said.values():
        answer = said.answer
        if answer is not None and (answer.round, answer.load) == (number, load):
            there = None
            if answer.from_memory and answer.moment is not None:
                there = held.sources(state.said, answer.moment, members)
            return replace(state, restore=answer, sources=there or {}), None, None, ""
    asked = [said for said in present if (said.asks, said.load) == (number, load)]
    if len(asked) < len(members):
        return state, None, None, f"round {number} is asked for by nodes that are not in it"
    return _choose(state, asked[0], members)


def _choose(state: Checkpoint, head: Said, members: Sequence[Member]) -> _Restoring:
    """What a load gets that all nodes ask for. head: what rank 0's says.

    Memory first: storage, which may hang, is only looked at where memory has not all of the state, or
    may be older than what is there.
    """
    wanted, known, looked = head.wanted, state.known, _looked(head, state.known)
    stored = None if looked is None else looked.stored
    moments = {m for s in state.said.values() for m in s.holdings if wanted in (None, m.step)}
    for moment in sorted(moments, reverse=True):
        older = known is not None and moment < known
        if looked is None and (older or known is None):
            break
        if looked is not None and (moment < (stored or NOTHING) or (older and looked.error)):
            break
        holdings = held.of(state.said, moment)
        served = ""
        if held.whole(holdings):
            found = held.sources(state.said, moment, members)
            served = ": a node that has it in memory serves nobody yet"
            if found is not None:
                words = f"goes on from step {moment.step}, in memory"
                answer = Restore(round=head.asks, load=head.load, moment=moment, from_memory=True)
                return _answered(state, answer, words, found)
        if moment > (known or NOTHING) and moment != stored and held.writable(holdings):
            words = f"round {head.asks} waits for step {moment.step} to be on storage{served}"
            return state, moment, None, words
    if looked is None:
        look = Look(round=head.asks, load=head.load, known=known or NOTHING)
        return state, None, look, f"round {head.asks} waits for rank 0 to look on storage"
    answer = Restore(round=head.asks, load=head.load, moment=stored, error=looked.error)
    if looked.error:
        return _answered(state, answer, f"has nothing to load: {looked.error}")
    if stored is None and wanted is not None:
        state = replace(state, restore=answer, sources={})
        return state, None, None, f"round {head.asks} finds no step {wanted}"
    if stored is None:
        return _answered(state, answer, "begins anew")
    return _answered(state, answer, f"goes on from step {stored.step}, on storage")


def _looked(head: Said, known: Moment | None) -> Looked | None:
    """What rank 0 has found for this load, unless there has come more since."""
    looked = head.looked
    if looked is None or (looked.look.round, looked.look.load) != (head.asks, head.load):
        return None
    seen = max(looked.look.known, looked.stored or NOTHING)
    return looked if known is None or known <= seen else None


def _answered(
    state: Checkpoint,
    answer: Restore,
    words: str,
    sources: Mapping[NodeId, tuple[Source, ...]] | None = None,
) -> _Restoring:
    """Nobody goes back behind what the round itself has saved: it might be taken for what is saved anew."""
    saved = max((m for m in state.images if m.round == answer.round), default=NOTHING)
    if saved > (answer.moment or NOTHING) and not answer.error:
        words = f"has saved step {saved.step} since"
        error = (
            f"this round {words}: ranks that are started anew (`elasticctl restart --from`) go back "
            "behind that"
        )
        answer, sources = replace(answer, moment=None, from_memory=False, error=error), None
    state = replace(state, restore=answer, sources=sources or {})
    return state, None, None, f"round {answer.round} {words}"


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
    needed: Moment | None,
) -> tuple[dict[NodeId, dict[Moment, frozenset[int]]], tuple[Commit, ...]]:
    """Who writes what, and who writes a manifest since all of its shards are there.

    needed: to be written whether or not it is due. A node writes what its own ranks saved, and of a
    replica only what nobody else has.
    """
    seats = {member.node_id: frozenset(member.ranks) for member in members}
    flush: dict[NodeId, dict[Moment, frozenset[int]]] = {}
    commits: list[Commit] = []
    for moment in _due(state, needed):
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


def _due(state: Checkpoint, needed: Moment | None) -> list[Moment]:
    """What is to be written and is not committed, the oldest first."""
    due = set(state.due)
    if needed is not None:
        due.add(needed)
    return sorted(moment for moment in due if moment > (state.known or NOTHING))

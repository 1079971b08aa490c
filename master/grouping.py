"""Which nodes are tested together next. Pure.

A group is some nodes and the pairs of them that are tested, one after another, so that every result is
about two nodes. The first round keeps neighbours together. There is the least between them that could
fail beside the nodes themselves, all pairs have ways of one length, whose times can be compared, and a
broken uplink does not make suspects of a whole rack. Suspects get neighbours, too, as long as there are.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from elastic.master.events import NodeId
from elastic.master.pair_results import Labels, Link, link

FEW = 16
"""So many nodes make a single group after the first round, in which good ones serve several suspects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes that are in no other group of the round."""

    pairs: tuple[tuple[NodeId, NodeId], ...]
    """In the order in which they are tested."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """In the order in which they come up."""
        return tuple(dict.fromkeys(node_id for pair in self.pairs for node_id in pair))


def _star(hub: NodeId, *others: NodeId) -> Group:
    return Group(pairs=tuple((hub, other) for other in others))


def first(labels: Labels, turn: int = 0) -> tuple[Group, ...]:
    """Neighbours in pairs; an odd one makes their last pair a star of three. At least two nodes.

    Who has no neighbour is paired with others that have none, and the last of them with anybody. turn: how often
    that was done before; others meet then.
    """
    by_label: dict[str, list[NodeId]] = {}
    for node_id, label in labels.items():
        by_label.setdefault(label, []).append(node_id)
    single = [ids[0] for ids in by_label.values() if len(ids) == 1]
    groups = [
        pair for ids in by_label.values() if len(ids) > 1 for pair in _pairs(_moved(ids, turn))
    ]
    if len(single) > 1:
        groups += _pairs(_moved(single, turn))
    elif single:
        hub = groups[-1].pairs[0][0]
        groups[-1] = Group(pairs=(*groups[-1].pairs, (hub, single[0])))
    return tuple(groups)


def _moved(ids: Sequence[NodeId], turn: int) -> Sequence[NodeId]:
    """In an order in which other two follow one another each turn, as in a round-robin tournament: of an even number all
    have met after one turn less."""
    spare = (turn - 1) % len(ids) if len(ids) % 2 else len(ids)
    left, apart = [*ids[:spare], *ids[spare + 1 :]], ids[spare : spare + 1]
    ring = [*left[0::2], *reversed(left[1::2])]
    by = turn % max(len(ring) - 1, 1)
    ring = [*ring[:1], *ring[1 + by :], *ring[1 : 1 + by]]
    half = len(ring) // 2
    return [
        *(one for two in zip(ring[:half], reversed(ring), strict=False) for one in two),
        *apart,
    ]


def _pairs(ids: Sequence[NodeId]) -> list[Group]:
    """Of two or more."""
    pairs = [_star(a, b) for a, b in zip(ids[::2], ids[1::2], strict=False)]
    if len(ids) % 2:
        pairs[-1] = _star(*pairs[-1].nodes, ids[-1])
    return pairs


def among(ids: Sequence[NodeId], tested: Collection[Link]) -> tuple[Group, ...]:
    """Pairs of nodes that have not met; of few nodes all there are, one after another."""
    if len(ids) <= FEW:
        pairs = [pair for pair in combinations(ids, 2) if link(*pair) not in tested]
        return _one(pairs)
    left = list(reversed(ids))
    groups: list[Group] = []
    while left:
        a = left.pop()
        for index in range(len(left) - 1, -1, -1):
            if link(a, left[index]) not in tested:
                groups.append(_star(a, left.pop(index)))
                break
    return tuple(groups)


def _one(pairs: Sequence[tuple[NodeId, NodeId]]) -> tuple[Group, ...]:
    """A single group; nobody waits for long, as neighbours in the list have no node in common."""
    left, ordered, turn = list(pairs), list[tuple[NodeId, NodeId]](), set[NodeId]()
    while left:
        apart = next((pair for pair in left if turn.isdisjoint(pair)), None)
        if apart is None:
            turn.clear()
            continue
        left.remove(apart)
        ordered.append(apart)
        turn.update(apart)
    return (Group(pairs=tuple(ordered)),) if ordered else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What would tell more."""

    suspects: Mapping[NodeId, int]
    """How many more good nodes each should be tested with."""
    again: Sequence[Link]
    """Links between good nodes that were bad once."""
    slow_once: Sequence[NodeId]
    """Good nodes that were slow once, to be tested with anybody."""


def further(
    labels: Labels, good: Sequence[NodeId], wanted: Wanted, tested: Collection[Link], star: int
) -> tuple[Group, ...]:
    """Groups for as much of it as can be had at once; at least one, if anything can."""
    if len(labels) <= FEW:
        return _all_at_once(labels, good, wanted, tested)
    busy_next = {node_id for which in wanted.again for node_id in which} | set(wanted.slow_once)
    free = [node_id for node_id in good if node_id not in busy_next]
    # the last are taken first
    pool = _Pool(labels, [*(node_id for node_id in good if node_id in busy_next), *reversed(free)])
    groups: list[Group] = []
    if len(good) >= len(wanted.suspects):
        share = max(1, len(free) // max(len(wanted.suspects), 1))
        groups += _with_witnesses(wanted.suspects, pool, tested, min(share, star))
    else:
        groups += _at_witnesses(wanted.suspects, pool, good, tested, star)
    groups += _again(wanted.again, pool, star)
    for node_id in wanted.slow_once:
        if pool.use(node_id):
            other = pool.take(node_id, lambda _: True)
            groups += [_star(node_id, other)] if other else []
    return tuple(groups)


def _all_at_once(
    labels: Labels, good: Sequence[NodeId], wanted: Wanted, tested: Collection[Link]
) -> tuple[Group, ...]:
    """All of it, in a single group; who has the least to do so far is taken first, then neighbours."""
    turns: Counter[NodeId] = Counter()
    pairs: list[tuple[NodeId, NodeId]] = [*wanted.again, *wanted.again]
    turns.update(node_id for pair in pairs for node_id in pair)
    needs = {**wanted.suspects, **{n: 1 for n in wanted.slow_once if not turns[n]}}
    for node_id, wants in needs.items():
        able = [other for other in good if other != node_id]
        if node_id in wanted.suspects:
            able = [other for other in able if link(node_id, other) not in tested]
        able.sort(key=lambda other, n=node_id: (turns[other], labels[other] != labels[n]))  # type: ignore[misc]
        pairs += [(node_id, other) for other in able[:wants]]
        turns.update(able[:wants])
    return _one(pairs)


class _Pool:
    """Good nodes that nobody has taken yet."""

    def __init__(self, labels: Labels, ids: Sequence[NodeId]) -> None:
        self._labels, self._all = labels, list(ids)
        self._used: set[NodeId] = set()
        self._near: dict[str, list[NodeId]] = {}
        for node_id in ids:
            self._near.setdefault(labels[node_id], []).append(node_id)

    def free(self, *ids: NodeId) -> bool:
        return self._used.isdisjoint(ids)

    def use(self, *ids: NodeId) -> bool:
        """Take them; False: one of them is taken, and the others stay free."""
        free = self.free(*ids)
        if free:
            self._used.update(ids)
        return free

    def take(self, for_: NodeId, fit: Callable[[NodeId], bool]) -> NodeId | None:
        """One that fits, a neighbour first."""
        for candidates in (self._near.get(self._labels[for_], []), self._all):
            for index in range(len(candidates) - 1, -1, -1):
                node_id = candidates[index]
                if node_id in self._used:
                    del candidates[index]
                elif node_id != for_ and fit(node_id):
                    del candidates[index]
                    self._used.add(node_id)
                    return node_id
        return None


def _with_witnesses(
    suspects: Mapping[NodeId, int], pool: _Pool, tested: Collection[Link], share: int
) -> Iterator[Group]:
    """Good nodes are plenty: each suspect gets some."""
    for suspect, wants in suspects.items():
        found: list[NodeId] = []
        while len(found) < min(share, wants):
            witness = pool.take(suspect, lambda other, s=suspect: link(s, other) not in tested)  # type: ignore[misc]
            if witness is None:
                break
            found.append(witness)
        if found:
            yield _star(suspect, *found)


def _at_witnesses(
    suspects: Mapping[NodeId, int],
    pool: _Pool,
    good: Sequence[NodeId],
    tested: Collection[Link],
    star: int,
) -> Iterator[Group]:
    """Good nodes are scarce: each gets as many suspects as a star has."""
    left = dict.fromkeys(suspects)
    for witness in good:
        new = (suspect for suspect in left if link(witness, suspect) not in tested)
        mine = tuple(islice(new, star))
        if mine and pool.use(witness):
            for suspect in mine:
                del left[suspect]
            yield _star(witness, *mine)


def _again(links: Sequence[Link], pool: _Pool, most: int) -> list[Group]:
    """Those that share nodes in one group, up to so many; each twice, if only to outlast a disturbance."""
    in_group: dict[NodeId, list[Link]] = {}
    for which in links:
        new = [node_id for node_id in which if node_id not in in_group]
        old = {id(group): group for node_id in which if (group := in_group.get(node_id))}
        joined = [which, *(one for group in old.values() for one in group)]
        if len(joined) <= most and pool.use(*new):
            for node_id in {node_id for one in joined for node_id in one}:
                in_group[node_id] = joined
    groups = {id(group): group for group in in_group.values()}
    return [Group(pairs=(*group, *group)) for group in groups.values()]

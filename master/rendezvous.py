"""Which nodes train together next. No I/O and no clock: who is there comes in, seats go out."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastic.master.events import NodeId
from elastic.master.policy import Policy

Labels = tuple[tuple[str, str], ...]

CHOICE = 256
"""Newcomers that are looked through for the one that suits a place best; bounds the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    node_id: NodeId
    slots: int
    since: float
    """When it came, in job time."""
    ready: float = -math.inf
    """From when on, in job time, those who train may stop for it: by then its ranks start fast."""
    labels: Labels = ()
    """Topology, in any order, such as (("rack", "7"), ("zone", "a"))."""
    node_rank: int | None = None
    """The place that its user wants for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A place in a round; its index is the node rank."""

    node_id: NodeId
    ranks: int
    labels: Labels = ()


def with_ranks(seats: Iterable[Seat]) -> Iterator[tuple[Seat, range]]:
    """Each place and the ranks there: they are numbered through a round's places."""
    first = 0
    for seat in seats:
        yield seat, range(first, first := first + seat.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seats: tuple[Seat, ...]
    """Empty: no round now."""
    until: float | None
    """When waiting may be over, in job time; None: only a node that comes ends it."""
    reason: str


def decide(
    last: tuple[Seat, ...],
    here: Sequence[Candidate],
    coming: Sequence[tuple[NodeId, float]],
    now: float,
    unit: int,
    policy: Policy,
) -> Plan:
    """Seat the largest legal world, or say why not.

    last: the seats of the round before, whose nodes keep their places.
    coming: nodes known to be on their way, each with the time until which it is waited for.
    unit: what the script declared; the world is a multiple of it and of the policy's.
    """
    step = math.lcm(unit, policy.rank_unit)
    size = _legal_size(len(here), policy)
    awaited = [(node, until) for node, until in coming if until > now]
    names = ", ".join(node for node, _ in awaited[:5])
    if size == 0:
        plan = too_few(len(here), policy)
        return replace(plan, reason=f"{plan.reason}; coming: {names}") if names else plan
    until = _last_call(last, here, awaited, policy)
    if now < until:
        reason = f"{many(len(here), 'node')} here, last call" + (f" for {names}" if names else "")
        return Plan(seats=(), until=until, reason=reason)
    seats = _fill_up(last, here, size, step, policy) or _spread_out(last, here, size, step, policy)
    if seats:
        return Plan(seats=seats, until=None, reason=_describe(seats, here))
    slots = sum(c.slots for c in here)
    reason = f"no legal world: a multiple of {step} ranks, of {many(slots, 'slot')} on "
    reason += many(len(here), "node")
    return Plan(seats=(), until=None, reason=reason)


def too_few(here: int, policy: Policy) -> Plan:
    """No round: not enough nodes."""
    reason = f"{here} of at least {many(policy.min_nodes, 'node')} here"
    if policy.node_unit > 1:
        reason += f", in units of {policy.node_unit}"
    return Plan(seats=(), until=None, reason=reason)


def could_grow(
    seats: tuple[Seat, ...], here: Sequence[Candidate], now: float, unit: int, policy: Policy
) -> Plan | None:
    """A larger legal world than the one that runs, once those who came have settled.

    That costs nothing, for training goes on: so even the last that fits has to stay for a moment.
    """
    seated = {s.node_id for s in seats}
    newcomers = [c for c in here if c.node_id not in seated]
    if not newcomers or len(here) - len(newcomers) < len(seats):
        return None  # not while a node of the round is out of reach
    plan = decide(seats, here, (), now, unit, policy)
    if sum(s.ranks for s in plan.seats) <= sum(s.ranks for s in seats):
        return None
    chosen = {seat.node_id for seat in plan.seats}
    taken = [c for c in newcomers if c.node_id in chosen] or newcomers
    called = max(c.since for c in taken) + policy.last_call
    longest = min(c.since for c in taken) + policy.last_call + policy.preparation
    settled = min(max(called, *(c.ready for c in taken)), longest)
    if now < settled:
        why = "more nodes may follow those that came" if now < called else "those that came prepare"
        return Plan(seats=(), until=settled, reason=why)
    return plan


def _legal_size(here: int, policy: Policy) -> int:
    most = min(here, policy.max_nodes)
    if policy.sizes:
        return max((s for s in policy.sizes if policy.min_nodes <= s <= most), default=0)
    size = most // policy.node_unit * policy.node_unit
    return size if size >= policy.min_nodes else 0


def _last_call(
    last: tuple[Seat, ...],
    here: Sequence[Candidate],
    awaited: Sequence[tuple[NodeId, float]],
    policy: Policy,
) -> float:
    """Until when to wait for a larger world than the one that could start now."""
    if len(here) >= policy.max_nodes:
        return -math.inf
    calls = [-math.inf]
    if _legal_size(len(here) + len(awaited), policy) > _legal_size(len(here), policy):
        calls += [until for _, until in awaited]
    if not last or len(here) < len(last):  # others may be right behind the last that came
        calls.append(max(c.since for c in here) + policy.last_call)
    return max(calls)


def _fill_up(
    last: tuple[Seat, ...], here: Sequence[Candidate], size: int, step: int, policy: Policy
) -> tuple[Seat, ...]:
    """Whole nodes, as many as make a multiple of `step` ranks; the last may have idle slots."""
    while size:
        nodes = _seat(last, here, size)
        left = sum(c.slots for c in nodes) // step * step
        shares = []
        for node in nodes:
            shares.append(min(left, node.slots))
            left -= shares[-1]
        filled = sum(1 for share in shares if share)
        if filled == size:
            return _seats(nodes, shares)
        size = _legal_size(filled, policy)
    return ()


def _spread_out(
    last: tuple[Seat, ...], here: Sequence[Candidate], size: int, step: int, policy: Policy
) -> tuple[Seat, ...]:
    """As many nodes as are legal share a world that fewer could hold."""
    while size >= policy.min_nodes and size > 0:
        nodes = _seat(last, here, size)
        left = sum(c.slots for c in nodes) // step * step
        if left >= size:
            shares = [0] * size
            smallest_first = sorted(range(size), key=lambda i: nodes[i].slots)
            for done, index in enumerate(smallest_first):
                shares[index] = min(nodes[index].slots, left // (size - done))
                left -= shares[index]
            return _seats(nodes, shares)
        size = _legal_size(size - 1, policy)
    return ()


def _seats(nodes: Sequence[Candidate], shares: Sequence[int]) -> tuple[Seat, ...]:
    return tuple(
        Seat(node_id=node.node_id, ranks=ranks, labels=node.labels)
        for node, ranks in zip(nodes, shares, strict=True)
    )


def _seat(last: tuple[Seat, ...], here: Sequence[Candidate], size: int) -> tuple[Candidate, ...]:
    """Who had a place keeps it; who is new takes a vacant one, the most alike in labels first.

    A hole that nobody takes is closed by the last node, so that few ranks move.
    """
    by_id = {c.node_id: c for c in here}
    seated = {s.node_id for s in last}
    levels = _levels(here)
    places = [by_id.get(seat.node_id) for seat in last]
    newcomers = [c for c in here if c.node_id not in seated]
    newcomers.sort(key=lambda c: _order(c, levels))
    vacancies = size - sum(1 for place in places if place is not None)
    holes = [index for index, place in enumerate(places) if place is None]
    for index in holes[: max(0, min(vacancies, len(newcomers)))]:
        suits = [
            (c.node_rank == index, _alike(c.labels, last[index].labels, levels))
            for c in newcomers[:CHOICE]
        ]
        places[index] = newcomers.pop(suits.index(max(suits)))
    for index in holes:
        while places and places[-1] is None:
            places.pop()
        if index < len(places) and places[index] is None:
            places[index] = places.pop()
    return tuple([place for place in places if place is not None] + newcomers)[:size]


def _levels(here: Sequence[Candidate]) -> tuple[str, ...]:
    """Keys of labels, outermost first: of what is large there are few."""
    values: dict[str, set[str]] = {}
    for candidate in here:
        for key, value in candidate.labels:
            values.setdefault(key, set()).add(value)
    return tuple(sorted(values, key=lambda key: (len(values[key]), key)))


def _order(candidate: Candidate, levels: tuple[str, ...]) -> tuple[object, ...]:
    """Where the user wants it, then neighbours together, then names as people count them."""
    wanted = candidate.node_rank if candidate.node_rank is not None else 1 << 62
    labels = dict(candidate.labels)
    where = tuple(_natural(labels.get(key, "")) for key in levels)
    return (wanted, where, _natural(candidate.node_id))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return tuple((0, int(p), "") if p[0] in "0123456789" else (1, 0, p) for p in parts)


def _alike(one: Labels, other: Labels, levels: tuple[str, ...]) -> int:
    """How many labels two nodes share, outermost first."""
    mine, theirs = dict(one), dict(other)
    shared = 0
    for key in levels:
        if mine.get(key) != theirs.get(key):
            break
        shared += 1
    return shared


def _describe(seats: tuple[Seat, ...], here: Sequence[Candidate]) -> str:
    ranks = {seat.node_id: seat.ranks for seat in seats}
    idle = sum(c.slots - ranks[c.node_id] for c in here if c.node_id in ranks)
    spare = len(here) - len(seats)
    text = f"{many(len(seats), 'node')}, {many(sum(ranks.values()), 'rank')}"
    text += f", {many(idle, 'slot')} idle" if idle else ""
    return text + (f", {spare} spare" if spare else "")


def many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"

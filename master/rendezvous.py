"""Which nodes train together next. No I/O and no clock: who is there comes in, seats go out."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.master.events import NodeId
from elastic.master.policy import Policy

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    node_id: NodeId
    slots: int
    since: float
    """When it came, in job time."""
    labels: Labels = ()
    """Topology, outermost first, such as (("zone", "a"), ("rack", "7"))."""
    node_rank: int | None = None
    """The place that its user wants for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A place in a round; its index is the node rank."""

    node_id: NodeId
    ranks: int
    labels: Labels = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seats: tuple[Seat, ...]
    """Empty: no round now."""
    until: float | None
    """When waiting may be over, in job time."""
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
    if len(here) < policy.max_nodes:
        calls = [until for _, until in awaited]
        if not last:
            calls.append(max(c.since for c in here) + policy.last_call)
        if calls and now < max(calls):
            reason = f"{len(here)} nodes here, last call" + (f" for {names}" if names else "")
            return Plan(seats=(), until=max(calls), reason=reason)
    while size:
        seats = _seat(last, here, size)
        filled = _fill(seats, {c.node_id: c.slots for c in here}, step)
        if len(filled) == size:
            return Plan(seats=filled, until=None, reason=_describe(filled, len(here)))
        size = _legal_size(len(filled), policy)
    slots = sum(c.slots for c in here)
    return Plan(seats=(), until=None, reason=f"no multiple of {step} ranks in {slots} slots")


def too_few(here: int, policy: Policy) -> Plan:
    """No round: not enough nodes."""
    reason = f"{here} of at least {policy.min_nodes} nodes here"
    if policy.node_unit > 1:
        reason += f", in units of {policy.node_unit}"
    return Plan(seats=(), until=None, reason=reason)


def could_grow(
    seats: tuple[Seat, ...], here: Sequence[Candidate], now: float, unit: int, policy: Policy
) -> Plan | None:
    """A larger legal world than the one that runs, once those who came have settled."""
    if sum(s.ranks for s in seats) == 0:
        return None
    plan = decide(seats, here, (), now, unit, policy)
    if sum(s.ranks for s in plan.seats) <= sum(s.ranks for s in seats):
        return None
    seated = {s.node_id for s in seats}
    settled = max((c.since for c in here if c.node_id not in seated), default=0) + policy.last_call
    if now < settled and len(here) < policy.max_nodes:
        return Plan(seats=(), until=settled, reason="more nodes may follow those that came")
    return plan


def _legal_size(here: int, policy: Policy) -> int:
    size = min(here, policy.max_nodes) // policy.node_unit * policy.node_unit
    return size if size >= policy.min_nodes else 0


def _seat(last: tuple[Seat, ...], here: Sequence[Candidate], size: int) -> tuple[Candidate, ...]:
    """Who had a place keeps it; who is new takes a vacant one, the most alike in labels first.

    A hole that nobody takes is closed by the last node, so that few ranks move.
    """
    by_id = {c.node_id: c for c in here}
    seated = {s.node_id for s in last}
    places = [by_id.get(seat.node_id) for seat in last]
    vacancies = max(0, size - sum(1 for place in places if place is not None))
    newcomers = sorted((c for c in here if c.node_id not in seated), key=_order)[:vacancies]
    for index, seat in enumerate(last):
        if places[index] is None and newcomers:
            alike = [_alike(c.labels, seat.labels) for c in newcomers]
            places[index] = newcomers.pop(alike.index(max(alike)))
    while None in places:
        mover = places.pop()
        if mover is not None:
            places[places.index(None)] = mover
    return tuple([place for place in places if place is not None] + newcomers)[:size]


def _fill(
    seats: Sequence[Candidate], slots: dict[NodeId, int], unit: int
) -> tuple[Seat, ...]:
    """Give out ranks seat by seat, as many as make a multiple of `unit`; drop empty seats."""
    left = sum(slots[c.node_id] for c in seats) // unit * unit
    filled: list[Seat] = []
    for candidate in seats:
        ranks = min(left, slots[candidate.node_id])
        left -= ranks
        if ranks:
            filled.append(Seat(node_id=candidate.node_id, ranks=ranks, labels=candidate.labels))
    return tuple(filled)


def _order(candidate: Candidate) -> tuple[object, ...]:
    """Where the user wants it, then neighbours together, then names as people count them."""
    wanted = candidate.node_rank if candidate.node_rank is not None else 1 << 30
    return (wanted, candidate.labels, _natural(candidate.node_id))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts)


def _alike(one: Labels, other: Labels) -> int:
    """How many labels two nodes share, outermost first."""
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    return shared


def _describe(seats: tuple[Seat, ...], here: int) -> str:
    spare = here - len(seats)
    ranks = sum(s.ranks for s in seats)
    return f"{len(seats)} nodes, {ranks} ranks" + (f", {spare} spare" if spare else "")

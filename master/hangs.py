"""Whether a round hangs: suspicion is cheap and ends nothing, a verdict needs evidence. Pure.

A rank is *quiet* since its last optimizer step. The job's rhythm says how long that may be (`patience`);
at half of it the round is suspected, and all of its ranks are looked at, again and again, until one ticks or
the looks say who stands apart (`culprits.py`). What is learned belongs to the round.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic.master.culprits import Found, Seen, find
from elastic.master.events import NodeId
from elastic.master.policy import Policy

LEARNED = 20
"""Reports with steps after which a round's rhythm counts as learned."""
REPORTS = 64
"""The newest of them say what is typical."""
FADES = 0.9995
"""A report makes the longest interval count by so much less."""
FIRST_STEP = 60.0
"""Seconds that nothing is suspected in a round before its first step, which imports, compiles, loads."""
GAP, LONGEST_GAP = 0.25, 30.0
"""Seconds between two looks: at first; and at most, for they double once the patience is over."""
ANSWER = 6.0
"""Seconds after which a look is judged without the nodes that did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    reports: tuple[float, ...] = ()
    """The longest interval of each of the newest reports with steps, in seconds."""
    count: int = 0
    """Reports with steps so far."""
    longest: float = 0.0
    """Of all intervals; fades."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    number: int
    """Of the last look; they grow over all of a master's life."""
    looked: float
    """When it was ordered, in job time."""
    awaited: frozenset[NodeId]
    """Nodes that have not answered it."""
    seen: Mapping[int, tuple[Seen, ...]] = field(default_factory=dict[int, tuple[Seen, ...]])
    """By rank, oldest look first."""
    looks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    round: int = 0
    began: float = 0.0
    rhythm: Rhythm = Rhythm()
    suspicion: Suspicion | None = None
    number: int = 0
    """Of the last look that was ordered."""


@dataclass(frozen=True, slots=True)
class Examine:
    """Have all nodes of the round look at their ranks."""

    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    found: Found
    quiet: float
    """Seconds that the round stood still."""
    seen: Mapping[int, tuple[Seen, ...]]
    """What it rests on: looks by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    state: State
    order: Examine | Verdict | None = None
    wake: float | None = None
    """When to decide again, in job time."""
    reason: str = ""


def begin(state: State, number: int, now: float) -> State:
    """A round has begun."""
    return State(round=number, began=now, number=state.number)


def learned(state: State, interval: float) -> State:
    """The longest interval between two steps of a rank that one node has to tell, in seconds."""
    return replace(state, rhythm=_learn(state.rhythm, interval))


def _learn(rhythm: Rhythm, longest: float) -> Rhythm:
    return Rhythm(
        reports=(*rhythm.reports, longest)[-REPORTS:],
        count=rhythm.count + 1,
        longest=max(longest, rhythm.longest * FADES),
    )


def patience(state: State, policy: Policy) -> float:
    """Seconds that a rank may be quiet before its round counts as hung: by the round's own rhythm."""
    rhythm = state.rhythm
    if not rhythm.reports:
        return FIRST_STEP
    typical = statistics.median(rhythm.reports)
    if rhythm.count < LEARNED:
        return max(policy.hang_floor, 10 * typical, 3 * rhythm.longest)
    return max(policy.hang_floor, 3 * typical, 1.3 * rhythm.longest)


def suspects_at(state: State, policy: Policy) -> float:
    """Seconds of quiet from which a round is looked at."""
    return patience(state, policy) / 2


def seen(state: State, node: NodeId, number: int, looks: tuple[Seen, ...]) -> State:
    """A node has looked at its ranks."""
    suspicion = state.suspicion
    if suspicion is None or suspicion.number != number or node not in suspicion.awaited:
        return state
    more = {one.rank: (*suspicion.seen.get(one.rank, ()), one)[-4:] for one in looks}
    suspicion = replace(
        suspicion,
        seen={**suspicion.seen, **more},
        awaited=suspicion.awaited - {node},
    )
    return replace(state, suspicion=suspicion)


def decide(
    state: State,
    ticked: float | None,
    phases: Mapping[int, str],
    nodes: frozenset[NodeId],
    now: float,
    policy: Policy,
) -> Decision:
    """ticked: when the rank that has been quiet for longest had its last step, in job time; None: no rank
    had one. phases: by rank, what its script says it does. nodes: those of the round.
    """
    since = state.began if ticked is None else ticked
    quiet, limit = now - since, suspects_at(state, policy)
    suspicion = state.suspicion
    if quiet < limit:
        reason = "ranks go on: nothing hangs" if suspicion is not None else ""
        state = replace(state, suspicion=None) if suspicion is not None else state
        return Decision(state=state, wake=since + limit, reason=reason)
    if suspicion is None:
        return _look(state, None, nodes, now, f"no rank's step for {quiet:.1f} s: looking at all")
    if suspicion.awaited and now < suspicion.looked + ANSWER:
        return Decision(state=state, wake=suspicion.looked + ANSWER)
    allowed = patience(state, policy)
    found = find(suspicion.seen, phases, quiet, allowed)
    if found is not None:
        return Decision(
            state=state, order=Verdict(found, quiet, suspicion.seen), reason=found.reason
        )
    gap = GAP if quiet < 2 * allowed else min(LONGEST_GAP, quiet / 4)
    again = suspicion.looked + gap
    if now < again:
        return Decision(state=state, wake=again)
    return _look(state, suspicion, nodes, now, "")


def _look(
    state: State, before: Suspicion | None, nodes: frozenset[NodeId], now: float, reason: str
) -> Decision:
    number = state.number + 1
    suspicion = Suspicion(
        number=number,
        looked=now,
        awaited=nodes,
        seen=before.seen if before is not None else {},
        looks=before.looks + 1 if before is not None else 1,
    )
    state = replace(state, suspicion=suspicion, number=number)
    return Decision(state=state, order=Examine(number), wake=now + ANSWER, reason=reason)

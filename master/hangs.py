"""Whether a round hangs: suspicion is cheap and ends nothing, a verdict needs evidence. Pure.

A rank is *quiet* since its last optimizer step. The job's rhythm says how long that may be (`patience`);
at half of it, or sooner, the round is suspected, and all of its ranks are looked at, again and again, until one ticks or
the looks say who stands apart (`culprits.py`). What is learned belongs to the round.

A round without a step may be of a script that has no optimizer. As a last resort its ranks are looked at now and
then, and whether they go on is what differs between two looks.
"""

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastic.master.culprits import (
    Found,
    Patience,
    find,
    find_without_steps,
    natively,
    unmoved,
)
from elastic.master.events import NodeId
from elastic.master.policy import Policy
from elastic.master.rendezvous import Seat, with_ranks
from elastic.master.seen import Seen

LEARNED = 20
"""Reports with steps after which a round's rhythm counts as learned; one a second at most."""
REPORTS = 64
"""The newest of them say what is typical."""
FADES = 0.9995
"""A report, of which there is one a second at most, makes the longest interval count by so much less."""
PHASES = 100
"""Names of phases that are learned of."""
LONGEST_PHASE = 3600.0
"""Seconds that are believed of one."""
FIRST_STEP, FIRST_FLOORS = 60.0, 50
"""Seconds that nothing is suspected in a round before its first step, which imports, compiles, loads; so many floors
at most, so that a small floor makes them fewer."""
SOONER = 0.4
"""Of the floor: what is left is for looks, of which a verdict needs some."""
RESTS, LONGEST_REST = 0.1, 300.0
"""Between two looks at a round that goes on without steps: of its age; seconds at most, and its patience at least."""
FRESH = 0.5
"""Seconds for which a look shows how things are."""
GAP, LONGEST_GAP = 0.2, 30.0
"""Seconds between two looks: at first; and at most, for they double once the patience is over."""
CLOSER = 60.0
"""Seconds of quiet from which a verdict waits for one look more, with the libraries' calls of those whom it names.
That takes half a second, and stops them meanwhile, so no verdict of seconds does."""
ANSWER, ANSWER_RANK = 6.0, 0.0002
"""Seconds after which a look is judged without the nodes that did not answer: at least, and more of them for each rank,
for the master takes in thousands of answers a second and no more."""


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
    first: int
    """Of its first look."""
    since: Mapping[int, float] = field(default_factory=dict[int, float])
    """Of a round without steps: by rank, the time of the look since which it does not go on."""
    found: Found | None = None
    """Whom the last look was taken closely for."""
    counted: frozenset[str] = frozenset()
    """Places for which `judged` has this suspicion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    round: int = 0
    began: float = 0.0
    world: int = 0
    """The round's ranks."""
    rhythm: Rhythm = Rhythm()
    suspicion: Suspicion | None = None
    judged: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the newest verdict at each place in the code that may have been wrong, in all rounds: how long nothing had moved."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """How long a phase that scripts name has taken at most, by its name, in all rounds."""
    number: int = 0
    """Of the last look that was ordered."""


@dataclass(frozen=True, slots=True)
class InPhase:
    """A rank, in a phase that its script names."""

    name: str
    since: float
    """In job time: when it began, or the rank's last step in it was seen."""
    ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a round's ranks besides its rhythm; the shell keeps it, for there may be many."""

    ticked: float | None
    """When the rank that has been quiet for longest had its last step, in job time; None: no rank had one."""
    stepping: bool
    """No node says that a rank of it is quiet."""
    phases: Mapping[int, InPhase]
    """By rank; those whose scripts say nothing are not here."""
    seen: Mapping[int, tuple[Seen, ...]]
    """By rank, the looks since the suspicion began, oldest first."""
    answered: bool
    """All nodes have answered the last look."""
    begun: bool
    """All nodes have ranks of the round, or it had a step: nobody waits for one that is to start them yet."""
    ended: Mapping[int, NodeId] = field(default_factory=dict[int, NodeId])
    """Ranks that ended, with 0, and their nodes."""


@dataclass(frozen=True, slots=True)
class Examine:
    """Have all nodes of the round look at their ranks."""

    number: int
    close: tuple[int, ...] = ()
    """At which of them with their libraries' calls."""


@dataclass(frozen=True, slots=True)
class Verdict:
    found: Found
    stood: str
    """How long the round stood still, in words."""
    seconds: float
    seen: Mapping[int, tuple[Seen, ...]]
    """What it rests on: looks by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    state: State
    order: Examine | Verdict | None = None
    wake: float | None = None
    """When to decide again, in job time."""
    reason: str = ""


def begin(state: State, number: int, now: float, world: int) -> State:
    """A round of so many ranks has begun."""
    return State(
        round=number,
        began=now,
        world=world,
        number=state.number,
        judged=state.judged,
        phase_seconds=state.phase_seconds,
    )


def in_phase(
    state: State, before: InPhase | None, name: str, ticks: int, now: float
) -> tuple[State, InPhase | None]:
    """A rank is in this phase, and was in another before; empty: in none."""
    if before is not None and name != before.name:
        state = _phased(state, before.name, min(now - before.since, LONGEST_PHASE))
    elif before is not None and ticks == before.ticks:
        return state, before
    return state, InPhase(name, now, ticks) if name else None


def _phased(state: State, name: str, seconds: float) -> State:
    known = state.phase_seconds
    if seconds <= known.get(name, 0.0) or (name not in known and len(known) >= PHASES):
        return state
    return replace(state, phase_seconds={**known, name: seconds})


def learned(state: State, interval: float) -> State:
    """The longest interval between two steps of any rank in the last second or more, in seconds."""
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
        return max(policy.hang_floor, min(FIRST_STEP, FIRST_FLOORS * policy.hang_floor))
    typical = statistics.median(rhythm.reports)
    if rhythm.count < LEARNED:
        return max(policy.hang_floor, 10 * typical, 3 * rhythm.longest)
    return max(policy.hang_floor, 3 * typical, 1.3 * rhythm.longest)


def suspects_at(state: State, policy: Policy) -> float:
    """Seconds of quiet from which a round is looked at."""
    allowed = patience(state, policy)
    return (SOONER if allowed <= policy.hang_floor else 0.5) * allowed


def ended(
    seats: Iterable[Seat], told: Collection[int], finished: Collection[NodeId]
) -> dict[int, NodeId]:
    """Ranks that have ended, with 0, and their nodes: all of those nodes that have finished, and those of which a look
    does not tell though it does of others there. told: ranks of which the last look tells, all nodes having answered."""
    found: dict[int, NodeId] = {}
    for seat, ranks in with_ranks(seats):
        if seat.node_id in finished or any(rank in told for rank in ranks):
            found |= {rank: seat.node_id for rank in ranks if rank not in told}
    return found


def tells(suspicion: Suspicion, number: int, *, awaited: bool) -> bool:
    """Whether an answer to the look of this number tells something now. awaited: its node has not answered the last one,
    and then an earlier one of the same suspicion does, if late: thousands of ranks may answer behind the next order."""
    return number == suspicion.number or (awaited and suspicion.first <= number < suspicion.number)


def _over(state: State, looked: float) -> float:
    """When a look that was ordered then is judged without who has not answered."""
    return looked + ANSWER + ANSWER_RANK * state.world


def decide(state: State, facts: Facts, now: float, policy: Policy) -> Decision:
    """What to do about the round now."""
    if facts.ticked is None:
        return _without_steps(state, facts, now, policy)
    quiet, limit = now - facts.ticked, suspects_at(state, policy)
    suspicion = state.suspicion
    if quiet < limit:
        reason = "" if suspicion is None else "ranks go on: nothing hangs"
        state = state if suspicion is None else replace(state, suspicion=None)
        wake = None if facts.stepping else facts.ticked + limit
        return Decision(state=state, wake=wake, reason=reason)
    if suspicion is None:
        return _look(state, now, f"no rank's step for {quiet:.1f} s: looking at all")
    if not facts.answered and now < _over(state, suspicion.looked):
        return Decision(state=state, wake=_over(state, suspicion.looked))
    limits = _limits(state, facts, policy)
    if suspicion.found is not None:
        suspicion = _unless_moved(suspicion, unmoved(facts.seen, {}))
        state = replace(state, suspicion=suspicion)
    # A look says nothing of what came long after, as where this process stood still meanwhile.
    then = quiet if now <= suspicion.looked + FRESH else suspicion.looked - facts.ticked
    found = suspicion.found or find(facts.seen, then, limits, facts.ended)
    if found is not None:
        return _verdict(state, found, quiet, f"no step for {quiet:.1f} s", facts, now)
    gap = max(GAP, limits.allowed / 6)
    if quiet >= 2 * limits.allowed:
        gap = max(gap, min(LONGEST_GAP, quiet / 4))
    edges = [edge for edge in (limits.allowed, limits.long) if edge > then]
    due = [facts.ticked + edge - suspicion.looked for edge in edges]
    return _again(state, suspicion, min([gap, *due]), now)


def _without_steps(state: State, facts: Facts, now: float, policy: Policy) -> Decision:
    """The last resort, for a round that never had a step: whether its ranks go on from look to look."""
    suspicion, first = state.suspicion, state.began + suspects_at(state, policy)
    if suspicion is None:
        if now < first:
            return Decision(state=state, wake=first)
        return _look(state, now, f"no first step in {now - state.began:.0f} s: looking at all")
    if not facts.answered and now < _over(state, suspicion.looked):
        return Decision(state=state, wake=_over(state, suspicion.looked))
    since = unmoved(facts.seen, suspicion.since)
    suspicion = _unless_moved(replace(suspicion, since=since), since)
    state = replace(state, suspicion=suspicion)
    looked, limits = suspicion.looked, _limits(state, facts, policy)
    found = suspicion.found or find_without_steps(
        facts.seen, since, limits, facts.ended, begun=facts.begun
    )
    if found is not None and now < looked + LONGEST_GAP:  # an older look has been told of
        still = now - max(since.get(rank, looked) for rank in found.ranks or since)
        return _verdict(state, found, still, f"no move seen for {still:.0f} s", facts, now)
    stuck = looked - min(since.values(), default=looked)
    if stuck > 0:
        gap = max(limits.allowed / 6, stuck / 4)
    else:
        gap = max(limits.allowed, RESTS * (looked - state.began))
    return _again(state, suspicion, min(gap, LONGEST_REST), now)


def _unless_moved(suspicion: Suspicion, since: Mapping[int, float]) -> Suspicion:
    """Without what was found, where the close look shows that one of these ranks goes on. since: of `unmoved`."""
    found = suspicion.found
    if found is None or all(since.get(rank, 0.0) < suspicion.looked for rank in found.ranks):
        return suspicion
    return replace(suspicion, found=None)


def _limits(state: State, facts: Facts, policy: Policy) -> Patience:
    return Patience(
        allowed=patience(state, policy),
        stepped=facts.ticked is not None,
        phases={rank: phase.name for rank, phase in facts.phases.items()},
        judged=state.judged,
        phase_seconds=state.phase_seconds,
    )


def _verdict(
    state: State, found: Found, quiet: float, stood: str, facts: Facts, now: float
) -> Decision:
    """Or one look more, of which nothing but its words depends."""
    assert state.suspicion is not None
    here = not facts.seen.keys().isdisjoint(found.ranks)  # who has ended cannot be looked at
    if here and quiet >= CLOSER and state.suspicion.found is None:
        return _look(state, now, "", close=found)
    found = natively(found, facts.seen)
    suspicion = replace(state.suspicion, found=None)
    if found.soft:
        new = frozenset(found.places) - suspicion.counted
        state = replace(state, judged={**state.judged, **dict.fromkeys(new, quiet)})
        suspicion = replace(suspicion, counted=suspicion.counted | new)
    state = replace(state, suspicion=suspicion)
    verdict = Verdict(found, stood, quiet, facts.seen)
    return Decision(state=state, order=verdict, wake=now + LONGEST_GAP, reason=found.reason)


def _again(state: State, suspicion: Suspicion, gap: float, now: float) -> Decision:
    """Another look, `gap` after the last."""
    again = suspicion.looked + gap
    return Decision(state=state, wake=again) if now < again else _look(state, now, "")


def _look(state: State, now: float, reason: str, *, close: Found | None = None) -> Decision:
    number = state.number + 1
    before = state.suspicion or Suspicion(number=number, looked=now, first=number)
    suspicion = replace(before, number=number, looked=now, found=close)
    state = replace(state, suspicion=suspicion, number=number)
    order = Examine(number, () if close is None else close.ranks)
    return Decision(state=state, order=order, wake=_over(state, now), reason=reason)

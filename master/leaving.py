"""Where the ranks of a round leave: all in the save of one step, so that none is computed twice. Pure.

An order names a step, and a rank waits in its first save of that step or of one beyond it. A rank that
had saved it before it heard of the order has gone on, and others may wait where it needs them: so it is
told of at once, and moves the step on, beyond what any rank is known to have saved. Who waits for less
goes on then.

Each order has its own number, and what is answered to an earlier one counts for nothing: a rank may
have left the place where it waited by then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic.master.events import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """What a node answers: where its ranks are."""

    order: int
    """Its number."""
    next: int
    """The step beyond each that one of them has saved without waiting."""
    waits: int = 0
    """The step in whose save all of them wait by that order; 0: not all do."""
    lost: str = ""
    """Why a rank has kept nothing of that step; empty: all have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The ranks of one round on their way out."""

    order: int = 0
    """The number of the last order; grows, also from one master to the next."""
    step: int = 0
    """What it says; 0: wait nowhere."""
    moves: int = 0
    """How often it was too late; each time it leaves a step more."""
    next: int = 0
    """The step beyond each that any rank is known to have saved without waiting."""
    stands: Mapping[NodeId, Stand] = field(default_factory=dict[NodeId, Stand])


def begin(order: int, next_: int) -> Leaving:
    """Have the ranks leave. order: a number higher than any before; next_: beyond what is saved."""
    return Leaving(order=order, step=next_, next=next_)


def hear(state: Leaving, node_id: NodeId, stand: Stand) -> Leaving:
    """A node answers; the step moves on where that comes too late."""
    state = replace(
        state,
        stands={**state.stands, node_id: stand},
        next=max(state.next, stand.next),
    )
    if state.next <= state.step:
        return state
    return replace(
        state,
        order=state.order + 1,
        step=state.next + state.moves,
        moves=state.moves + 1,
    )


def further(state: Leaving, met: int) -> Leaving:
    """What all have met in is never whole: they go on, and leave in the next save."""
    return replace(state, order=state.order + 1, step=met + 1)


def lost(state: Leaving) -> str:
    """Why the step in which all wait is not kept by one of them; empty: it is by all."""
    return next((stand.lost for stand in state.stands.values() if stand.lost), "")


def forget(state: Leaving, node_id: NodeId) -> Leaving:
    """A node is gone, or has to say it again."""
    return replace(state, stands={k: v for k, v in state.stands.items() if k != node_id})


def met(state: Leaving, nodes: int) -> int:
    """The step in whose save all ranks of a round of that many nodes wait; 0: not all do."""
    if not nodes or len(state.stands) != nodes:
        return 0
    step = next(iter(state.stands.values())).waits
    here = all(s.order == state.order and s.waits == step for s in state.stands.values())
    return step if here else 0

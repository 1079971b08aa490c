"""What a launcher leaves in `status.job` for the next one: a master that starts anew forgets nothing that it counts by. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import TypeVar

from elastic.k8s import causes
from elastic.k8s.causes import Action, Cause, Rule
from elastic.k8s.observed import Pod
from elastic.k8s.placing import Placing
from elastic.k8s.supply import Memory
from elastic.proto import schema
from elastic.proto.elasticjob import (
    AvoidedNode,
    JobState,
    Past,
    PodFailure,
    Remembered,
    SlotPast,
    SuspectedNode,
)

MOST_NODES, MOST_SLOTS, MOST_FAILURES, MOST_PENDING = 50, 100, 10, 10
"""That a status names."""
ROOM = 32 * 1024
"""Bytes for all of it, as JSON; what follows are shares of that."""
ROOM_SLOTS, ROOM_SUSPECTED, ROOM_AVOIDED = 10 * 1024, 3 * 1024, 7 * 1024
ROOM_FAILURES, ROOM_PENDING = 6 * 1024, 3 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Of the launcher before."""

    pasts: Mapping[int, Past] = field(default_factory=dict[int, Past])
    """By slot."""
    step: int = 0
    """The job's last, as it was known with them."""
    placing: Placing = field(default_factory=Placing)
    failures: tuple[PodFailure, ...] = ()


def recalled(state: JobState | None) -> Recalled:
    """A suspend lets nodes and failures be known, but no counts: it is there to put right what failed."""
    if state is None:
        return Recalled()
    known = state.remembered
    placing = Placing(
        avoided=state.avoided_nodes,
        suspected={one.node: (one.times, one.until) for one in known.suspected},
    )
    slots = () if state.state in ("Suspending", "Suspended") else known.slots
    return Recalled(
        pasts={one.slot: one.past for one in slots},
        step=known.step,
        placing=placing,
        failures=state.last_failures,
    )


def remembered(pasts: Mapping[int, Past], step: int, placing: Placing) -> Remembered:
    """The slots that matter most, where there are too many."""
    ranked = nlargest(MOST_SLOTS, pasts.items(), key=lambda item: _weight(item[1]))
    slots = (SlotPast(slot=slot, past=past) for slot, past in ranked)
    suspected = (
        SuspectedNode(node=node, times=times, until=until)
        for node, (times, until) in reversed([*placing.suspected.items()])
    )
    kept = within(slots, MOST_SLOTS, ROOM_SLOTS)
    return Remembered(
        step=step,
        slots=tuple(sorted(kept, key=lambda one: one.slot)),
        suspected=within(suspected, MOST_NODES, ROOM_SUSPECTED)[::-1],
    )


def avoided(placing: Placing) -> tuple[AvoidedNode, ...]:
    return within(reversed(placing.avoided), MOST_NODES, ROOM_AVOIDED)[::-1]


def failures(found: Sequence[PodFailure]) -> tuple[PodFailure, ...]:
    """The last ones; oldest first, as they come."""
    return within(reversed(found), MOST_FAILURES, ROOM_FAILURES)[::-1]


def within(items: Iterable[T], most: int, room: int) -> tuple[T, ...]:
    """The first ones: so many, in so many bytes of JSON."""
    kept: list[T] = []
    for one in islice(items, most):
        body = one if isinstance(one, str) else schema.dump(one)
        room -= len(json.dumps(body, ensure_ascii=False).encode(errors="replace")) + 2
        if room < 0:
            break
        kept.append(one)
    return tuple(kept)


def memory(
    known: Recalled, pods: Sequence[Pod], attempts: Mapping[int, int], rules: Sequence[Rule]
) -> Memory:
    """Of a launcher that starts anew. attempts: by slot, the next one that the master's journal knows of.

    What is over and has been replaced, or is known, was acted on: it is remembered, and nothing else follows from it.
    """
    pasts, judged, done = dict(known.pasts), set[str](), set[int]()
    newest: dict[int, int] = {}
    for pod in pods:
        newest[pod.slot] = max(newest.get(pod.slot, -1), pod.attempt)
    for pod in sorted(pods, key=lambda one: one.attempt):
        past = pasts.get(pod.slot, Past())
        if pod.alive or not (pod.attempt <= past.attempt or pod.attempt < newest[pod.slot]):
            continue
        judged.add(pod.name)
        verdict = causes.judge(pod, past, rules, step=known.step)
        if verdict.cause is Cause.COMPLETED and verdict.action is Action.IGNORE:
            done.add(pod.slot)
        if pod.attempt > past.attempt:
            pasts[pod.slot] = causes.remember(past, pod, verdict, known.step)
    return Memory(
        pasts=pasts,
        attempts=attempts,
        judged=frozenset(judged),
        done=frozenset(done),
        step=known.step,
    )


def _weight(past: Past) -> tuple[int, bool, int]:
    return (max(past.crashes, past.same), past.oom_step is not None, past.attempt)

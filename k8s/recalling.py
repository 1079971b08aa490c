"""What a launcher leaves in `status.job` for the next one: a master that starts anew forgets nothing that it counts by. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.k8s import causes
from elastic.k8s.causes import Action, Cause, Past, Rule
from elastic.k8s.observed import Pod
from elastic.k8s.placing import Avoided, Placing
from elastic.k8s.supply import Memory
from elastic.proto.elasticjob import (
    AvoidedNode,
    JobState,
    PodFailure,
    Remembered,
    SlotPast,
    SuspectedNode,
)

MOST_NODES, MOST_SLOTS = 50, 100
"""That a status names."""


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
        avoided=tuple(
            Avoided(
                node=one.node, cause=one.cause, reason=one.reason, since=one.since, until=one.until
            )
            for one in state.avoided_nodes
        ),
        suspected={one.node: (one.times, one.until) for one in known.suspected},
    )
    slots = () if state.state in ("Suspending", "Suspended") else known.slots
    return Recalled(
        pasts={
            one.slot: Past(
                attempt=one.attempt,
                oom_step=one.oom_step,
                crashes=one.crashes,
                crashed_on=one.crashed_on,
                same=one.same,
                fingerprint=one.fingerprint,
            )
            for one in slots
        },
        step=known.step,
        placing=placing,
        failures=state.last_failures,
    )


def remembered(pasts: Mapping[int, Past], step: int, placing: Placing) -> Remembered:
    """The slots that matter most, where there are too many."""
    ranked = sorted(pasts.items(), key=lambda item: _weight(item[1]), reverse=True)
    return Remembered(
        step=step,
        slots=tuple(
            SlotPast(
                slot=slot,
                attempt=past.attempt,
                oom_step=past.oom_step,
                crashes=past.crashes,
                crashed_on=past.crashed_on,
                same=past.same,
                fingerprint=past.fingerprint,
            )
            for slot, past in sorted(ranked[:MOST_SLOTS])
        ),
        suspected=tuple(
            SuspectedNode(node=node, times=times, until=until)
            for node, (times, until) in [*placing.suspected.items()][-MOST_NODES:]
        ),
    )


def avoided(placing: Placing) -> tuple[AvoidedNode, ...]:
    return tuple(
        AvoidedNode(
            node=one.node, cause=one.cause, reason=one.reason, since=one.since, until=one.until
        )
        for one in placing.avoided[-MOST_NODES:]
    )


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

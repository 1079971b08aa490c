"""Which nodes are tainted since a job has found their hardware faulty, and from which the taint is taken. Pure.

What is ours is written on the node: an annotation says until when. So whoever starts anew needs no memory, a job that is
deleted lets no faulty node back, and a taint of a person's is never touched.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.k8s.causes import Cause
from elastic.proto.elasticjob import GROUP, AvoidedNode

KEY = f"{GROUP}/avoid"
"""Of the taint; its value is the cause."""
UNTIL = f"{GROUP}/avoid-until"
"""Annotation of a node that we tainted: seconds of Unix."""
CAUSES = frozenset({str(Cause.HARDWARE), str(Cause.UNHEALTHY)})
"""That are evidence against the machine, whatever job runs there."""
MOST = 0.1
"""Share of the nodes that are tainted at once, rounded up: jobs are believed, but not without limit."""
LONGEST = 86400.0
"""Seconds from the fault for which a node is tainted, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    version: str
    """Of the object: a write that rests on it fails once it is another."""
    taints: tuple[Mapping[str, Any], ...] = ()
    until: float | None = None
    """What our annotation says; None: there is none."""

    @property
    def tainted(self) -> bool:
        return any(one.get("key") == KEY for one in self.taints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    node: Node
    taints: tuple[Mapping[str, Any], ...]
    """All that it is to have."""
    until: float | None
    """None: the annotation goes."""
    reason: str


def node(raw: Mapping[str, Any]) -> Node:
    meta = raw.get("metadata") or {}
    said = (meta.get("annotations") or {}).get(UNTIL)
    try:
        until = None if said is None else float(said)
    except ValueError:
        until = 0.0
    if until is not None and not math.isfinite(until):
        until = 0.0
    return Node(
        name=meta.get("name", ""),
        version=meta.get("resourceVersion", ""),
        taints=tuple((raw.get("spec") or {}).get("taints") or ()),
        until=until,
    )


def decide(found: Iterable[AvoidedNode], nodes: Sequence[Node], now: float) -> tuple[Change, ...]:
    """found: what the jobs avoid. A taint that somebody took away comes back for a later fault alone."""
    wanted: dict[str, AvoidedNode] = {}
    for avoided in found:
        if avoided.cause in CAUSES and _until(avoided) > now:
            wanted[avoided.node] = max(avoided, wanted.get(avoided.node, avoided), key=_until)
    ours = {one.name for one in nodes if one.until is not None and one.until > now}
    room = math.ceil(len(nodes) * MOST) - len(ours)
    changes: list[Change] = []
    for one in sorted(nodes, key=lambda each: each.name):
        asked = wanted.get(one.name)
        if asked is not None and _is_news(one, asked) and (one.name in ours or room > 0):
            room -= one.name not in ours
            changes.append(_taint(one, asked))
        elif one.until is not None and one.until <= now:
            changes.append(_over(one))
    return tuple(changes)


def patch(change: Change) -> dict[str, Any]:
    """Of that version of the node alone: its taints are one list, that others write, too."""
    until = None if change.until is None else f"{change.until:.0f}"
    return {
        "metadata": {"resourceVersion": change.node.version, "annotations": {UNTIL: until}},
        "spec": {"taints": list(change.taints)},
    }


def _is_news(one: Node, asked: AvoidedNode) -> bool:
    """Not where a person has tainted it."""
    theirs = one.tainted and one.until is None
    return not theirs and (one.until or 0.0) < _until(asked)


def _until(one: AvoidedNode) -> float:
    """In whole seconds, as the annotation has it."""
    return float(math.floor(min(one.until, one.since + LONGEST)))


def _taint(one: Node, asked: AvoidedNode) -> Change:
    others = tuple(taint for taint in one.taints if taint.get("key") != KEY)
    taint = {"key": KEY, "value": asked.cause, "effect": "NoSchedule"}
    return Change(
        node=one, taints=(*others, taint), until=_until(asked), reason=f"tainted: {asked.reason}"
    )


def _over(one: Node) -> Change:
    rest = tuple(taint for taint in one.taints if taint.get("key") != KEY)
    return Change(node=one, taints=rest, until=None, reason="its time is over: no taint any more")

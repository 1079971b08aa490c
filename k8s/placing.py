"""Nodes that a job's pods keep away from, since they failed it; for a time, and never too many. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic.proto.elasticjob import AvoidedNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Whom to avoid, and who is only suspected so far."""

    avoided: tuple[AvoidedNode, ...] = ()
    """Oldest first."""
    suspected: Mapping[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    """How often a node has failed the job, and when last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of `nodePolicy`."""

    most: str = "10%"
    """`maxAvoided`: a number, or a share of the job's pods, rounded up."""
    ttl: float = 86400.0
    """Seconds for which a node is avoided, and a suspicion held."""
    confirmations: int = 2
    """Failures after which a node is avoided, where one alone is no proof."""

    @property
    def any(self) -> bool:
        """Whether nodes are avoided at all."""
        return self.count(1) > 0

    def count(self, pods: int) -> int:
        if self.most.endswith("%"):
            return math.ceil(pods * float(self.most[:-1]) / 100)
        return int(self.most)


def blame(
    state: Placing,
    node: str,
    cause: str,
    reason: str,
    now: float,
    limits: Limits,
    *,
    sure: bool = False,
) -> Placing:
    """A node failed the job, by that cause. sure: once is enough, a probe has said so."""
    state = expire(state, now, limits)
    if not node or not limits.any or any(one.node == node for one in state.avoided):
        return state
    times, _ = state.suspected.get(node, (0, 0.0))
    suspected = {**state.suspected, node: (times + 1, now + limits.ttl)}
    if not sure and times + 1 < limits.confirmations:
        return replace(state, suspected=suspected)
    suspected.pop(node)
    one = AvoidedNode(node=node, cause=cause, reason=reason, since=now, until=now + limits.ttl)
    return Placing(avoided=(*state.avoided, one), suspected=suspected)


def expire(state: Placing, now: float, limits: Limits) -> Placing:
    """Without what is past, and with nothing at all where no node is to be avoided any more."""
    if not limits.any:
        return Placing()
    return Placing(
        avoided=tuple(one for one in state.avoided if one.until > now),
        suspected={k: v for k, v in state.suspected.items() if v[1] > now},
    )


def nodes(state: Placing, pods: int, now: float, limits: Limits) -> tuple[str, ...]:
    """That the next pod keeps away from: the last that failed, at most so many."""
    most = limits.count(pods)
    current = [one.node for one in state.avoided if one.until > now]
    return tuple(current[-most:]) if most else ()

"""Nodes that a job's pods keep away from, since they failed it; for a time, and never too many. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic.k8s.causes import Cause
from elastic.proto.elasticjob import AvoidedNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Whom to avoid, and who is only suspected so far."""

    avoided: tuple[AvoidedNode, ...] = ()
    """Oldest first."""
    suspected: Mapping[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    """How often a node has failed the job, and when last."""
    left: Mapping[str, float] = field(default_factory=dict[str, float])
    """Nodes that a pod was asked to leave since they failed their check, and until when that counts."""


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
    """A node failed the job, by that cause. sure: once is enough, a probe has said so; as it has of one
    that was left, however the pod there has ended."""
    state = expire(state, now, limits)
    if not node or not limits.any or any(one.node == node for one in state.avoided):
        return state
    times, _ = state.suspected.get(node, (0, 0.0))
    suspected = {**state.suspected, node: (times + 1, now + limits.ttl)}
    if not sure and node not in state.left and times + 1 < limits.confirmations:
        return replace(state, suspected=suspected)
    suspected.pop(node)
    one = AvoidedNode(node=node, cause=cause, reason=reason, since=now, until=now + limits.ttl)
    return replace(state, avoided=(*state.avoided, one), suspected=suspected)


def leave(
    state: Placing, unfit: Mapping[str, str], pods: int, now: float, limits: Limits
) -> tuple[Placing, tuple[str, ...]]:
    """Which pods give up a node that failed its check. In the time of an avoidance no more nodes are left than may be
    avoided, and each but once: a fault that is on every machine, or is none of theirs, has an end. From one that is avoided
    all go, since none come there. unfit: the nodes, by pod."""
    state = expire(state, now, limits)
    away, most = nodes(state, pods, now, limits), limits.count(pods)
    left, going = dict(state.left), list[str]()
    spent = {*left, *(one.node for one in state.avoided if one.cause == Cause.UNHEALTHY)}
    for pod, node in unfit.items():
        if node and node not in spent and len(spent) < most:
            left[node] = now + limits.ttl
            spent.add(node)
            going.append(pod)
        elif node in away:
            going.append(pod)
    return replace(state, left=left), tuple(going)


def expire(state: Placing, now: float, limits: Limits) -> Placing:
    """Without what is past, and with nothing at all where no node is to be avoided any more."""
    if not limits.any:
        return Placing()
    return Placing(
        avoided=tuple(one for one in state.avoided if one.until > now),
        suspected={k: v for k, v in state.suspected.items() if v[1] > now},
        left={node: until for node, until in state.left.items() if until > now},
    )


def nodes(state: Placing, pods: int, now: float, limits: Limits) -> tuple[str, ...]:
    """That the next pod keeps away from: the last that failed, at most so many."""
    most = limits.count(pods)
    current = [one.node for one in state.avoided if one.until > now]
    return tuple(current[-most:]) if most else ()

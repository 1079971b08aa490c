"""The spec, as those who make pods and avoid nodes need it. Pure."""

from elastic.k8s.causes import Action, Rule
from elastic.k8s.placing import Limits
from elastic.k8s.spec import FailureRule, Spec
from elastic.k8s.supply import HOPELESS, Wanted

LEAVE = 60.0
"""Seconds that a victim of a shrink has beyond `drainSeconds`, until its pod is deleted."""


def wanted(spec: Spec) -> Wanted:
    return Wanted(
        replicas=spec.replicas,
        least=spec.least,
        unit=spec.elastic.node_unit,
        sizes=tuple(sorted(spec.elastic.discrete_sizes)),
        spares=spec.hot_spares.count,
        pending_timeout=float(spec.scheduling.pending.timeout_seconds),
        pending=spec.scheduling.pending.policy,
        cooldown=float(spec.elastic.scale_up_cooldown_seconds),
        drain=spec.flash_checkpoint.drain_seconds + LEAVE,
        hopeless=max(HOPELESS, float(spec.pre_running_deadline_seconds or 0)),
        rules=tuple(_rule(one) for one in spec.failure_policy.rules),
    )


def limits(spec: Spec) -> Limits:
    node = spec.node_policy
    return Limits(
        most=node.max_avoided if node.on_fault == "AvoidForJob" else "0",
        ttl=float(node.ttl_seconds),
        confirmations=node.require_confirmations,
    )


def _rule(one: FailureRule) -> Rule:
    codes = one.match.exit_codes
    return Rule(
        name=one.name,
        action=Action(one.action),
        counts=one.counts_toward_limit,
        exit_codes=() if codes is None else codes.values,
        among=codes is None or codes.operator == "In",
        reasons=one.match.reasons,
        conditions=one.match.pod_conditions,
        patterns=one.match.log_patterns,
    )

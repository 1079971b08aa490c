"""What is known here of a pod template: the fields that the operator reads, or adds to.

All of it would make 500 KB of schema, which no `kubectl apply` takes. The API server judges the rest, by a dry run of
the pod.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from elastic.proto.schema import Json, Most, Pattern, Range, Scalar

QUANTITY = (
    r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?"
)
"""As Kubernetes writes one; its longest is 2^63."""
QUANTITY_WORDS = "write a quantity such as 64Gi"
VARIABLES = 1024
"""Of a container, at most: an API server counts what a rule about each of them could cost, and takes no list without
an end."""

Quantity = Annotated[Scalar, Pattern(QUANTITY, QUANTITY_WORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    limits: Mapping[str, Quantity] | None = None
    requests: Mapping[str, Quantity] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    mount_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    capabilities: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    name: str = ""
    image: str = ""
    image_pull_policy: str = ""
    env: Annotated[tuple[Variable, ...], Most(VARIABLES)] = ()
    volume_mounts: tuple[Mount, ...] = ()
    resources: Resources | None = None
    security_context: Security | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    match_fields: tuple[Json, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSelector:
    node_selector_terms: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAffinity:
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    node_affinity: NodeAffinity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    containers: Annotated[tuple[Container, ...], Most(32)] = ()
    volumes: tuple[Json, ...] = ()
    node_selector: Mapping[str, str] | None = None
    tolerations: tuple[Json, ...] = ()
    affinity: Affinity | None = None
    active_deadline_seconds: int | None = None
    termination_grace_period_seconds: Annotated[int, Range(0)] | None = None
    security_context: Json | None = None
    image_pull_secrets: tuple[Json, ...] = ()
    host_network: bool | None = None
    dns_policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    metadata: Metadata | None = None
    spec: Pod | None = None


_UNITS = {
    "": Decimal(1),
    **{unit: Decimal(1000) ** -power for power, unit in enumerate("mun", 1)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def amount(quantity: Scalar) -> Decimal:
    """Of a quantity, in its base unit: bytes, GPUs."""
    text = str(quantity)
    digits = text.rstrip("numkKMGTPEi")
    return Decimal(digits) * _UNITS[text[len(digits) :]]


def total(one: Scalar, other: Scalar) -> str:
    """Of two quantities, whole."""
    return str(int(amount(one) + amount(other)))

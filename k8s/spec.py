"""The spec of an ElasticJob. What several fields must be together is in `rules.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from elastic.k8s.observed import MAIN
from elastic.k8s.template import QUANTITY, QUANTITY_WORDS, VARIABLES, Affinity, Resources, Template
from elastic.proto.schema import IntOrString, Json, Known, Most, Pattern, Range, dump, load

Seconds = Annotated[int, Range(0)]
Deadline = Annotated[int, Range(1)]
Nodes = Annotated[int, Range(1, 10000)]
Quantity = Annotated[str, Pattern(QUANTITY, QUANTITY_WORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    replicas: Nodes | None = None
    """Worker pods that are wanted; elastic.max by default, else 1. `kubectl scale` sets it."""
    template: Annotated[Json, Known(Template)] | None = None
    """Pod template. What trains is its container named main, else its first one."""
    disruption_budget: Literal["None", "ProtectMin"] = "ProtectMin"
    """ProtectMin: a PodDisruptionBudget keeps evictions from taking more pods than elastic.min leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    min: Nodes | None = None
    """Fewest nodes that train; worker.replicas by default."""
    max: Nodes | None = None
    """Most nodes; worker.replicas by default."""
    node_unit: Nodes = 1
    """Nodes train in multiples of it."""
    discrete_sizes: Annotated[tuple[Nodes, ...], Most(64)] = ()
    """The only numbers of nodes that train; in place of nodeUnit."""
    scale_up_cooldown_seconds: Seconds = 300
    """After a shrink for want of nodes, until the job grows again."""
    last_call_seconds: Seconds = 30
    """How long a round that could start waits for nodes that are on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpares:
    count: Annotated[int, Range(0, 1000)] = 0
    """Pods beyond worker.replicas that wait, warmed up, for the place of one that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    resources: Annotated[Json, Known(Resources)] | None = None
    """Of the master's container; 250m of CPU and 256Mi by default."""
    storage_claim: str = ""
    """PersistentVolumeClaim for the journal; without one it lies in the pod."""
    max_restarts: Annotated[int, Range(0)] = 10
    """Of the master's pod with no step finished in between."""
    service_account_name: str = ""
    """Of the master's pod; by default the operator makes one with the least rights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    enabled: bool = True
    """Whether ranks that hang are looked for."""
    action: Literal["DumpAndRestart", "DumpOnly", "Fail"] = "DumpAndRestart"
    """What is done about one, beside the note of what all ranks did. Fail: the job fails, with `HangDetected`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    preflight: Literal["Off", "Quick", "Full"] = "Quick"
    """How nodes are probed before they join."""
    exclude_stragglers: bool = False
    """Whether a node that is slow leaves, where that pays."""
    hang: Hang = field(default_factory=Hang)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashCheckpoint:
    memory: Quantity | None = None
    """Snapshots that a worker pod holds in memory, all slots together: added to its request and limit."""
    drain_seconds: Annotated[int, Range(1, 86400)] = 120
    """How long a suspend, a delete or a shrink waits for ranks to save and leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodes:
    operator: Literal["In", "NotIn"] = "In"
    values: Annotated[tuple[Annotated[int, Range(0, 255)], ...], Most(256, least=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """All that is given must hold."""

    exit_codes: ExitCodes | None = None
    """Of the main container."""
    reasons: Annotated[tuple[str, ...], Most(32)] = ()
    """Of the pod or its container (OOMKilled, Evicted, ...), or a cause of ours."""
    pod_conditions: Annotated[tuple[str, ...], Most(32)] = ()
    """Types of conditions that are True."""
    log_patterns: Annotated[tuple[Annotated[str, Most(500)], ...], Most(32)] = ()
    """Regular expressions; one is found in the container's termination message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    name: Annotated[str, Most(63)]
    match: Match
    action: Literal[
        "ReplacePod",
        "ReplacePodAvoidNode",
        "RestartUnit",
        "Shrink",
        "RestartJob",
        "FailJob",
        "Ignore",
    ]
    """About a pod whose container has ended: nothing starts in it again. While it lives, its ranks are started
    again in it without a rule."""
    counts_toward_limit: bool | None = None
    """Whether such a failure counts toward maxRestarts; by default as without the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    max_restarts: Annotated[int, Range(0, 1_000_000)] = 100
    """Faults that the job recovers from; it grows back with progress."""
    rules: Annotated[tuple[FailureRule, ...], Most(32)] = ()
    """The first that matches decides what is done about a pod that failed."""


Provider = Literal["None", "Volcano", "Coscheduling", "Kueue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    provider: Provider = "None"
    """Who places elastic.min pods together or none."""
    schedule_timeout_seconds: Deadline = 300
    """How long coscheduling tries to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    timeout_seconds: Deadline = 900
    """How long a pod may wait for a node, or for a quota."""
    policy: Literal["ShrinkToMin", "Wait", "Fail"] = "ShrinkToMin"
    """What happens then; where a quota refuses pods, ShrinkToMin goes on without them after half a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """Beside what the worker's template says."""

    gang: Gang = field(default_factory=Gang)
    queue: Annotated[str, Most(253)] = ""
    """Of Kueue or Volcano."""
    priority_class_name: Annotated[str, Most(253)] = ""
    """Of the worker pods and the master's."""
    scheduler_name: Annotated[str, Most(253)] = ""
    node_selector: Mapping[str, str] | None = None
    """Beside the template's; of two with the same label this one."""
    tolerations: Annotated[tuple[Json, ...], Most(64)] = ()
    """Beside the template's; the master's pod has them, too."""
    affinity: Annotated[Json, Known(Affinity)] | None = None
    """In place of the template's."""
    pending: Pending = field(default_factory=Pending)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePolicy:
    on_fault: Literal["AvoidForJob", "None"] = "AvoidForJob"
    """Whether a node that failed this job is kept from its next pods."""
    max_avoided: Annotated[
        str, Pattern(r"[0-9]{1,5}|[0-9]{1,2}%|100%", "write a number or a share such as 10%")
    ] = "10%"
    """Nodes, or a share of worker.replicas, rounded up."""
    ttl_seconds: Deadline = 86400
    """How long a node is avoided."""
    require_confirmations: Annotated[int, Range(1, 100)] = 2
    """Failures after which a node is avoided where one alone is no proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleanup:
    pod_policy: Literal["Running", "All", "None"] = "Running"
    """Which pods are deleted once the job is over."""
    ttl_seconds_after_finished: Seconds | None = None
    """After which the job itself is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    name: str
    value: str | None = None
    value_from: Json | None = None
    """As in a pod: a field, or a key of a Secret or ConfigMap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    suspend: bool = False
    """True: the job saves, then all of its worker pods go; false again: it goes on."""
    managed_by: Literal["elastic-runtime.dev/operator", "kueue.x-k8s.io/multikueue"] = (
        "elastic-runtime.dev/operator"
    )
    """Whom the job is left to."""
    nproc_per_node: IntOrString = "auto"
    """Ranks of a node."""
    image: str = ""
    """With command, args, env and workingDir: a worker's container, where there is no worker.template."""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Annotated[tuple[Variable, ...], Most(VARIABLES)] = ()
    working_dir: str = ""
    worker: Worker = field(default_factory=Worker)
    elastic: Elastic = field(default_factory=Elastic)
    hot_spares: HotSpares = field(default_factory=HotSpares)
    master: Master = field(default_factory=Master)
    health_check: HealthCheck = field(default_factory=HealthCheck)
    flash_checkpoint: FlashCheckpoint = field(default_factory=FlashCheckpoint)
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    scheduling: Scheduling = field(default_factory=Scheduling)
    node_policy: NodePolicy = field(default_factory=NodePolicy)
    cleanup: Cleanup = field(default_factory=Cleanup)
    notify: Annotated[tuple[str, ...], Most(16)] = ()
    """URLs, or shell commands in the master's pod, that are told of bad nodes, failures and the end; as `--notify`."""
    active_deadline_seconds: Deadline | None = None
    """Of the time in which the job runs; a suspended one does not age."""
    pre_running_deadline_seconds: Deadline | None = None
    """Until the first step."""

    @property
    def replicas(self) -> int:
        """Wanted pods, spares not counted."""
        return self.worker.replicas or self.elastic.max or 1

    @property
    def least(self) -> int:
        return self.elastic.min or self.replicas

    @property
    def most(self) -> int:
        return self.elastic.max or self.replicas

    @property
    def pod(self) -> Json:
        """The worker's pod template, also where the spec has the short form."""
        if self.worker.template is not None:
            return self.worker.template
        container: dict[str, Any] = {"name": MAIN, "image": self.image}
        said = {
            "command": list(self.command), "args": list(self.args), "env": dump(self.env),
            "workingDir": self.working_dir,
        }  # fmt: skip
        container |= {key: value for key, value in said.items() if value}
        return {"spec": {"containers": [container]}}


def read(raw: Mapping[str, Any]) -> Spec:
    """`spec` of an ElasticJob with what it leaves open filled in. Raises FieldError."""
    spec = load(Spec, raw, "spec")
    worker = replace(spec.worker, replicas=spec.replicas)
    elastic = replace(spec.elastic, min=spec.least, max=spec.most)
    return replace(spec, worker=worker, elastic=elastic)


def main_container(template: Json) -> Mapping[str, Any]:
    """The one that trains; {} where there is none."""
    containers = (template.get("spec") or {}).get("containers") or []
    named = [one for one in containers if one.get("name") == MAIN]
    return next(iter([*named, *containers]), {})

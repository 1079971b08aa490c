"""What several fields of a spec must be together, and which of them an edit may change: each rule once.

Each has its CEL, which the API server evaluates (1.25 and newer), its predicate, by which the operator says the same
on any cluster, and its words. What CEL cannot say, the operator alone does. A server adds up beforehand what the CEL of
a CRD could cost, and takes none that could cost too much: it walks over bounded lists, by their path, and makes no text.
So there is no `messageExpression` (1.27), either: a number's text has no bound (kubernetes/kubernetes#124234).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from typing import Any

from elastic.k8s import patterns
from elastic.k8s.observed import MAIN
from elastic.k8s.spec import Spec, read
from elastic.proto.errors import UsageError
from elastic.proto.schema import camel, dump

LONGEST = 40
"""Characters of a name: the names and labels of its pods are longer, and end at 63."""
NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("PET_", "ELASTIC_")
"""Variables that a pod gets from us."""
RANKS = r"auto|gpu|cpu|[1-9][0-9]{0,3}"

LARGEST = 512
"""KiB of a spec's JSON: it is in the resource twice (`status.accepted`), of which etcd takes 1.5 MiB."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """It holds, or `words` says what to do."""

    name: str
    cel: str
    """Of `self`, a spec with its defaults; empty: CEL cannot say it."""
    holds: Callable[[Spec], bool]
    message: str
    """What is to be done, in the server's words; the operator's begin with them."""
    numbers: Callable[[Spec], str] | None = None
    """What the operator adds: the spec's own numbers, and the nearest that would do."""

    def words(self, spec: Spec) -> str:
        """The operator's."""
        return self.message if self.numbers is None else f"{self.message}: {self.numbers(spec)}"


def violations(name: str, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with a resource of that name and spec, a sentence each; (): nothing."""
    found = [] if _fits(name) else [NAME_WORDS]
    try:
        spec = read(raw)
    except UsageError as error:
        return (*found, str(error))
    return (*found, *(rule.words(spec) for rule in RULES if not rule.holds(spec)))


def edit_violations(old: Spec, new: Spec) -> tuple[str, ...]:
    """Why a job with spec `old` cannot become one with `new`; both are legal by themselves."""
    changed = [path for path in (*FROZEN, *FIXED) if _at(old, path) != _at(new, path)]
    found = [_edit_words(path) for path in changed if path in FIXED or not old.suspend]
    if not old.suspend and new.scheduling.gang.provider == "Kueue":
        found += [_count_words(path) for path in COUNTED if _at(old, path) != _at(new, path)]
    return tuple(found)


def of_spec() -> list[Json]:
    """`x-kubernetes-validations` of the spec."""
    rules = [{"rule": rule.cel, "message": rule.message} for rule in RULES if rule.cel]
    edits = [{"rule": _edit_cel(path), "message": _edit_words(path)} for path in (*FROZEN, *FIXED)]
    counts = [{"rule": _count_cel(path), "message": _count_words(path)} for path in COUNTED]
    return [*rules, *edits, *counts]


def of_name() -> list[Json]:
    """`x-kubernetes-validations` of the resource."""
    rule = f"self.metadata.name.matches('^{NAME}$') && size(self.metadata.name) <= {LONGEST}"
    return [{"rule": rule, "message": NAME_WORDS}]


# --- a spec ----------------------------------------------------------------------------------------

NAME_WORDS = (
    f"metadata.name: at most {LONGEST} lower-case letters, digits and dashes, a letter first and no dash "
    "last"
)

_REPLICAS = (
    "(has(self.worker.replicas) ? self.worker.replicas : "
    "(has(self.elastic.max) ? self.elastic.max : 1))"
)
_MIN = f"(has(self.elastic.min) ? self.elastic.min : {_REPLICAS})"
_MAX = f"(has(self.elastic.max) ? self.elastic.max : {_REPLICAS})"
_UNIT = "self.elastic.nodeUnit"
_SIZES = "self.elastic.discreteSizes"
_NO_SIZES = f"!has({_SIZES}) || size({_SIZES}) == 0"
_TEMPLATE = "self.worker.template"
_CONTAINERS = f"{_TEMPLATE}.spec.containers"
_HAS_CONTAINERS = f"has({_TEMPLATE}.spec) && has({_CONTAINERS}) && size({_CONTAINERS}) > 0"
_IMAGE = "(has(self.image) && self.image != '')"
_FAILURES = "self.failurePolicy.rules"
_MAINS = f"{_CONTAINERS}.exists(c, has(c.name) && c.name == '{MAIN}')"


def _named(value: str) -> str:
    """A variable that is ours."""
    return " || ".join(
        [f"{value} in {list(OURS)}", *(f"{value}.startsWith('{p}')" for p in PREFIXES)]
    )


def _containers(spec: Spec) -> Sequence[Mapping[str, Any]]:
    pod = (spec.worker.template or {}).get("spec")
    return (pod.get("containers") or []) if isinstance(pod, Mapping) else []


def _reserved(spec: Spec) -> bool:
    """Whether such a variable is given to what trains; where no container is called main, to any."""
    containers = _containers(spec)
    mains = [one for one in containers if one.get("name") == MAIN] or containers
    names = [one.name for one in spec.env]
    names += [one.get("name", "") for container in mains for one in container.get("env") or []]
    return any(name in OURS or name.startswith(PREFIXES) for name in names)


def _unused(spec: Spec) -> bool:
    """The short form's fields without an image that they could be of."""
    return bool(spec.command or spec.args or spec.env or spec.working_dir)


def _bad_pattern(spec: Spec) -> str:
    for rule in spec.failure_policy.rules:
        for pattern in rule.match.log_patterns:
            if why := patterns.wrong(pattern):
                return f"{pattern!r} of rule {rule.name}: {why}"
    return ""


def _kilobytes(spec: Spec) -> int:
    """As JSON."""
    return len(json.dumps(dump(spec), ensure_ascii=False).encode(errors="replace")) >> 10


def _divides(field: str, value: str, of: Callable[[Spec], int]) -> Rule:
    """nodeUnit divides a number of nodes; the words name the nearest ones that it does divide."""

    def numbers(spec: Spec) -> str:
        unit, count = spec.elastic.node_unit, of(spec)
        low = count // unit * unit
        nearest = f"{low} or {low + unit}" if low else f"{low + unit}"
        return f"{count} is no multiple of {unit}, write {nearest}"

    return Rule(
        f"{field} is a multiple of elastic.nodeUnit",
        f"{value} % {_UNIT} == 0",
        lambda spec: of(spec) % spec.elastic.node_unit == 0,
        f"{field} must be a multiple of elastic.nodeUnit",
        numbers,
    )


def _clamped(spec: Spec) -> int:
    return min(max(spec.replicas, spec.least), spec.most)


def _nearest(spec: Spec) -> str:
    """The discrete sizes next below and above what is wanted."""
    sizes, wanted = spec.elastic.discrete_sizes, spec.replicas
    low = max((size for size in sizes if size < wanted), default=None)
    high = min((size for size in sizes if size > wanted), default=None)
    return " or ".join(str(size) for size in (low, high) if size is not None)


RULES: tuple[Rule, ...] = (
    Rule(
        "elastic.min is not above elastic.max",
        f"{_MIN} <= {_MAX}",
        lambda spec: spec.least <= spec.most,
        "elastic.min must not be above elastic.max",
        lambda spec: f"{spec.least} is above {spec.most}, write {spec.most} or less",
    ),
    Rule(
        "worker.replicas is within elastic.min and elastic.max",
        f"{_MIN} > {_MAX} || ({_REPLICAS} >= {_MIN} && {_REPLICAS} <= {_MAX})",
        lambda spec: spec.least > spec.most or spec.least <= spec.replicas <= spec.most,
        "worker.replicas must be within elastic.min and elastic.max",
        lambda spec: (
            f"{spec.replicas} is not within {spec.least} and {spec.most}, write {_clamped(spec)}"
        ),
    ),
    _divides("worker.replicas", _REPLICAS, lambda spec: spec.replicas),
    _divides("elastic.min", _MIN, lambda spec: spec.least),
    _divides("elastic.max", _MAX, lambda spec: spec.most),
    Rule(
        "discreteSizes stand in place of nodeUnit",
        f"{_NO_SIZES} || {_UNIT} == 1",
        lambda spec: not spec.elastic.discrete_sizes or spec.elastic.node_unit == 1,
        "elastic.discreteSizes and elastic.nodeUnit exclude each other: leave one of them out",
    ),
    Rule(
        "discreteSizes are within elastic.min and elastic.max",
        f"!has({_SIZES}) || {_SIZES}.all(s, s >= {_MIN} && s <= {_MAX})",
        lambda spec: all(spec.least <= size <= spec.most for size in spec.elastic.discrete_sizes),
        "elastic.discreteSizes must each be within elastic.min and elastic.max",
    ),
    Rule(
        "worker.replicas is one of discreteSizes",
        f"{_NO_SIZES} || {_REPLICAS} in {_SIZES}",
        lambda spec: (
            not spec.elastic.discrete_sizes or spec.replicas in spec.elastic.discrete_sizes
        ),
        "worker.replicas must be one of elastic.discreteSizes",
        lambda spec: f"{spec.replicas} is none of them, write {_nearest(spec)}",
    ),
    Rule(
        "there is an image or a template",
        f"has({_TEMPLATE}) || {_IMAGE}",
        lambda spec: spec.worker.template is not None or bool(spec.image),
        "there is no image: write spec.image, or spec.worker.template",
    ),
    Rule(
        "there is an image or a template, not both",
        f"!(has({_TEMPLATE}) && {_IMAGE})",
        lambda spec: spec.worker.template is None or not spec.image,
        "spec.image and spec.worker.template exclude each other: leave one of them out",
    ),
    Rule(
        "what belongs to spec.image is not beside a template",
        f"!has({_TEMPLATE}) || !((has(self.command) && size(self.command) > 0) || (has(self.args) && "
        "size(self.args) > 0) || (has(self.env) && size(self.env) > 0) || (has(self.workingDir) && "
        "self.workingDir != ''))",
        lambda spec: spec.worker.template is None or not _unused(spec),
        (
            "command, args, env and workingDir belong to spec.image: write them into a container of the "
            "template"
        ),
    ),
    Rule(
        "a template has a container",
        f"!has({_TEMPLATE}) || ({_HAS_CONTAINERS})",
        lambda spec: spec.worker.template is None or bool(_containers(spec)),
        "spec.worker.template.spec.containers: write at least one",
    ),
    Rule(
        "containers have an image",
        f"!(has({_TEMPLATE}) && {_HAS_CONTAINERS}) || {_CONTAINERS}.all(c, has(c.image) && c.image != '')",
        lambda spec: all(c.get("image") for c in _containers(spec)),
        "spec.worker.template.spec.containers: each needs an image",
    ),
    Rule(
        "variables of ours are left to us",
        f"(!has(self.env) || self.env.all(e, !({_named('e.name')}))) && (!(has({_TEMPLATE}) && {_HAS_CONTAINERS}) || "
        f"{_CONTAINERS}.all(c, !has(c.env) || ({_MAINS} && !(has(c.name) && c.name == '{MAIN}')) || "
        f"c.env.all(e, !has(e.name) || !({_named('e.name')}))))",
        lambda spec: not _reserved(spec),
        (
            "env: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PET_* and ELASTIC_* "
            "are set by the operator: leave them out"
        ),
    ),
    Rule(
        "failure rules have names of their own",
        f"!has({_FAILURES}) || {_FAILURES}.all(r, {_FAILURES}.exists_one(q, q.name == r.name))",
        lambda spec: (
            len({r.name for r in spec.failure_policy.rules}) == len(spec.failure_policy.rules)
        ),
        "failurePolicy.rules: each needs a name of its own",
    ),
    Rule(
        "patterns are regular expressions",
        "",
        lambda spec: not _bad_pattern(spec),
        "failurePolicy.rules: a pattern that is not taken",
        _bad_pattern,
    ),
    Rule(
        "hotSpares.count is not above elastic.max",
        f"self.hotSpares.count <= {_MAX}",
        lambda spec: spec.hot_spares.count <= spec.most,
        "hotSpares.count must not be above elastic.max",
        lambda spec: f"{spec.hot_spares.count} is above {spec.most}, write {spec.most} or less",
    ),
    Rule(
        "the deadline is the job's",
        f"!has({_TEMPLATE}) || !has({_TEMPLATE}.spec) || !has({_TEMPLATE}.spec.activeDeadlineSeconds)",
        lambda spec: (
            "activeDeadlineSeconds" not in ((spec.worker.template or {}).get("spec") or {})
        ),
        (
            "spec.worker.template.spec.activeDeadlineSeconds would end each pod, which is then replaced: write "
            "spec.activeDeadlineSeconds"
        ),
    ),
    Rule(
        "nprocPerNode is a number of processes, or auto, gpu or cpu",
        f"type(self.nprocPerNode) == string ? self.nprocPerNode.matches('^({RANKS})$') : "
        "self.nprocPerNode >= 1 && self.nprocPerNode <= 9999",
        lambda spec: re.fullmatch(RANKS, str(spec.nproc_per_node)) is not None,
        "spec.nprocPerNode: write auto, gpu, cpu or a number of processes",
    ),
    Rule(
        "a queue is Kueue's or Volcano's",
        "!has(self.scheduling.queue) || self.scheduling.queue == '' || self.scheduling.gang.provider in "
        "['Kueue', 'Volcano']",
        lambda spec: (
            not spec.scheduling.queue or spec.scheduling.gang.provider in ("Kueue", "Volcano")
        ),
        "scheduling.queue needs scheduling.gang.provider Kueue or Volcano: write it, too",
    ),
    Rule(
        "Kueue has a queue",
        "self.scheduling.gang.provider != 'Kueue' || (has(self.scheduling.queue) && self.scheduling.queue != '')",
        lambda spec: spec.scheduling.gang.provider != "Kueue" or bool(spec.scheduling.queue),
        "scheduling.gang.provider is Kueue: write scheduling.queue, too",
    ),
    Rule(
        f"a spec is below {LARGEST} KiB",
        "",
        lambda spec: _kilobytes(spec) < LARGEST,
        f"the spec must be below {LARGEST} KiB of JSON, so that it fits into a status, too",
        lambda spec: (
            f"it is {_kilobytes(spec)}, write what is large into ConfigMaps (envFrom, volumes)"
        ),
    ),
)


# --- an edit ---------------------------------------------------------------------------------------

FROZEN = (
    "image", "command", "args", "env", "workingDir", "worker.template", "nprocPerNode", "elastic.nodeUnit",
    "elastic.discreteSizes", "elastic.lastCallSeconds", "flashCheckpoint", "failurePolicy.maxRestarts",
    "healthCheck", "master", "notify", "scheduling.gang", "scheduling.queue", "scheduling.priorityClassName",
    "scheduling.schedulerName", "scheduling.nodeSelector", "scheduling.tolerations", "scheduling.affinity",
)  # fmt: skip
"""Paths that may change while the job is suspended: a running one has been started with them."""
FIXED = ("managedBy",)
"""Paths that never change."""
COUNTED = {"worker.replicas": _REPLICAS, "hotSpares.count": "self.hotSpares.count"}
"""Paths that may not change while Kueue has a job's pods, and what they come to: each pod of a group says the same
number of them all."""


def _at(spec: Spec, path: str) -> Any:
    whole: Any = dump(spec)
    found = reduce(
        lambda node, key: None if node is None else node.get(key), path.split("."), whole
    )
    return found or None if isinstance(found, str | list) else found


def _edit_words(path: str) -> str:
    if path in FIXED:
        return f"spec.{path} cannot be changed: make another job"
    return f"spec.{path} can be changed while the job is suspended only: set spec.suspend first"


def _count_words(path: str) -> str:
    return f"spec.{path} is part of the number that Kueue knows the job's pods by: set spec.suspend first"


def _count_cel(path: str) -> str:
    new = COUNTED[path]
    old = new.replace("self.", "oldSelf.")
    return f"oldSelf.suspend || self.scheduling.gang.provider != 'Kueue' || ({new}) == ({old})"


def _edit_cel(path: str) -> str:
    same = _same_cel(path, _field(path))
    return same if path in FIXED else f"oldSelf.suspend || ({same})"


def _same_cel(path: str, value: Any) -> str:
    """Nothing said and an empty text or list are the same, within an object with a default, too."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = ((f"{path}.{camel(one.name)}", getattr(value, one.name)) for one in fields(value))
        return " && ".join(f"({_same_cel(*one)})" for one in inner)
    new, old = f"self.{path}", f"oldSelf.{path}"
    if value not in (None, "", ()):
        # A default, so both have it; a number and a text cannot be compared.
        alike = f"(type({new}) == string) == (type({old}) == string) && "
        return f"{alike if isinstance(value, str) else ''}{new} == {old}"
    said = {"": "has({0}) && {0} != ''", (): "has({0}) && size({0}) > 0"}.get(value, "has({0})")
    has_new, has_old = said.format(new), said.format(old)
    return f"({has_new}) == ({has_old}) && (!({has_new}) || {new} == {old})"


def _field(path: str) -> Any:
    node: Any = Spec()
    for part in path.split("."):
        node = getattr(node, re.sub(r"([A-Z])", lambda m: f"_{m[1].lower()}", part))
    return node


def _fits(name: str) -> bool:
    return len(name) <= LONGEST and re.fullmatch(NAME, name) is not None

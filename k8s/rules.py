"""What several fields of a spec must be together, and which of them an edit may change: each rule once.

Each has its CEL, which the API server evaluates (1.25 and newer), its predicate, by which the operator says the same
on any cluster, and its words. What CEL cannot say, the operator alone does.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from elastic.k8s.spec import Spec, read
from elastic.proto.errors import UsageError
from elastic.proto.schema import dump

LONGEST = 40
"""Characters of a name: the names and labels of its pods are longer, and end at 63."""
NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"
RESERVED = r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(PET|ELASTIC)_.*"
"""Variables that a pod gets from us."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """It holds, or `words` says what to do."""

    name: str
    cel: str
    """Of `self`, a spec with its defaults; empty: CEL cannot say it."""
    message: str
    """CEL of the same words."""
    holds: Callable[[Spec], bool]
    words: Callable[[Spec], str]


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
    return tuple(_edit_words(path) for path in changed if path in FIXED or not old.suspend)


def of_spec() -> list[Json]:
    """`x-kubernetes-validations` of the spec."""
    rules = [
        {"rule": rule.cel, "message": rule.name, "messageExpression": rule.message}
        for rule in RULES
        if rule.cel
    ]
    edits = [{"rule": _edit_cel(path), "message": _edit_words(path)} for path in (*FROZEN, *FIXED)]
    return [*rules, *edits]


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
_SIZES = "(has(self.elastic.discreteSizes) ? self.elastic.discreteSizes : [])"
_TEMPLATE = "self.worker.template"
_CONTAINERS = f"{_TEMPLATE}.spec.containers"
_HAS_CONTAINERS = f"has({_TEMPLATE}.spec) && has({_CONTAINERS}) && size({_CONTAINERS}) > 0"
_IMAGE = "(has(self.image) && self.image != '')"
_FAILURES = "(has(self.failurePolicy.rules) ? self.failurePolicy.rules : [])"


def _containers(spec: Spec) -> Sequence[Mapping[str, Any]]:
    pod = (spec.worker.template or {}).get("spec")
    return (pod.get("containers") or []) if isinstance(pod, Mapping) else []


def _reserved(spec: Spec) -> str:
    """The first such variable; empty: there is none."""
    names = [one.name for one in spec.env]
    names += [str(one.get("name")) for c in _containers(spec) for one in c.get("env") or []]
    return next((name for name in names if re.fullmatch(RESERVED, name)), "")


def _unused(spec: Spec) -> bool:
    """The short form's fields without an image that they could be of."""
    return bool(spec.command or spec.args or spec.env or spec.working_dir)


def _bad_pattern(spec: Spec) -> str:
    for rule in spec.failure_policy.rules:
        for pattern in rule.match.log_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{pattern!r} of rule {rule.name}: {error}"
    return ""


def _text(words: str) -> str:
    return "'" + words.replace("'", "\\'") + "'"


def _fixed(words: str) -> tuple[str, Callable[[Spec], str]]:
    return _text(words), lambda spec: words


def _rule(
    name: str,
    cel: str,
    holds: Callable[[Spec], bool],
    words: tuple[str, Callable[[Spec], str]],
) -> Rule:
    return Rule(name=name, cel=cel, message=words[0], holds=holds, words=words[1])


def _divides(field: str, value: str, of: Callable[[Spec], int]) -> Rule:
    """nodeUnit divides a number of nodes; the words name the nearest ones that it does divide."""
    below = f"{value} / {_UNIT} * {_UNIT}"
    near = f"({below} > 0 ? string({below}) + ' or ' : '') + string({below} + {_UNIT})"

    def words(spec: Spec) -> str:
        unit, count = spec.elastic.node_unit, of(spec)
        low = count // unit * unit
        nearest = f"{low} or {low + unit}" if low else f"{low + unit}"
        return f"{field} is {count}, no multiple of elastic.nodeUnit, {unit}: write {nearest}"

    message = (
        f"'{field} is ' + string({value}) + ', no multiple of elastic.nodeUnit, ' + string({_UNIT}) + ': write ' + "
        + near
    )
    return _rule(
        f"{field} is a multiple of elastic.nodeUnit",
        f"{value} % {_UNIT} == 0",
        lambda spec: of(spec) % spec.elastic.node_unit == 0,
        (message, words),
    )


def _clamped(spec: Spec) -> int:
    return min(max(spec.replicas, spec.least), spec.most)


RULES: tuple[Rule, ...] = (
    _rule(
        "elastic.min is not above elastic.max",
        f"{_MIN} <= {_MAX}",
        lambda spec: spec.least <= spec.most,
        (
            f"'elastic.min is ' + string({_MIN}) + ', above elastic.max: write ' + string({_MAX}) + ' or less'",
            lambda spec: (
                f"elastic.min is {spec.least}, above elastic.max: write {spec.most} or less"
            ),
        ),
    ),
    _rule(
        "worker.replicas is within elastic.min and elastic.max",
        f"{_MIN} > {_MAX} || ({_REPLICAS} >= {_MIN} && {_REPLICAS} <= {_MAX})",
        lambda spec: spec.least > spec.most or spec.least <= spec.replicas <= spec.most,
        (
            f"'worker.replicas is ' + string({_REPLICAS}) + ', not within elastic.min and elastic.max: write ' + string({_REPLICAS} < {_MIN} ? {_MIN} : {_MAX})",
            lambda spec: (
                f"worker.replicas is {spec.replicas}, not within elastic.min and elastic.max: write {_clamped(spec)}"
            ),
        ),
    ),
    _divides("worker.replicas", _REPLICAS, lambda spec: spec.replicas),
    _divides("elastic.min", _MIN, lambda spec: spec.least),
    _divides("elastic.max", _MAX, lambda spec: spec.most),
    _rule(
        "discreteSizes stand in place of nodeUnit",
        f"size({_SIZES}) == 0 || {_UNIT} == 1",
        lambda spec: not spec.elastic.discrete_sizes or spec.elastic.node_unit == 1,
        _fixed(
            "elastic.discreteSizes and elastic.nodeUnit exclude each other: leave one of them out"
        ),
    ),
    _rule(
        "discreteSizes are within elastic.min and elastic.max",
        f"{_SIZES}.all(s, s >= {_MIN} && s <= {_MAX})",
        lambda spec: all(spec.least <= size <= spec.most for size in spec.elastic.discrete_sizes),
        _fixed("elastic.discreteSizes: each is to be within elastic.min and elastic.max"),
    ),
    _rule(
        "worker.replicas is one of discreteSizes",
        f"size({_SIZES}) == 0 || {_REPLICAS} in {_SIZES}",
        lambda spec: (
            not spec.elastic.discrete_sizes or spec.replicas in spec.elastic.discrete_sizes
        ),
        (
            f"'worker.replicas is ' + string({_REPLICAS}) + ', none of elastic.discreteSizes: write one of them'",
            lambda spec: (
                f"worker.replicas is {spec.replicas}, none of elastic.discreteSizes: write one of them"
            ),
        ),
    ),
    _rule(
        "there is an image or a template",
        f"has({_TEMPLATE}) || {_IMAGE}",
        lambda spec: spec.worker.template is not None or bool(spec.image),
        _fixed("there is no image: write spec.image, or spec.worker.template"),
    ),
    _rule(
        "there is an image or a template, not both",
        f"!(has({_TEMPLATE}) && {_IMAGE})",
        lambda spec: spec.worker.template is None or not spec.image,
        _fixed("spec.image and spec.worker.template exclude each other: leave one of them out"),
    ),
    _rule(
        "what belongs to spec.image is not beside a template",
        f"!has({_TEMPLATE}) || !((has(self.command) && size(self.command) > 0) || (has(self.args) && "
        "size(self.args) > 0) || (has(self.env) && size(self.env) > 0) || (has(self.workingDir) && "
        "self.workingDir != ''))",
        lambda spec: spec.worker.template is None or not _unused(spec),
        _fixed(
            "command, args, env and workingDir belong to spec.image: write them into a container of the "
            "template"
        ),
    ),
    _rule(
        "a template has a container",
        f"!has({_TEMPLATE}) || ({_HAS_CONTAINERS})",
        lambda spec: spec.worker.template is None or bool(_containers(spec)),
        _fixed("spec.worker.template.spec.containers: write at least one"),
    ),
    _rule(
        "containers have an image",
        f"!(has({_TEMPLATE}) && {_HAS_CONTAINERS}) || {_CONTAINERS}.all(c, has(c.image) && c.image != '')",
        lambda spec: all(c.get("image") for c in _containers(spec)),
        _fixed("spec.worker.template.spec.containers: each needs an image"),
    ),
    _rule(
        "variables of ours are left to us",
        f"(has(self.env) ? self.env : []).all(e, !e.name.matches('^({RESERVED})$')) && (!(has({_TEMPLATE}) && "
        f"{_HAS_CONTAINERS}) || {_CONTAINERS}.all(c, !has(c.env) || c.env.all(e, !has(e.name) || "
        f"!e.name.matches('^({RESERVED})$'))))",
        lambda spec: not _reserved(spec),
        _fixed(
            "env: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, PET_* and ELASTIC_* "
            "are set by the operator: leave them out"
        ),
    ),
    _rule(
        "failure rules have names of their own",
        f"{_FAILURES}.all(r, {_FAILURES}.exists_one(q, q.name == r.name))",
        lambda spec: (
            len({r.name for r in spec.failure_policy.rules}) == len(spec.failure_policy.rules)
        ),
        _fixed("failurePolicy.rules: each needs a name of its own"),
    ),
    _rule(
        "patterns are regular expressions",
        "",
        lambda spec: not _bad_pattern(spec),
        ("", lambda spec: f"failurePolicy.rules: no regular expression: {_bad_pattern(spec)}"),
    ),
    _rule(
        "Kueue has a queue",
        "self.scheduling.gang.provider != 'Kueue' || (has(self.scheduling.queue) && self.scheduling.queue != '')",
        lambda spec: spec.scheduling.gang.provider != "Kueue" or bool(spec.scheduling.queue),
        _fixed("scheduling.gang.provider is Kueue: write scheduling.queue, too"),
    ),
)


# --- an edit ---------------------------------------------------------------------------------------

FROZEN = (
    "image", "command", "args", "env", "workingDir", "worker.template", "nprocPerNode", "elastic.nodeUnit",
    "elastic.discreteSizes", "elastic.lastCallSeconds", "flashCheckpoint.memory", "failurePolicy.maxRestarts",
    "healthCheck", "master", "notify", "scheduling.gang", "scheduling.queue", "scheduling.priorityClassName",
    "scheduling.schedulerName", "scheduling.nodeSelector", "scheduling.tolerations", "scheduling.affinity",
)  # fmt: skip
"""Paths that may change while the job is suspended: a running one has been started with them."""
FIXED = ("managedBy",)
"""Paths that never change."""


def _at(spec: Spec, path: str) -> Any:
    whole: Any = dump(spec)
    found = reduce(
        lambda node, key: None if node is None else node.get(key), path.split("."), whole
    )
    return str(found) if isinstance(found, int) else found  # 8 processes are "8" processes


def _edit_words(path: str) -> str:
    if path in FIXED:
        return f"spec.{path} cannot be changed: make another job"
    return f"spec.{path} can be changed while the job is suspended only: set spec.suspend first"


def _edit_cel(path: str) -> str:
    """Nothing said and an empty text or list are the same."""
    value = _field(path)
    default = "''" if isinstance(value, str) else "[]" if isinstance(value, tuple) else None
    if default is None:
        same = f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || self.{path} == oldSelf.{path})"
    else:
        new, old = (f"(has({of}.{path}) ? {of}.{path} : {default})" for of in ("self", "oldSelf"))
        same = f"string({new}) == string({old})" if default == "''" else f"{new} == {old}"
    return same if path in FIXED else f"oldSelf.suspend || ({same})"


def _field(path: str) -> Any:
    node: Any = Spec()
    for part in path.split("."):
        node = getattr(node, re.sub(r"([A-Z])", lambda m: f"_{m[1].lower()}", part))
    return node


def _fits(name: str) -> bool:
    return len(name) <= LONGEST and re.fullmatch(NAME, name) is not None

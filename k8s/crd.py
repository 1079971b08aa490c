"""The CustomResourceDefinition, made from the dataclasses: `make crd` writes what `manifest` returns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from elastic.k8s import rules
from elastic.k8s.spec import Spec
from elastic.k8s.status import Told
from elastic.proto.elasticjob import GROUP, KIND, PLURAL, VERSION, Accepted, JobState
from elastic.proto.schema import openapi

Json = dict[str, Any]

HERE = Path(__file__).resolve().parent
FILES = (HERE / "manifests" / "crd.yaml", HERE / "chart" / "files" / "crd.yaml")
DOCS = HERE.parent / "docs" / "elasticjob.md"
HEAD = "# Made by `make crd` from k8s/spec.py and k8s/rules.py.\n"

COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Workers", "integer", ".status.readyReplicas", 0),
    ("Desired", "integer", ".status.desiredReplicas", 0),
    ("Step", "integer", ".status.job.training.step", 0),
    ("Goodput", "number", ".status.job.goodput", 0),
    ("Restarts", "integer", ".status.job.restarts", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Queue", "string", ".spec.scheduling.queue", 1),
    ("Checkpoint", "integer", ".status.job.checkpoint.persistedStep", 1),
    ("ETA-Seconds", "number", ".status.job.training.etaSeconds", 1),
    ("MFU", "number", ".status.job.training.mfu", 1),
    ("Master", "string", ".status.master.pod", 1),
)
"""Name, type, place and priority; those above 0 are shown by `-o wide`."""


def manifest() -> Json:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.worker.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ej", "ejob"],
                "categories": ["all", "training"],
            },
            "versions": [version],
        },
    }


def text() -> str:
    return HEAD + yaml.safe_dump(manifest(), sort_keys=False, width=1 << 16)


def _schema() -> Json:
    spec = openapi(Spec)
    spec["x-kubernetes-validations"] = rules.of_spec()
    return {
        "type": "object",
        "description": "A training job that goes on whatever dies, on as many nodes as there are.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": _status(),
        },
        "x-kubernetes-validations": rules.of_name(),
    }


def _status() -> Json:
    """What the operator says, and beside it what the master does."""
    found = _plain(Told)
    of = found["properties"]
    of["conditions"] |= {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    of["conditions"]["items"]["required"] = ["type", "status"]
    of["accepted"] = {**_plain(Accepted), "description": "By the operator, for the master."}
    of["job"] = {**_plain(JobState), "description": "By the master."}
    return {"type": "object", "properties": of}


def _plain(kind: type) -> Json:
    """Without defaults, since who writes a part says what is so, and with what a newer neighbour adds."""
    found = _bare(openapi(kind))
    assert isinstance(found, dict)
    return {**found, "x-kubernetes-preserve-unknown-fields": True}


def _bare(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: {name: _bare(one) for name, one in value.items()}
            if key == "properties"
            else _bare(value)
            for key, value in node.items()
            if key not in ("default", "required")
        }
    return node


def reference() -> str:
    """docs/elasticjob.md: every field of the spec, by the schema."""
    spec = openapi(Spec)
    return "\n".join([INTRODUCTION, *_rows(spec, ""), "", *_rules()]) + "\n"


INTRODUCTION = """# The spec of an ElasticJob

Made by `make crd` from `k8s/spec.py` and `k8s/rules.py`. An example of each kind is in `examples/k8s`; what the
conditions and reasons of a job's status mean, and which fields were proposed and are not here, and why, is in
[kubernetes-operations.md](kubernetes-operations.md).

| field of `spec` | type | default | what it is |
|---|---|---|---|"""


def _rows(node: Json, path: str) -> Iterator[str]:
    for name, one in node["properties"].items():
        where = f"{path}.{name}".lstrip(".")
        inner = one.get("items", one)
        nested = "properties" in inner and "x-kubernetes-preserve-unknown-fields" not in inner
        if not nested or "description" in one:
            kind, default = _kind(one), "" if nested else _default(one)
            words = one.get("description", "").replace("|", "\\|")
            yield f"| `{where}` | {kind} | {default} | {words} |"
        if nested:
            yield from _rows(inner, where + ("[]" if inner is not one else ""))


def _kind(one: Json) -> str:
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    if "additionalProperties" in one:
        return f"object of {_kind(one['additionalProperties'])}"
    if "x-kubernetes-int-or-string" in one:
        return "number or text"
    if one["type"] == "array":
        return f"list of {_kind(one['items'])}"
    names = {"integer": "number", "boolean": "true, false", "string": "text", "object": "object"}
    kind = names[one["type"]]
    if "minimum" in one:
        kind += (
            f", {one['minimum']} to {one['maximum']}"
            if "maximum" in one
            else f", {one['minimum']} or more"
        )
    return kind


def _default(one: Json) -> str:
    value = one.get("default")
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _rules() -> Iterator[str]:
    yield "What fields must be together; the server says so where it evaluates CEL (1.25), else the operator:"
    yield ""
    yield from (f"* {rule.name}" for rule in rules.RULES)
    yield ""
    yield "While a job runs, these may not change; suspend it first:"
    yield ""
    yield from (f"* `{path}`" for path in rules.FROZEN)
    yield ""
    yield "While a job runs in a gang of Kueue's, these neither:"
    yield ""
    yield from (f"* `{path}`" for path in rules.COUNTED)
    yield ""
    yield "Never: " + ", ".join(f"`{path}`" for path in rules.FIXED) + "."


def main() -> None:
    for path in FILES:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text())
    DOCS.write_text(reference())


if __name__ == "__main__":
    main()

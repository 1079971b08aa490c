"""A container's environment, command and working folder from its pod's manifest: pure."""

import base64
import re
from collections.abc import Mapping
from typing import Any, Protocol

from scripts.kubernetes.quantities import amount

Object = dict[str, Any]
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ConfigError(Exception):
    """The kubelet's CreateContainerConfigError, in words."""


class Lookup(Protocol):
    """Reads an object of the pod's namespace; None where it is not there."""

    def __call__(self, plural: str, name: str) -> Object | None: ...


def environment(
    pod: Object, container: Object, *, base: Mapping[str, str], address: str, lookup: Lookup
) -> dict[str, str]:
    """All variables; base: the image's own. Raises ConfigError where a source is missing."""
    found = dict(base)
    for source in container.get("envFrom", []):
        for plural, key in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if reference := source.get(key):
                values = entries(plural, reference, lookup)
                prefix = source.get("prefix", "")
                found |= {prefix + name: value.decode() for name, value in values.items()}
    for entry in container.get("env", []):
        value = _value(pod, container, entry, address, lookup)
        if value is not None:
            found[entry["name"]] = expand(value, found)
    return found


def command(container: Object, environ: Mapping[str, str]) -> list[str]:
    """What runs; raises ConfigError where there is none."""
    words = [*container.get("command", []), *container.get("args", [])]
    if not words:
        raise ConfigError(f"container {container['name']}: no command specified")
    return [expand(word, environ) for word in words]


def expand(text: str, environ: Mapping[str, str]) -> str:
    """$(NAME) is replaced where it is known, $$ is one dollar."""

    def replaced(match: re.Match[str]) -> str:
        if match.group(1) == "$":
            return "$"
        return environ.get(match.group(2), match.group(0))

    return _REFERENCE.sub(replaced, text)


def entries(plural: str, reference: Object, lookup: Lookup) -> dict[str, bytes]:
    """What a Secret or ConfigMap holds; empty where it is missing and may be."""
    found = lookup(plural, reference["name"])
    if found is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f'{plural.removesuffix("s")} "{reference["name"]}" not found')
    data = found.get("data") or {}
    if plural == "configmaps":
        return {name: text.encode() for name, text in data.items()}
    return {name: base64.b64decode(text) for name, text in data.items()}


def _value(
    pod: Object, container: Object, entry: Object, address: str, lookup: Lookup
) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return str(entry.get("value", ""))
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"], address)
    if "resourceFieldRef" in source:
        return _resource(container, source["resourceFieldRef"])
    for plural, key in (("configmaps", "configMapKeyRef"), ("secrets", "secretKeyRef")):
        if reference := source.get(key):
            held = entries(plural, reference, lookup)
            if reference["key"] in held:
                return held[reference["key"]].decode()
            if reference.get("optional"):
                return None
            where = f"{plural.removesuffix('s')} {pod['metadata']['namespace']}/{reference['name']}"
            raise ConfigError(f"couldn't find key {reference['key']} in {where}")
    raise ConfigError(f"{entry['name']}: the test kubelet knows no such source: {list(source)}")


def field(pod: Object, path: str, address: str) -> str:
    """The downward API."""
    if match := _SUBSCRIPT.fullmatch(path):
        return str((pod["metadata"].get(match.group(1)) or {}).get(match.group(2), ""))
    own = {"status.podIP": address, "status.hostIP": address}
    if path in own:
        return own[path]
    found: Any = pod
    for word in path.split("."):
        found = found.get(word) if isinstance(found, dict) else None
    if found is None:
        raise ConfigError(f"the test kubelet finds no field {path}")
    return str(found)


def _resource(container: Object, reference: Object) -> str:
    """Whole units of the divisor, rounded up."""
    kind, name = reference["resource"].split(".", 1)
    value = amount((container.get("resources", {}).get(kind) or {}).get(name, 0))
    divisor = amount(reference.get("divisor") or 1) or 1.0
    return str(-int(-value // divisor))

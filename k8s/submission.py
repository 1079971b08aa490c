"""An ElasticJob as a command line says it: flags and a torchrun command -> the resource. Pure."""

import posixpath
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.k8s.template import QUANTITY
from elastic.proto.errors import UsageError

Json = dict[str, Any]

LONGEST = 40
"""Characters of a job's name: its pods' names are longer, and end at 63."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How many worker pods."""

    least: int
    most: int

    @classmethod
    def read(cls, text: str) -> "Nodes":
        """`4`, or `2:8` as torchrun's --nnodes has it."""
        low, colon, high = text.partition(":")
        if not low.isdecimal() or (colon and not high.isdecimal()):
            raise UsageError(f"--nodes {text}: write a number, or MIN:MAX")
        nodes = cls(least=int(low), most=int(high or low))
        if not 1 <= nodes.least <= nodes.most:
            raise UsageError(f"--nodes {text}: MIN is 1 or more, and MAX not below it")
        return nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Storage that each worker pod gets."""

    source: str
    """Name of a PersistentVolumeClaim, or an absolute path on the node."""
    path: str
    """Where the pod has it."""
    read_only: bool = False

    @classmethod
    def read(cls, text: str) -> "Volume":
        """`CLAIM:/path` or `/on/the/node:/path`, with `:ro` behind it where nothing is written."""
        source, _, rest = text.partition(":")
        path, _, mode = rest.partition(":")
        if not source or not posixpath.isabs(path) or mode not in ("", "ro", "rw"):
            raise UsageError(
                f"--volume {text}: write CLAIM:/path or /on/the/node:/path, with :ro behind it where "
                "nothing is written"
            )
        return cls(source=source, path=path, read_only=mode == "ro")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What the command line of `submit` says; empty and None: the cluster's defaults."""

    name: str
    """Empty: made from the command's script."""
    image: str
    command: tuple[str, ...]
    nodes: Nodes
    gpus: int = 0
    """A node."""
    gpu_resource: str = GPU
    cpus: str = ""
    """A node, as a quantity: requested, and no limit."""
    memory: str = ""
    """A node, as a quantity: requested, and the limit."""
    nproc_per_node: str = ""
    node_unit: int = 1
    spares: int = 0
    priority: str = ""
    gang: str = ""
    queue: str = ""
    env: tuple[tuple[str, str], ...] = ()
    volumes: tuple[Volume, ...] = ()
    workdir: str = ""
    suspended: bool = False


def variable(text: str) -> tuple[str, str]:
    """`NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise UsageError(f"--env {text}: write NAME=VALUE")
    return name, value


def variables(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Each `NAME=VALUE`, and no name twice."""
    found = tuple(variable(text) for text in texts)
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--env {name} is there {names.count(name)} times: write it once")
    return found


def quantity(flag: str, text: str) -> str:
    """A quantity as Kubernetes reads it: 500m, 8, 64Gi."""
    if not re.fullmatch(QUANTITY, text) or text.startswith("-"):
        raise UsageError(f"{flag} {text}: write a quantity such as 500m, 8 or 64Gi")
    return text


def manifest(given: Submission, namespace: str) -> Json:
    """The ElasticJob, without apiVersion and kind. Raises UsageError."""
    name = given.name or made_name(given.command)
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        raise UsageError(
            f"--name {name}: write at most {LONGEST} lower-case letters, digits and dashes, a letter "
            "first and no dash last"
        )
    nodes = given.nodes
    spec: Json = {
        "suspend": given.suspended,
        "worker": {"replicas": nodes.most, "template": {"spec": _pod(given)}},
        "elastic": {"min": nodes.least, "max": nodes.most, "nodeUnit": given.node_unit},
    }
    if given.nproc_per_node:
        spec["nprocPerNode"] = given.nproc_per_node
    if given.spares:
        spec["hotSpares"] = {"count": given.spares}
    if given.queue and given.gang not in ("Kueue", "Volcano"):
        raise UsageError(f"--queue {given.queue}: whose it is, --gang Kueue or Volcano says")
    if given.gang == "Kueue" and not given.queue:
        raise UsageError("--gang Kueue needs a --queue")
    scheduling: Json = _said({"queue": given.queue, "priorityClassName": given.priority})
    if given.gang:
        scheduling["gang"] = {"provider": given.gang}
    if scheduling:
        spec["scheduling"] = scheduling
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def _pod(given: Submission) -> Json:
    requests = {"cpu": given.cpus, "memory": given.memory}
    limits = {"memory": given.memory, given.gpu_resource: str(given.gpus) if given.gpus else ""}
    container: Json = {
        "name": "main",
        "image": given.image,
        "command": list(launched(given.command)),
    }
    resources = {"requests": _said(requests), "limits": _said(limits)}
    if any(resources.values()):
        container["resources"] = {key: value for key, value in resources.items() if value}
    if given.env:
        container["env"] = [{"name": name, "value": value} for name, value in given.env]
    if given.workdir:
        container["workingDir"] = given.workdir
    pod: Json = {"containers": [container]}
    if given.volumes:
        pod["volumes"] = [
            {"name": f"volume-{n}", **_source(one)} for n, one in enumerate(given.volumes)
        ]
        container["volumeMounts"] = [
            {"name": f"volume-{n}", "mountPath": one.path, "readOnly": one.read_only}
            for n, one in enumerate(given.volumes)
        ]
    return pod


def _source(volume: Volume) -> Json:
    if posixpath.isabs(volume.source):
        return {"hostPath": {"path": volume.source}}
    return {"persistentVolumeClaim": {"claimName": volume.source, "readOnly": volume.read_only}}


def _said(values: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if value}


def launched(command: Sequence[str]) -> tuple[str, ...]:
    """The command with elastic-run in torchrun's place; every word behind it stays."""
    words = tuple(command)
    if words and posixpath.basename(words[0]) == "torchrun":
        return ("elastic-run", *words[1:])
    if words[1:3] in (("-m", "torch.distributed.run"), ("-m", "torch.distributed.launch")):
        return ("elastic-run", *words[3:])
    return words


def made_name(command: Sequence[str]) -> str:
    """The script's name and a few letters that no other job has: train_gpt.py -> train-gpt-x3k9d."""
    script = next((word for word in command if word.endswith(".py")), "")
    if not script and "-m" in command[:-1]:
        script = command[command.index("-m") + 1].rpartition(".")[2]
    stem = posixpath.basename(script).removesuffix(".py").lower()
    stem = re.sub(r"[^a-z0-9]+", "-", stem).strip("-0123456789")[: LONGEST - 6].rstrip("-")
    tail = "".join(secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
    return f"{stem or 'job'}-{tail}"


def lost(asked: Any, got: Any, path: str = "") -> list[str]:
    """Paths of what was asked for and the server left out: fields that its schema does not know. A null is nothing
    said, and servers leave it out, too."""
    if isinstance(asked, dict) and isinstance(got, dict):
        missing = [
            f"{path}.{key}".lstrip(".")
            for key in asked
            if key not in got and asked[key] is not None
        ]
        inside = [
            found
            for key in asked
            if key in got
            for found in lost(asked[key], got[key], f"{path}.{key}")
        ]
        return missing + inside
    if isinstance(asked, list) and isinstance(got, list):
        pairs = enumerate(zip(asked, got, strict=False))
        return [found for n, (a, b) in pairs for found in lost(a, b, f"{path}[{n}]")]
    return []

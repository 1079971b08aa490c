"""What the garbage collector does with owners and what they own: pure, and a shell."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from urllib3.exceptions import HTTPError

from scripts.kubernetes.client import CORE, ApiError, Client
from scripts.kubernetes.mirror import Mirror

_LOG = logging.getLogger(__name__)
Object = dict[str, Any]
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
GROUPS = {
    CORE: ("pods", "services", "configmaps", "secrets", "serviceaccounts"),
    "/apis/rbac.authorization.k8s.io/v1": ("roles", "rolebindings"),
    "/apis/policy/v1beta1": ("poddisruptionbudgets",),
    "/apis/elastic-runtime.dev/v1alpha1": ("elasticjobs",),
    "/apis/scheduling.volcano.sh/v1beta1": ("podgroups",),
    "/apis/scheduling.x-k8s.io/v1alpha1": ("podgroups",),
}
"""Kinds that it looks after, by the path of their group; those that are not there may come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One write."""

    path: str
    """Of the object."""
    uid: str
    """Its, as it was seen."""
    verb: str
    """`delete`, in background; `foreground`, the same for what itself owns; `release`, which
    takes a finalizer away; `disown`, which takes an owner away."""
    argument: str = ""
    """The finalizer, or the owner's uid."""


def steps(objects: dict[str, Object]) -> list[Step]:
    """What is to be done now. objects: by path; an owner that is not among them is taken for gone,
    so a `delete` asks the server first."""
    known = {each["metadata"]["uid"]: each for each in objects.values()}
    found = []
    owned: dict[str, list[str]] = {}
    for path, each in objects.items():
        owners = each["metadata"].get("ownerReferences", [])
        for owner in owners:
            owned.setdefault(owner["uid"], []).append(path)
        if not owners or "deletionTimestamp" in each["metadata"]:
            continue
        uid = each["metadata"]["uid"]
        states = [_state(known.get(owner["uid"])) for owner in owners]
        if any(state == "orphaning" for state in states):
            owner = owners[states.index("orphaning")]["uid"]
            found.append(Step(path=path, uid=uid, verb="disown", argument=owner))
        elif all(state != "there" for state in states):
            verb = "foreground" if "foreground" in states else "delete"
            found.append(Step(path=path, uid=uid, verb=verb))
    for path, each in objects.items():
        uid = each["metadata"]["uid"]
        for finalizer in (FOREGROUND, ORPHAN):
            if finalizer in each["metadata"].get("finalizers", []) and not owned.get(uid):
                found.append(Step(path=path, uid=uid, verb="release", argument=finalizer))
    return found


def _state(owner: Object | None) -> str:
    if owner is None:
        return "gone"
    if "deletionTimestamp" in owner["metadata"]:
        finalizers = owner["metadata"].get("finalizers", [])
        if ORPHAN in finalizers:
            return "orphaning"
        if FOREGROUND in finalizers:
            return "foreground"
    return "there"


class Collector:
    """Watches all kinds and does the steps, one round after each change."""

    def __init__(self, client: Client, namespace: str, call: Callable[..., Any]) -> None:
        self._client, self._call = client, call
        self._changed = asyncio.Event()
        self._mirrors: dict[str, Mirror] = {}
        for group, kinds in GROUPS.items():
            for plural in kinds:
                path = f"{group}/namespaces/{namespace}/{plural}"
                self._mirrors[path] = Mirror(client, path, lambda *_: self._changed.set())

    async def run(self) -> None:
        """Until cancelled."""
        for mirror in self._mirrors.values():
            await mirror.ready.wait()
        while True:
            await self._changed.wait()
            self._changed.clear()
            objects = {
                f"{path}/{each['metadata']['name']}": each
                for path, mirror in self._mirrors.items()
                for each in list(mirror.objects.values())
            }
            found = steps(objects)
            await asyncio.gather(*(self._call(self._do, objects, step) for step in found))

    def _do(self, objects: dict[str, Object], step: Step) -> None:
        metadata = objects[step.path]["metadata"]
        try:
            if step.verb in ("delete", "foreground"):
                if step.verb == "delete" and self._lives(metadata, step.path):
                    return  # its watch tells in a moment
                policy = {"delete": "Background", "foreground": "Foreground"}[step.verb]
                self._client.delete(
                    step.path, propagationPolicy=policy, preconditions={"uid": step.uid}
                )
                return
            name, kept = (
                "finalizers",
                [f for f in metadata.get("finalizers", []) if f != step.argument],
            )
            if step.verb == "disown":
                name = "ownerReferences"
                kept = [o for o in metadata[name] if o["uid"] != step.argument]
            version = metadata["resourceVersion"]
            self._client.merge(
                step.path, {"metadata": {name: kept or None, "resourceVersion": version}}
            )
        except ApiError as error:
            if error.code not in (404, 409):  # gone, or seen anew in a moment
                _LOG.warning("%s %s: %s", step.verb, step.path, error)
        except (HTTPError, OSError) as error:
            _LOG.warning("%s %s: %s", step.verb, step.path, error)

    def _lives(self, metadata: Object, path: str) -> bool:
        """Asked of the server: the watches of two kinds do not run in step."""
        namespace = path.split("/namespaces/")[1].split("/")[0]
        for owner in metadata["ownerReferences"]:
            group = "/api/v1" if "/" not in owner["apiVersion"] else f"/apis/{owner['apiVersion']}"
            plural = owner["kind"].lower() + ("es" if owner["kind"].endswith("s") else "s")
            try:
                found = self._client.get(f"{group}/namespaces/{namespace}/{plural}/{owner['name']}")
            except ApiError as error:
                if error.code != 404:
                    raise
            else:
                if found["metadata"]["uid"] == owner["uid"]:
                    return True
        return False

"""What a job has beside its pods, as manifests: how its master is found, what it may do, who belongs to a gang. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic.k8s.kernel.resources import (
    BUDGETS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
)
from elastic.k8s.pods import Manifest, Owner
from elastic.k8s.spec import Gang, Provider, Scheduling, Spec
from elastic.proto.elasticjob import GROUP, PLURAL, PORT, ROLE_LABEL, UID_LABEL

POD_GROUPS: Mapping[Provider, Resource] = {
    "Volcano": Resource(group="scheduling.volcano.sh", version="v1beta1", kind="PodGroup", plural="podgroups"),
    "Coscheduling": Resource(group="scheduling.x-k8s.io", version="v1alpha1", kind="PodGroup", plural="podgroups"),
}  # fmt: skip
CORE = "rbac.authorization.k8s.io"

Belongings = tuple[tuple[Resource, Manifest], ...]


def service(owner: Owner) -> Manifest:
    """Leads to the master's pod, whichever attempt's it is."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.host),
        "spec": {
            "selector": {UID_LABEL: owner.uid, ROLE_LABEL: "master"},
            "ports": [{"name": "grpc", "protocol": "TCP", "port": PORT, "targetPort": PORT}],
        },
    }


def token(owner: Owner, secret: str) -> Manifest:
    """secret: one of the job's own, never changed: who has another cannot join."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(owner.token),
        "type": "Opaque",
        "stringData": {"token": secret},
    }


def account(owner: Owner) -> tuple[Manifest, Manifest, Manifest]:
    """Who the master is, and the little that it may do: pods of this namespace, its own job's status."""
    rules: list[dict[str, Any]] = [
        {
            "apiGroups": [""],
            "resources": ["pods"],
            "verbs": ["get", "list", "watch", "create", "delete"],
        },
        {"apiGroups": [""], "resources": ["resourcequotas"], "verbs": ["list", "watch"]},
        {
            "apiGroups": [GROUP],
            "resources": [PLURAL],
            "resourceNames": [owner.name],
            "verbs": ["get", "list", "watch"],
        },
        {
            "apiGroups": [GROUP],
            "resources": [f"{PLURAL}/status"],
            "resourceNames": [owner.name],
            "verbs": ["patch"],
        },
        {  # which some clusters ask of who makes what holds up its owner's deletion
            "apiGroups": [GROUP],
            "resources": [f"{PLURAL}/finalizers"],
            "resourceNames": [owner.name],
            "verbs": ["update"],
        },
    ]
    metadata = owner.metadata(owner.host)
    subject = {"kind": "ServiceAccount", "name": owner.host, "namespace": owner.namespace}
    role = {"apiGroup": CORE, "kind": "Role", "name": owner.host}
    return (
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{CORE}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{CORE}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "subjects": [subject],
            "roleRef": role,
        },
    )


def budget(owner: Owner, spec: Spec, version: str = "policy/v1") -> Manifest | None:
    """Keeps evictions from taking more worker pods than the job can spare. version: policy/v1beta1 before 1.21."""
    if spec.worker.disruption_budget == "None":
        return None
    labels = {UID_LABEL: owner.uid, ROLE_LABEL: "worker"}
    return {
        "apiVersion": version,
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(f"{owner.name}-worker"),
        "spec": {"minAvailable": spec.least, "selector": {"matchLabels": labels}},
    }


def pod_group(owner: Owner, spec: Spec) -> Manifest | None:
    """Of Volcano or the coscheduling plugin: elastic.min pods are placed together, or none."""
    gang = spec.scheduling.gang
    found: Manifest = {"minMember": spec.least}
    if gang.provider == "Coscheduling":
        found["scheduleTimeoutSeconds"] = gang.schedule_timeout_seconds
        version = "scheduling.x-k8s.io/v1alpha1"
    elif gang.provider == "Volcano":
        if spec.scheduling.queue:
            found["queue"] = spec.scheduling.queue
        if spec.scheduling.priority_class_name:
            found["priorityClassName"] = spec.scheduling.priority_class_name
        version = "scheduling.volcano.sh/v1beta1"
    else:
        return None
    metadata = owner.metadata(owner.name)
    return {"apiVersion": version, "kind": "PodGroup", "metadata": metadata, "spec": found}


# --- of one job ----------------------------------------------------------------------------------


def of(owner: Owner, spec: Spec, budgets: str, *, gang: bool = True) -> Belongings:
    """All but the token. budgets: version of the API group policy. gang: with the gang that it asks for."""
    found: list[tuple[Resource, Manifest]] = [(SERVICES, service(owner))]
    if not spec.master.service_account_name:
        kinds = (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS)
        found += zip(kinds, account(owner), strict=True)
    return (*found, *sized(owner, spec, budgets, gang=gang))


def sized(owner: Owner, spec: Spec, budgets: str, *, gang: bool = True) -> Belongings:
    """What names the job's smallest size."""
    found: list[tuple[Resource, Manifest]] = []
    if (least := budget(owner, spec, f"policy/{budgets}")) is not None:
        found.append((replace(BUDGETS, version=budgets), least))
    if gang and (group := pod_group(owner, spec)) is not None:
        found.append((POD_GROUPS[spec.scheduling.gang.provider], group))
    return tuple(found)


def sized_by_any(owner: Owner, budgets: str) -> Belongings:
    """Whatever might name the smallest size of a job of this name, by any spec."""
    specs = (Spec(scheduling=Scheduling(gang=Gang(provider=one))) for one in POD_GROUPS)
    return tuple(dict(one for spec in specs for one in sized(owner, spec, budgets)).items())

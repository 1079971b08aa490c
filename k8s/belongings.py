"""What a job has beside its pods, as manifests: how its master is found, what it may do, who belongs to a gang. Pure."""

from typing import Any

from elastic.k8s.pods import Manifest, Owner
from elastic.k8s.spec import Spec
from elastic.proto.elasticjob import GROUP, PLURAL, PORT, ROLE_LABEL, UID_LABEL

CORE = "rbac.authorization.k8s.io"


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

"""The pods of a job, as manifests: its workers' and its master's. Pure."""

import copy
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.k8s.spec import Spec, main_container
from elastic.k8s.supply import New
from elastic.k8s.template import amount, total
from elastic.proto import env
from elastic.proto.elasticjob import GROUP, JOB_LABEL, KIND, PORT, ROLE_LABEL, UID_LABEL, VERSION
from elastic.proto.schema import Json
from elastic.proto.security import TOKEN

Manifest = dict[str, Any]

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOSTNAMES = "metadata.name"
"""Field of a node by which pods keep away from it: a node's label may say another host name."""
GONE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of nodes that do not answer."""
PATIENCE = 30
"""Seconds that a pod stays bound to such a node; Kubernetes' own default is five minutes."""
LEAVE = 30
"""Seconds that a pod has to end beyond what its ranks have to save."""
SHM, SHM_VOLUME = "/dev/shm", "elastic-shm"
FOLDER, FOLDER_VOLUME = "/var/lib/elastic", "elastic-journal"
MASTER_RESOURCES: Json = {"requests": {"cpu": "250m", "memory": "256Mi"}}
COSCHEDULER = "scheduler-plugins-scheduler"
SECURITY = (
    "allowPrivilegeEscalation", "runAsGroup", "runAsNonRoot", "runAsUser", "seLinuxOptions",
    "seccompProfile",
)  # fmt: skip
"""Of a main container's `securityContext`, what its master has, too: what a namespace's policy asks of each pod. The
rest (`privileged`, capabilities that are added, a read-only root) is about what trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The ElasticJob that all belongs to."""

    namespace: str
    name: str
    uid: str

    @property
    def labels(self) -> dict[str, str]:
        return {JOB_LABEL: self.name, UID_LABEL: self.uid}

    @property
    def host(self) -> str:
        """Name of the master's Service, and of what else the master has."""
        return f"{self.name}-master"

    @property
    def token(self) -> str:
        """Name of the Secret with the job's token, under the key `token`."""
        return f"{self.name}-token"

    def metadata(self, name: str, labels: Mapping[str, str] | None = None) -> Manifest:
        """Of something that goes when the job goes."""
        owner = {
            "apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": self.name, "uid": self.uid,
            "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": {**(labels or {}), **self.labels},
            "ownerReferences": [owner],
        }


# --- a worker ------------------------------------------------------------------------------------


def worker(owner: Owner, spec: Spec, new: New, avoid: tuple[str, ...]) -> Manifest:
    """avoid: names of nodes that it keeps away from."""
    template: Manifest = copy.deepcopy(dict(spec.pod))
    meta, pod = template.get("metadata") or {}, dict(template.get("spec") or {})
    name = new.pod(owner.name)
    labels = {**(meta.get("labels") or {}), ROLE_LABEL: "worker"}
    found = owner.metadata(name, labels)
    notes = dict(meta.get("annotations") or {})
    pod["containers"] = [dict(one) for one in pod.get("containers") or []]
    _schedule(pod, spec, avoid)
    _join_gang(owner, spec, found["labels"], notes, pod)
    container = main_container({"spec": pod})
    assert isinstance(container, dict)  # a copy of ours
    container["env"] = [*(container.get("env") or []), *_environment(owner, spec, new, name)]
    _room(pod, container, spec)
    pod |= {"restartPolicy": "Never", "automountServiceAccountToken": False}
    if pod.get(
        "hostNetwork"
    ):  # where a pod does not ask the cluster for names: its master's is one
        pod.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    asked = pod.get("terminationGracePeriodSeconds")
    pod["terminationGracePeriodSeconds"] = max(_grace(spec), asked or 0)
    if notes:
        found["annotations"] = notes
    return {"apiVersion": "v1", "kind": "Pod", "metadata": found, "spec": pod}


def _grace(spec: Spec) -> int:
    """Seconds in which ranks save and their agent, or master, ends."""
    return spec.flash_checkpoint.drain_seconds + LEAVE


def ranks(spec: Spec) -> int:
    """Of a node, as far as the spec tells: as it says, else one for each GPU, else 1."""
    asked = str(spec.nproc_per_node)
    if asked.isdecimal():
        return int(asked)
    limits = (main_container(spec.pod).get("resources") or {}).get("limits") or {}
    gpus = sum(int(amount(count)) for name, count in limits.items() if name.endswith("/gpu"))
    return gpus if gpus and asked != "cpu" else 1


def _environment(owner: Owner, spec: Spec, new: New, name: str) -> list[Manifest]:
    said = {
        env.POD_JOB: owner.name,
        env.POD_NAME: name,
        env.POD_MASTER: f"{owner.host}:{PORT}",
        env.POD_NODES: f"{spec.least}:{spec.most}",
        "PET_NPROC_PER_NODE": str(spec.nproc_per_node),
        "WORLD_SIZE": str(spec.replicas),
        "RANK": str(new.slot),
        "LOCAL_WORLD_SIZE": str(ranks(spec)),
        "MASTER_ADDR": owner.host,
        "MASTER_PORT": str(PORT),
    }
    return [*({"name": key, "value": value} for key, value in said.items()), _token(owner)]


def _token(owner: Owner) -> Manifest:
    return {
        "name": TOKEN,
        "valueFrom": {"secretKeyRef": {"name": owner.token, "key": "token"}},
    }


def _schedule(pod: Manifest, spec: Spec, avoid: tuple[str, ...]) -> None:
    asked = spec.scheduling
    if asked.priority_class_name:
        pod["priorityClassName"] = asked.priority_class_name
    if asked.scheduler_name:
        pod["schedulerName"] = asked.scheduler_name
    if asked.node_selector:
        pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **asked.node_selector}
    pod["tolerations"] = [
        *(pod.get("tolerations") or []),
        *asked.tolerations,
        *_patience(),
    ]
    affinity = copy.deepcopy(dict(asked.affinity or pod.get("affinity") or {}))
    if avoid:
        _avoid(affinity, avoid)
    if affinity:
        pod["affinity"] = affinity


def _patience() -> list[Manifest]:
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": PATIENCE}
        for key in GONE
    ]


def _avoid(affinity: Manifest, nodes: tuple[str, ...]) -> None:
    """A node is chosen by any of the terms, so each gets it."""
    of_nodes = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    required = of_nodes[REQUIRED] = of_nodes.get(REQUIRED) or {}
    terms = required["nodeSelectorTerms"] = required.get("nodeSelectorTerms") or [{}]
    for term in terms:  # of this field, one value each is all that the API server takes
        away = [{"key": HOSTNAMES, "operator": "NotIn", "values": [node]} for node in nodes]
        term["matchFields"] = [*(term.get("matchFields") or []), *away]


def _join_gang(
    owner: Owner, spec: Spec, labels: dict[str, str], notes: dict[str, str], pod: Manifest
) -> None:
    match spec.scheduling.gang.provider:
        case "Volcano":
            notes["scheduling.k8s.io/group-name"] = owner.name
            pod.setdefault("schedulerName", "volcano")
        case "Coscheduling":
            labels["scheduling.x-k8s.io/pod-group"] = owner.name
            pod.setdefault("schedulerName", COSCHEDULER)
        case "Kueue":
            labels["kueue.x-k8s.io/queue-name"] = spec.scheduling.queue
            labels["kueue.x-k8s.io/pod-group-name"] = owner.name
            count = spec.replicas + spec.hot_spares.count
            notes["kueue.x-k8s.io/pod-group-total-count"] = str(count)


def _room(pod: Manifest, container: Manifest, spec: Spec) -> None:
    """Shared memory for loaders and NCCL, which the pod's memory limit bounds; and memory for snapshots."""
    mounts = container.setdefault("volumeMounts", [])
    if not any(posixpath.normpath(one.get("mountPath") or "") == SHM for one in mounts):
        container["volumeMounts"] = [*mounts, {"name": SHM_VOLUME, "mountPath": SHM}]
        volume = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
        pod["volumes"] = [*(pod.get("volumes") or []), volume]
    if spec.flash_checkpoint.memory is None:
        return
    resources = copy.deepcopy(container.get("resources") or {})
    for part in (resources.get("limits") or {}, resources.get("requests") or {}):
        if "memory" in part:
            part["memory"] = total(part["memory"], spec.flash_checkpoint.memory)
    container["resources"] = resources


# --- the master ----------------------------------------------------------------------------------


def master_name(owner: Owner, attempt: int) -> str:
    return f"{owner.host}-r{attempt}"


def master(owner: Owner, spec: Spec, attempt: int) -> Manifest:
    """In the training image, whose version workers and master share; restarted in place by its node. It is as urgent
    as the job and goes where the job is let in, but on any node: those of a nodeSelector have the GPUs."""
    template = main_container(spec.pod)
    variables: dict[str, Any] = {
        env.MASTER_JOB: f"{owner.namespace}/{owner.name}",
        env.MASTER_ADDRESS: f"{owner.host}:{PORT}",
        env.MASTER_FOLDER: FOLDER,
    }
    fields = {env.MASTER_IP: "status.podIP", env.MASTER_POD: "metadata.name"}
    container = {
        "name": "master",
        "image": template.get("image", ""),
        "command": ["python3", "-m", "elastic.job_master"],
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in fields.items()
            ),
            _token(owner),
        ],
        "ports": [{"name": "grpc", "containerPort": PORT}],
        "resources": dict(spec.master.resources or MASTER_RESOURCES),
        "volumeMounts": [{"name": FOLDER_VOLUME, "mountPath": FOLDER}],
    }
    if policy := template.get("imagePullPolicy"):
        container["imagePullPolicy"] = policy
    asked = template.get("securityContext") or {}
    kept = {name: asked[name] for name in SECURITY if name in asked}
    if drop := (asked.get("capabilities") or {}).get("drop"):
        kept["capabilities"] = {"drop": drop}
    if kept:
        container["securityContext"] = kept
    claim = spec.master.storage_claim
    journal: Manifest = (
        {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    )
    pod: Manifest = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": _grace(spec),  # of a deleted job it ends with its ranks
        "serviceAccountName": spec.master.service_account_name or owner.host,
        "tolerations": [*spec.scheduling.tolerations, *_patience()],
        "containers": [container],
        "volumes": [{"name": FOLDER_VOLUME, **journal}],
    }
    for name in ("imagePullSecrets", "securityContext"):
        if said := (spec.pod.get("spec") or {}).get(name):
            pod[name] = said
    if priority := spec.scheduling.priority_class_name:
        pod["priorityClassName"] = priority
    metadata = owner.metadata(master_name(owner, attempt), {ROLE_LABEL: "master"})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}

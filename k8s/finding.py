"""Where the master of an ElasticJob is, for `elasticctl --job`: its Service says which pod and port."""

import base64
from dataclasses import dataclass

from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.kernel.errors import Absent, Forbidden
from elastic.k8s.kernel.resources import PODS, SECRETS, SERVICES
from elastic.k8s.resources import ELASTICJOBS
from elastic.proto.errors import NotFound, UsageError
from elastic.proto.security import TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """A job's master pod."""

    address: str
    """host:port of the pod, reached from where the cluster's pods are."""
    pod: str
    """namespace/name."""
    port: int
    token: str
    """The job's; empty: it has none, or we may not read it."""


async def master(job: str) -> Master:
    """Of `NAME`, or `NAMESPACE/NAME`, in the kubeconfig's cluster. Raises NotFound, UsageError and ApiError."""
    namespace, slash, name = job.rpartition("/")
    if not name or (slash and not namespace) or "/" in namespace:
        raise UsageError(f"--job {job}: write NAME, or NAMESPACE/NAME")
    async with await Api.connect() as api:
        return await find(api, namespace or api.namespace, name)


async def find(api: Api, namespace: str, name: str) -> Master:
    """The pod that the job's Service chooses, of those that are the job's own."""
    try:
        item = await api.get(ELASTICJOBS, namespace, name)
    except Absent as error:
        raise NotFound(
            f"{error} in namespace {namespace}: `elasticctl ls -A` lists them"
        ) from error
    try:
        service = await api.get(SERVICES, namespace, f"{name}-master")
    except Absent:
        raise NotFound(_without(item)) from None
    labels = service["spec"].get("selector") or {}
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    uid = item["metadata"]["uid"]
    for pod in await api.all(PODS, namespace, selector=selector):
        owners = [owner["uid"] for owner in pod["metadata"].get("ownerReferences") or ()]
        address = pod.get("status", {}).get("podIP")
        if uid in owners and address and pod["status"].get("phase") == "Running":
            port = int(service["spec"]["ports"][0]["port"])
            return Master(
                address=f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
                pod=f"{namespace}/{pod['metadata']['name']}",
                port=port,
                token=await _token(api, namespace, pod),
            )
    raise NotFound(_without(item))


def _without(item: Json) -> str:
    status = item.get("status") or {}
    told = [status.get("phase") or "Pending", status.get("reason"), status.get("message")]
    said = ": ".join(str(one) for one in told if one)
    return f"job {item['metadata']['name']} has no master that runs now ({said})"


async def _token(api: Api, namespace: str, pod: Json) -> str:
    """What the pod's environment takes from a Secret as the job's token."""
    for container in pod["spec"]["containers"]:
        for variable in container.get("env") or ():
            source = (variable.get("valueFrom") or {}).get("secretKeyRef")
            if variable["name"] == TOKEN and source:
                try:
                    secret = await api.get(SECRETS, namespace, source["name"])
                except (Absent, Forbidden):
                    return ""
                return base64.b64decode(secret["data"][source["key"]]).decode()
    return ""

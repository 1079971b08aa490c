"""Kinds of objects by their place in the API."""

from dataclasses import dataclass
from urllib.parse import quote

from elastic.proto.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object."""

    group: str
    """Empty for the core group."""
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As an object's `apiVersion` has it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Of one object, or with no name of all; with no namespace of all namespaces. Raises UsageError for a name
        that clients and servers take for a step in the path."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        if steps := {".", ".."}.intersection(parts):
            raise UsageError(
                f"{min(steps)!r} is no name: write one of lower-case letters, digits and dashes"
            )
        return "".join(f"/{quote(part, safe='')}" for part in parts if part)


PODS = Resource(group="", version="v1", kind="Pod", plural="pods")
NODES = Resource(group="", version="v1", kind="Node", plural="nodes", namespaced=False)
SERVICES = Resource(group="", version="v1", kind="Service", plural="services")
SECRETS = Resource(group="", version="v1", kind="Secret", plural="secrets")
SERVICE_ACCOUNTS = Resource(group="", version="v1", kind="ServiceAccount", plural="serviceaccounts")
CLAIMS = Resource(
    group="", version="v1", kind="PersistentVolumeClaim", plural="persistentvolumeclaims"
)
QUOTAS = Resource(group="", version="v1", kind="ResourceQuota", plural="resourcequotas")
EVENTS = Resource(group="events.k8s.io", version="v1", kind="Event", plural="events")
LEASES = Resource(group="coordination.k8s.io", version="v1", kind="Lease", plural="leases")
ROLES = Resource(group="rbac.authorization.k8s.io", version="v1", kind="Role", plural="roles")
ROLE_BINDINGS = Resource(
    group="rbac.authorization.k8s.io", version="v1", kind="RoleBinding", plural="rolebindings"
)
BUDGETS = Resource(  # policy/v1 came with 1.21, and policy/v1beta1 went with 1.25
    group="policy", version="v1", kind="PodDisruptionBudget", plural="poddisruptionbudgets"
)

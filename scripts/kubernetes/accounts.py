"""Service accounts with a role of their own."""

from pathlib import Path
from typing import Any

import yaml

from scripts.kubernetes.client import CORE, Client

Object = dict[str, Any]
GROUP = "rbac.authorization.k8s.io"
RBAC = f"/apis/{GROUP}/v1"
_RULES = Path(__file__).resolve().parents[2] / "k8s" / "chart" / "files" / "rules.yaml"


def allow(client: Client, namespace: str, account: str, *rules: Object) -> None:
    """The account, a role of these rules, and what binds the two, made."""
    client.make(f"{CORE}/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": account}})
    roles = f"{RBAC}/namespaces/{namespace}"
    client.make(f"{roles}/roles", {"metadata": {"name": account}, "rules": list(rules)})
    binding = {
        "metadata": {"name": account},
        "roleRef": {"apiGroup": GROUP, "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
    client.make(f"{roles}/rolebindings", binding)


def operator_rules() -> list[Object]:
    """What the chart allows the operator where its jobs and its Lease are in one namespace."""
    rules = yaml.safe_load(_RULES.read_text())
    return [*rules["jobs"], *rules["lease"]]

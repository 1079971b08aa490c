"""The Helm chart, linted and rendered by Helm's own engine; its objects taken by a real API server."""

import shutil
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from elastic.k8s import belongings
from elastic.k8s.pods import Owner
from elastic.k8s.submission import lost
from elastic.proto.elasticjob import GROUP, PLURAL
from scripts.kubernetes import accounts, manifests
from scripts.kubernetes.client import Client
from tests.k8s.cluster import Namespace

CHART = Path(__file__).parents[2] / "k8s" / "chart"
CRD = CHART.parent / "manifests" / "crd.yaml"


def rendered(chart: Path = CHART, namespace: str = "team", **values: Any) -> list[dict[str, Any]]:
    values = {"crds": {"enabled": False}, **values}
    files = helm.Chart.load(str(chart)).render(values, name="elastic", namespace=namespace)
    return [body for text in files.values() for body in yaml.safe_load_all(text) if body]


def of(kind: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [body for body in bodies if body["kind"] == kind]


def test_helm_has_nothing_to_say_against_it() -> None:
    report = helm.lint(str(CHART), {"crds": {"enabled": False}}, strict=True)
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 3}, {"replicas": "3"}, {"namespaces": ["Team"]}, {"image": {"tag": "x"}, "x": 1},
        {"crds": {"enable": True}}, {"metrics": {"port": 80}}, {"nodes": {"watch": True}},
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError):
        rendered(**values)


def test_by_default_nothing_is_granted_outside_the_releases_namespace() -> None:
    bodies = rendered(aggregateRoles=False)
    assert {body["kind"] for body in bodies} == {
        "Deployment", "PodDisruptionBudget", "Role", "RoleBinding", "ServiceAccount",
    }  # fmt: skip
    assert {body["metadata"]["namespace"] for body in bodies} == {"team"}
    rules = [rule for role in of("Role", bodies) for rule in role["rules"]]
    assert not [rule for rule in rules if "*" in (*rule["verbs"], *rule["resources"])]
    assert not [rule for rule in rules if "pods/exec" in rule["resources"]]


def test_each_namespace_of_jobs_gets_a_role_and_is_named_to_the_operator() -> None:
    bodies = rendered(namespaces=["a", "b"], replicas=1)
    roles = [(role["metadata"]["namespace"]) for role in of("Role", bodies)]
    assert roles == ["a", "b", "team"]  # the last for its Lease
    for binding in of("RoleBinding", bodies):
        assert binding["subjects"][0]["namespace"] == "team"
    (deployment,) = of("Deployment", bodies)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    args = container["args"]
    named = [args[n + 1] for n, word in enumerate(args) if word == "--namespace"]
    assert named == ["a", "b"]
    assert not of("PodDisruptionBudget", bodies)  # it would keep the only one for ever


def test_nodes_are_its_matter_where_that_is_asked_for_alone() -> None:
    assert not of("ClusterRole", rendered(aggregateRoles=False))
    bodies = rendered(aggregateRoles=False, nodes={"taint": True})
    (role,) = of("ClusterRole", bodies)
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch", "patch"]}
    ]
    (binding,) = of("ClusterRoleBinding", bodies)
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == "elastic-operator"
    (deployment,) = of("Deployment", bodies)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "--allow-node-taint"


def grants(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_it_has_what_it_hands_on_to_masters_who_may_make_pods_that_block_a_deletion() -> None:
    _, role, _ = belongings.account(Owner(namespace="n", name="job", uid="u"))
    handed = grants(role["rules"])
    assert handed <= grants(accounts.operator_rules())
    assert (GROUP, f"{PLURAL}/finalizers", "update") in handed
    pods, quotas, *rest = role["rules"]
    assert (pods["resources"], quotas["resources"]) == (["pods"], ["resourcequotas"])
    assert quotas["verbs"] == ["list", "watch"]
    assert all(rule.get("resourceNames") == ["job"] for rule in rest)


@pytest.mark.parametrize(
    ("resource", "verbs"),
    [
        ("secrets", {"get", "create"}),  # a token is made once, and none is ever listed
        ("configmaps", set()),
        ("services", {"get", "create", "patch"}),
        ("serviceaccounts", {"get", "create", "patch"}),
        ("roles", {"get", "create", "patch"}),
        ("rolebindings", {"get", "create", "patch"}),
        ("pods", {"get", "list", "watch", "create", "delete"}),
    ],
)
def test_it_may_do_what_it_does_and_no_more(resource: str, verbs: set[str]) -> None:
    rules = grants(accounts.operator_rules())
    assert {verb for _, what, verb in rules if what == resource} == verbs


def test_alone_it_looks_after_its_own_namespace() -> None:
    (deployment,) = of("Deployment", rendered())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--health-address", "$(POD_IP)", "--health-port", "8080"]


def test_the_manifests_are_what_the_chart_makes() -> None:
    assert manifests.FILE.read_text() == manifests.text(), "make crd"


def test_with_the_manifests_comes_all_that_comes_with_the_chart() -> None:
    folder = manifests.FILE.parent
    files = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    bodies = [body for name in files for body in yaml.safe_load_all((folder / name).read_text())]
    chart = rendered(namespace=manifests.NAMESPACE, crds={"enabled": True})
    assert names(bodies) == names(chart) | {("Namespace", manifests.NAMESPACE)}


def names(bodies: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(body["kind"], body["metadata"]["name"]) for body in bodies}


def test_the_operator_is_not_root_and_can_change_nothing_in_its_image() -> None:
    (deployment,) = of("Deployment", rendered())
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("keep", [True, False])
def test_the_crd_comes_along_and_stays(keep: bool) -> None:
    crd = yaml.safe_load(CRD.read_text())
    (found,) = of("CustomResourceDefinition", rendered(crds={"enabled": True, "keep": keep}))
    assert found["spec"] == crd["spec"]
    notes = found["metadata"].get("annotations", {})
    assert (notes.get("helm.sh/resource-policy") == "keep") == keep


def test_a_chart_without_its_crd_says_so(tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "chart")
    (chart / "files" / "crd.yaml").unlink()
    with pytest.raises(helm.HelmRenderError, match="make crd"):
        rendered(chart, crds={"enabled": True})


PATHS = {
    "Deployment": "deployments",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "ServiceAccount": "serviceaccounts",
}


def chart_for(client: Client, folder: Path) -> Path:
    """The chart, as Helm would ask that server whether it has policy/v1: the engine here asks none, and says yes."""
    chart = Path(shutil.copytree(CHART, folder / "chart"))
    versions = {
        one["groupVersion"] for group in client.get("/apis")["groups"] for one in group["versions"]
    }
    template = chart / "templates" / "operator.yaml"
    asked = '.Capabilities.APIVersions.Has "policy/v1"'
    assert template.read_text().count(asked) == 1
    template.write_text(template.read_text().replace(asked, str("policy/v1" in versions).lower()))
    return chart


@pytest.mark.xdist_group("kubernetes")
def test_a_real_server_takes_its_objects(namespace: Namespace, tmp_path: Path) -> None:
    bodies = rendered(chart_for(namespace.client, tmp_path), namespace=namespace.name)
    assert {*PATHS, "ClusterRole"} == {body["kind"] for body in bodies}
    for body in bodies:
        version = body["apiVersion"]
        group = "/api/v1" if version == "v1" else f"/apis/{version}"
        if body["kind"] == "ClusterRole":
            path = f"{group}/clusterroles"
        else:
            path = namespace.path(PATHS[body["kind"]], group=group)
        answered = namespace.client.call("POST", path, body, query={"dryRun": "All"})
        assert lost(body, answered) == []

"""Manifests of a job's pods and of what it has beside them; a real API server takes each."""

import re
from decimal import Decimal
from typing import Any

import pytest

from elastic.k8s import belongings, pods
from elastic.k8s.pods import Owner
from elastic.k8s.rules import violations
from elastic.k8s.spec import Spec, read
from elastic.k8s.supply import New
from elastic.k8s.template import QUANTITY, amount
from scripts.kubernetes.client import Client
from tests.k8s.cluster import Namespace

OWNER = Owner(namespace="space", name="job", uid="the-uid")
NEW = New(slot=2, attempt=5)
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def spec(**more: Any) -> Spec:
    return read({"image": "i", "worker": {"replicas": 4}, "elastic": {"min": 2, "max": 8}, **more})


def worker(of: Spec, *avoid: str) -> dict[str, Any]:
    return pods.worker(OWNER, of, NEW, avoid)


def environment(pod: dict[str, Any]) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_a_worker_is_the_jobs_and_has_no_rights() -> None:
    made = worker(spec())
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("the-uid", True)
    assert made["metadata"]["name"] == "job-worker-2-r5"
    assert made["metadata"]["labels"] == {
        "elastic-runtime.dev/job": "job",
        "elastic-runtime.dev/job-uid": "the-uid",
        "elastic-runtime.dev/role": "worker",
    }
    assert made["spec"]["automountServiceAccountToken"] is False
    assert made["spec"]["restartPolicy"] == "Never"


def test_what_a_pasted_torchrun_command_reads() -> None:
    assert environment(worker(spec(nprocPerNode=8))) == {
        "ELASTIC_POD_JOB": "job",
        "ELASTIC_POD_NAME": "job-worker-2-r5",
        "ELASTIC_POD_MASTER": "job-master:29400",
        "ELASTIC_POD_NODES": "2:8",
        "PET_NPROC_PER_NODE": "8",
        "WORLD_SIZE": "4",
        "RANK": "2",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "job-master",
        "MASTER_PORT": "29400",
    }


@pytest.mark.parametrize(
    ("asked", "limits", "count"),
    [
        ("auto", {}, 1),
        ("auto", {"nvidia.com/gpu": "8"}, 8),
        ("gpu", {"amd.com/gpu": 4}, 4),
        ("cpu", {"nvidia.com/gpu": "8"}, 1),
        (3, {"nvidia.com/gpu": "8"}, 3),
        ("2", {}, 2),
        ("gpu", {"nvidia.com/gpu": "8e0"}, 8),
        ("gpu", {"nvidia.com/gpu": "1k"}, 1000),
    ],
)
def test_ranks_of_a_node(asked: int | str, limits: dict[str, Any], count: int) -> None:
    container = {"name": "main", "image": "i", "resources": {"limits": limits}}
    template = {"spec": {"containers": [{"name": "side", "image": "s"}, container]}}
    given = read({"nprocPerNode": asked, "worker": {"template": template}})
    assert pods.ranks(given) == count


def test_a_template_stays_what_it_was_and_its_main_container_gets_ours() -> None:
    side = {"name": "side", "image": "s"}
    main = {"name": "main", "image": "i", "env": [{"name": "A", "value": "b"}]}
    template = {
        "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
        "spec": {"containers": [side, main], "terminationGracePeriodSeconds": 600},
    }
    given = read({"worker": {"template": template}})
    made = worker(given)
    assert given.worker.template == {
        "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
        "spec": {"containers": [side, main], "terminationGracePeriodSeconds": 600},
    }
    assert made["metadata"]["labels"]["team"] == "x"
    assert made["metadata"]["annotations"] == {"note": "y"}
    assert made["spec"]["containers"][0] == side
    assert made["spec"]["containers"][1]["env"][0] == {"name": "A", "value": "b"}
    assert made["spec"]["terminationGracePeriodSeconds"] == 600
    assert worker(spec())["spec"]["terminationGracePeriodSeconds"] == 150


def test_shared_memory_comes_along_unless_it_is_there() -> None:
    made = worker(spec())
    assert made["spec"]["volumes"] == [{"name": "elastic-shm", "emptyDir": {"medium": "Memory"}}]
    mount = {"name": "mine", "mountPath": "/dev/shm/"}
    container = {"name": "main", "image": "i", "volumeMounts": [mount]}
    mine = read({"worker": {"template": {"spec": {"containers": [container]}}}})
    assert worker(mine)["spec"]["containers"][0]["volumeMounts"] == [mount]
    assert "volumes" not in worker(mine)["spec"]


def test_snapshots_are_counted_into_the_pods_memory() -> None:
    resources = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "1.5G"}}
    container = {"name": "main", "image": "i", "resources": resources}
    template = {"spec": {"containers": [container]}}
    given = read({"worker": {"template": template}, "flashCheckpoint": {"memory": "512Mi"}})
    found = worker(given)["spec"]["containers"][0]["resources"]
    assert found["requests"] == {"cpu": "2", "memory": str((1 << 30) + (512 << 20))}
    assert found["limits"] == {"memory": str(1_500_000_000 + (512 << 20))}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1500m", "1.5"), ("3u", "0.000003"), ("2n", "2e-9"), ("1k", "1000"), ("1E", "1e18"), ("1e9", "1e9"),
        ("1E3", "1000"), ("5e-1", "0.5"), ("+1Gi", "1073741824"), (".5", "0.5"), ("1.", "1"), (0.5, "0.5"), (8, "8"),
        ("1Ki", "1024"), ("2Ei", "2305843009213693952"),
    ],
)  # fmt: skip
def test_quantities(text: str | float, number: str) -> None:
    assert re.fullmatch(QUANTITY, str(text))
    assert amount(text) == Decimal(number)


@pytest.mark.parametrize("text", ["64gb", "1.5.5Gi", "", "x", "Gi", ".", "1 Gi", "1e999999999"])
def test_no_quantity(text: str) -> None:
    assert not re.fullmatch(QUANTITY, text)


@pytest.mark.parametrize("affinity", [{"nodeAffinity": None}, {"nodeAffinity": {REQUIRED: None}}])
@pytest.mark.parametrize("where", ["scheduling", "template"])
def test_null_is_nothing_said(where: str, affinity: dict[str, Any]) -> None:
    container: dict[str, Any] = {"name": "main", "image": "i", "volumeMounts": None}
    nothing = dict.fromkeys(("tolerations", "volumes", "nodeSelector", "affinity"))
    pod: dict[str, Any] = {"containers": [container], **nothing}
    if where == "template":
        pod |= {"affinity": affinity}
    template: dict[str, Any] = {"metadata": {"labels": None, "annotations": None}, "spec": pod}
    scheduling = {"affinity": affinity} if where == "scheduling" else {}
    raw = {"worker": {"template": template}, "scheduling": scheduling}
    assert violations("job", raw) == ()
    made = worker(read(raw), "n1")
    (term,) = made["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term["matchFields"][0]["values"] == ["n1"]


def test_it_keeps_away_from_nodes_whatever_else_it_asks_for() -> None:
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}]
    wanted = {"nodeSelectorTerms": terms}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": wanted}}
    made = worker(spec(scheduling={"affinity": affinity}), "n1", "n2")
    found = made["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    away = [
        {"key": "metadata.name", "operator": "NotIn", "values": ["n1"]},
        {"key": "metadata.name", "operator": "NotIn", "values": ["n2"]},
    ]
    assert [term["matchFields"] for term in found["nodeSelectorTerms"]] == [away, away]
    assert terms == [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}]
    assert "affinity" not in worker(spec())["spec"]


def test_a_node_that_does_not_answer_is_left_soon() -> None:
    (mine, *ours) = worker(spec(scheduling={"tolerations": [{"key": "gpu"}]}))["spec"][
        "tolerations"
    ]
    assert mine == {"key": "gpu"}
    assert {(one["key"], one["tolerationSeconds"]) for one in ours} == {
        ("node.kubernetes.io/not-ready", 30),
        ("node.kubernetes.io/unreachable", 30),
    }


@pytest.mark.parametrize(
    ("provider", "labels", "notes", "scheduler"),
    [
        ("Volcano", {}, {"scheduling.k8s.io/group-name": "job"}, "volcano"),
        (
            "Coscheduling",
            {"scheduling.x-k8s.io/pod-group": "job"},
            {},
            "scheduler-plugins-scheduler",
        ),
        (
            "Kueue",
            {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/pod-group-name": "job"},
            {"kueue.x-k8s.io/pod-group-total-count": "5"},
            None,
        ),
    ],
)
def test_gangs(
    provider: str, labels: dict[str, str], notes: dict[str, str], scheduler: str | None
) -> None:
    scheduling = {"queue": "q", "gang": {"provider": provider}}
    given = spec(scheduling=scheduling, hotSpares={"count": 1})
    made = worker(given)
    assert labels.items() <= made["metadata"]["labels"].items()
    assert made["metadata"].get("annotations", {}) == notes
    assert made["spec"].get("schedulerName") == scheduler
    group = belongings.pod_group(OWNER, given)
    assert (None if group is None else group["spec"]["minMember"]) == (
        None if provider == "Kueue" else 2
    )


def test_a_master_runs_in_the_training_image_and_is_restarted_in_place() -> None:
    made = pods.master(OWNER, spec(master={"storageClaim": "disk"}), 3)
    assert made["metadata"]["name"] == "job-master-r3"
    assert made["spec"]["restartPolicy"] == "OnFailure"
    assert made["spec"]["terminationGracePeriodSeconds"] == 150, "drainSeconds and 30"
    assert made["spec"]["serviceAccountName"] == "job-master"
    assert made["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}
    (container,) = made["spec"]["containers"]
    assert container["image"] == "i"
    assert (
        belongings.service(OWNER)["spec"]["selector"].items() <= made["metadata"]["labels"].items()
    )


def test_a_master_is_let_in_where_the_job_is() -> None:
    """Also in a namespace whose pods must be `restricted`."""
    restricted = {
        "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"}, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    beside = {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], "add": ["X"]}}
    container = {"name": "main", "image": "i", "securityContext": restricted | beside}
    toleration = {"key": "gpu", "operator": "Exists"}
    scheduling = {
        "tolerations": [toleration], "priorityClassName": "high", "nodeSelector": {"gpu": "yes"},
    }  # fmt: skip
    template = {"spec": {"containers": [container]}}
    given = read({"worker": {"template": template}, "scheduling": scheduling})
    pod = pods.master(OWNER, given, 1)["spec"]
    assert pod["containers"][0]["securityContext"] == restricted
    assert pod["tolerations"][0] == toleration
    assert pod["priorityClassName"] == "high"
    assert "nodeSelector" not in pod
    assert "securityContext" not in pods.master(OWNER, spec(), 1)["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("said", "policy"), [({}, "ClusterFirstWithHostNet"), ({"dnsPolicy": "Default"}, "Default")]
)
def test_a_pod_on_its_nodes_network_finds_the_master(said: dict[str, str], policy: str) -> None:
    pod = {"hostNetwork": True, "containers": [{"name": "main", "image": "i"}], **said}
    made = worker(read({"worker": {"template": {"spec": pod}}}))
    assert made["spec"]["dnsPolicy"] == policy


def test_no_budget_where_none_is_wanted() -> None:
    assert belongings.budget(OWNER, spec(worker={"disruptionBudget": "None"})) is None


SPECS = [
    spec(),
    spec(
        nprocPerNode=2,
        flashCheckpoint={"memory": "1Gi"},
        scheduling={"queue": "q", "gang": {"provider": "Kueue"}, "nodeSelector": {"a": "b"}},
    ),
]


@pytest.mark.parametrize("given", SPECS)
def test_a_real_server_takes_each(given: Spec, kube: Client, namespace: Namespace) -> None:
    owner = Owner(namespace=namespace.name, name="job", uid="the-uid")
    core = f"/api/v1/namespaces/{namespace.name}"
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace.name}"
    policy = f"/apis/policy/v1beta1/namespaces/{namespace.name}"
    account, role, binding = belongings.account(owner)
    budget = belongings.budget(owner, given, "policy/v1beta1")
    assert budget is not None
    for path, body in (
        (f"{core}/secrets", belongings.token(owner, "secret")),
        (f"{core}/services", belongings.service(owner)),
        (f"{core}/serviceaccounts", account),
        (f"{rbac}/roles", role),
        (f"{rbac}/rolebindings", binding),
        (f"{policy}/poddisruptionbudgets", budget),
        (f"{core}/pods", pods.master(owner, given, 1)),
        (f"{core}/pods", pods.worker(owner, given, NEW, ("n1", "n2"))),
    ):
        made = kube.create(path, body)
        assert made["metadata"]["ownerReferences"] == body["metadata"]["ownerReferences"]


@pytest.mark.parametrize(
    "affinity",
    [
        {"nodeAffinity": None},
        {"nodeAffinity": {pods.REQUIRED: None}},
        {"nodeAffinity": {pods.REQUIRED: {"nodeSelectorTerms": [{"matchFields": None}]}}},
    ],
)
def test_it_keeps_away_from_nodes_where_nothing_is_asked_for(affinity: dict[str, Any]) -> None:
    made = worker(spec(scheduling={"affinity": affinity}), "n1")
    (term,) = made["spec"]["affinity"]["nodeAffinity"][pods.REQUIRED]["nodeSelectorTerms"]
    assert [one["values"] for one in term["matchFields"]] == [["n1"]]

"""Flags and a torchrun command, as a resource."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.k8s import submission
from elastic.k8s.submission import LONGEST, Nodes, Submission, Volume, lost, made_name, manifest
from elastic.proto.errors import UsageError

COMMAND = ("torchrun", "--nproc-per-node", "8", "train.py", "--lr", "0.1")


def submitted(**settings: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "name": "demo", "image": "team/image:1", "command": COMMAND,
        "nodes": Nodes(least=2, most=4),
    }  # fmt: skip
    return manifest(Submission(**{**given, **settings}), "team")


@pytest.mark.parametrize(
    "launcher", ["torchrun", "/opt/bin/torchrun", "python -m torch.distributed.run"]
)
def test_elastic_run_takes_torchruns_place_and_the_rest_stays(launcher: str) -> None:
    words = ("--nproc-per-node", "8", "train.py", "torchrun")
    assert submission.launched((*launcher.split(), *words)) == ("elastic-run", *words)


@pytest.mark.parametrize("command", [(), ("python", "torchrun"), ("bash", "-c", "torchrun x")])
def test_other_commands_stay_as_they_are(command: tuple[str, ...]) -> None:
    assert submission.launched(command) == command


def test_the_command_stays_as_it_was_written() -> None:
    body = submitted()
    assert body["metadata"] == {"name": "demo", "namespace": "team"}
    (container,) = body["spec"]["worker"]["template"]["spec"]["containers"]
    assert container == {
        "name": "main",
        "image": "team/image:1",
        "command": ["elastic-run", *COMMAND[1:]],
    }
    assert body["spec"]["elastic"] == {"min": 2, "max": 4, "nodeUnit": 1}
    assert body["spec"]["worker"]["replicas"] == 4
    assert "scheduling" not in body["spec"]


def test_what_flags_say_is_where_kubernetes_has_it() -> None:
    body = submitted(
        gpus=8,
        cpus="16",
        memory="64Gi",
        nproc_per_node="8",
        spares=1,
        priority="high",
        gang="Kueue",
        queue="research",
        env=(("NCCL_DEBUG", "INFO"),),
        volumes=(
            Volume(source="data", path="/data", read_only=True),
            Volume(source="/scratch", path="/tmp/x"),
        ),
        workdir="/code",
        suspended=True,
    )
    spec = body["spec"]
    assert spec["scheduling"] == {
        "queue": "research", "priorityClassName": "high", "gang": {"provider": "Kueue"},
    }  # fmt: skip
    assert (spec["nprocPerNode"], spec["hotSpares"], spec["suspend"]) == ("8", {"count": 1}, True)
    pod = spec["worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "16", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "8"},
    }
    assert container["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]
    assert container["workingDir"] == "/code"
    assert container["volumeMounts"] == [
        {"name": "volume-0", "mountPath": "/data", "readOnly": True},
        {"name": "volume-1", "mountPath": "/tmp/x", "readOnly": False},
    ]
    assert pod["volumes"] == [
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        {"name": "volume-1", "hostPath": {"path": "/scratch"}},
    ]


@pytest.mark.parametrize(("text", "least", "most"), [("4", 4, 4), ("2:8", 2, 8), ("1:1", 1, 1)])
def test_nodes_are_a_number_or_a_range(text: str, least: int, most: int) -> None:
    assert Nodes.read(text) == Nodes(least=least, most=most)


@pytest.mark.parametrize("text", ["", "0", "-1", "4:", ":4", "8:2", "0:2", "a", "1:2:3", "1.5"])
def test_what_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        Nodes.read(text)


@pytest.mark.parametrize("text", ["", "data", "data:", "data:relative", ":/x", "data:/x:rx"])
def test_what_is_no_volume_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--volume"):
        Volume.read(text)


def test_volumes_are_claims_or_paths() -> None:
    assert Volume.read("data:/d:ro") == Volume(source="data", path="/d", read_only=True)
    assert Volume.read("/a:/b") == Volume(source="/a", path="/b")


@pytest.mark.parametrize("text", ["", "X", "=1", "1X=2", "A B=1"])
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--env"):
        submission.variable(text)


def test_a_variable_may_hold_anything() -> None:
    assert submission.variable("A=b=c d") == ("A", "b=c d")
    assert submission.variable("A=") == ("A", "")


@pytest.mark.parametrize(
    ("gang", "queue", "words"),
    [
        ("", "q", "--queue q: whose it is"), ("Coscheduling", "q", "--queue q: whose it is"),
        ("Kueue", "", "--gang Kueue needs a --queue"),
    ],
)  # fmt: skip
def test_a_queue_is_somebodys(gang: str, queue: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        submitted(gang=gang, queue=queue)
    assert submitted(gang="Coscheduling")["spec"]["scheduling"] == {
        "gang": {"provider": "Coscheduling"}
    }


def test_a_variable_is_given_once() -> None:
    assert submission.variables(["A=1", "B=1"]) == (("A", "1"), ("B", "1"))
    with pytest.raises(UsageError, match="--env A is there 2 times"):
        submission.variables(["A=1", "B=1", "A=2"])


@pytest.mark.parametrize("text", ["x", "8 Gi", "-1", "8GB", "Gi", "1e999"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        submission.quantity("--memory", text)


@pytest.mark.parametrize("name", ["Demo", "1a", "a-", "a_b", "a" * (LONGEST + 1), "é"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        submitted(name=name)


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        (COMMAND, "train"),
        (("torchrun", "-m", "elastic.trainer.pretrain_gpt", "--lr", "1"), "pretrain-gpt"),
        (("python", "/code/My Train.py"), "my-train"),
        (("bash", "-c", "true"), "job"),
        (("x", "123.py"), "job"),
        ((), "job"),
    ],
)
def test_a_name_is_made_from_the_script(command: tuple[str, ...], stem: str) -> None:
    assert re.fullmatch(f"{stem}-[a-z0-9]{{5}}", made_name(command))


@given(st.lists(st.text(max_size=60).map(lambda text: f"{text}.py"), max_size=2))
def test_whatever_the_script_is_called_the_name_is_a_legal_one(command: list[str]) -> None:
    assert submitted(name="", command=tuple(command))["metadata"]["name"]


def test_fields_that_the_server_dropped_are_named() -> None:
    asked = {"a": 1, "b": {"c": 1, "d": [{"e": 1}, {"f": 2}]}, "g": None}
    assert lost(asked, asked, "spec") == []
    got = {"a": 2, "b": {"d": [{"e": 1, "x": 1}, {}]}, "g": None, "more": 1}
    assert sorted(lost(asked, got, "spec")) == ["spec.b.c", "spec.b.d[1].f"]
    assert lost({"a": None, "b": [{"c": None}]}, {"b": [{}]}, "spec") == []

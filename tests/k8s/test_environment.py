"""What a container's manifest makes of its environment: pure."""

import base64

import pytest

from scripts.kubernetes.environment import ConfigError, command, entries, environment, expand, field
from scripts.kubernetes.images import pull_error
from tests.k8s.cluster import Object

POD: Object = {
    "metadata": {"name": "p", "namespace": "n", "labels": {"a/b": "c"}, "annotations": {}},
    "spec": {"nodeName": "node", "serviceAccountName": "account"},
}
STORED: dict[tuple[str, str], Object] = {
    ("secrets", "s"): {"data": {"k": base64.b64encode(b"v").decode()}},
    ("configmaps", "m"): {"data": {"k": "w", "l": "x"}},
}


def lookup(plural: str, name: str) -> Object | None:
    return STORED.get((plural, name))


def made(container: Object) -> dict[str, str]:
    return environment(POD, container, base={"PATH": "/bin"}, address="127.0.0.9", lookup=lookup)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("$(A)", "1"),
        ("$$(A)", "$(A)"),
        ("$(B)", "$(B)"),
        ("$A $$", "$A $"),
        ("x$(A)y$(A)", "x1y1"),
    ],
)
def test_expansion(text: str, wanted: str) -> None:
    assert expand(text, {"A": "1"}) == wanted


def test_later_names_see_earlier_ones_and_win() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)2"},
        {"name": "PATH", "value": "/x"},
    ]
    assert made({"name": "c", "env": env}) == {"PATH": "/x", "A": "1", "B": "12"}


def test_all_of_a_map_under_a_prefix() -> None:
    sources = [{"configMapRef": {"name": "m"}, "prefix": "M_"}, {"secretRef": {"name": "s"}}]
    assert made({"name": "c", "envFrom": sources}) == {
        "PATH": "/bin", "M_k": "w", "M_l": "x", "k": "v",
    }  # fmt: skip


def test_optional_sources_may_be_missing() -> None:
    optional = {"secretKeyRef": {"name": "s", "key": "other", "optional": True}}
    assert made({"name": "c", "env": [{"name": "A", "valueFrom": optional}]}) == {"PATH": "/bin"}
    assert entries("secrets", {"name": "none", "optional": True}, lookup) == {}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"secretKeyRef": {"name": "none", "key": "k"}}, 'secret "none" not found'),
        ({"secretKeyRef": {"name": "s", "key": "no"}}, "couldn't find key no in secret n/s"),
        ({"fieldRef": {"fieldPath": "spec.none"}}, "finds no field spec.none"),
    ],
)
def test_a_missing_source_is_named(source: Object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made({"name": "c", "env": [{"name": "A", "valueFrom": source}]})


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("metadata.name", "p"),
        ("metadata.labels['a/b']", "c"),
        ("metadata.annotations['none']", ""),
        ("spec.nodeName", "node"),
        ("status.podIP", "127.0.0.9"),
    ],
)
def test_fields(path: str, wanted: str) -> None:
    assert field(POD, path, "127.0.0.9") == wanted


@pytest.mark.parametrize(
    ("limit", "divisor", "wanted"),
    [("1Gi", "1Mi", "1024"), ("1500m", "1", "2"), ("2", "1m", "2000")],
)
def test_resources_are_rounded_up(limit: str, divisor: str, wanted: str) -> None:
    reference = {"resource": "limits.x", "divisor": divisor}
    env = [{"name": "A", "valueFrom": {"resourceFieldRef": reference}}]
    assert made({"name": "c", "env": env, "resources": {"limits": {"x": limit}}})["A"] == wanted


def test_a_command_and_its_arguments() -> None:
    container = {"name": "c", "command": ["a", "$(B)"], "args": ["$(B)"]}
    assert command(container, {"B": "b"}) == ["a", "b", "b"]
    with pytest.raises(ConfigError, match="container c: no command specified"):
        command({"name": "c"}, {})


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("local", None),
        ("registry.example:5000/a/b:1.0", None),
        ("bad.invalid/x", "ErrImagePull"),
        ("bad.invalid/denied/x", "ErrImagePull"),
        ("Upper", "InvalidImageName"),
        ("a b", "InvalidImageName"),
        ("a:b:", "InvalidImageName"),
    ],
)
def test_images(image: str, reason: str | None) -> None:
    error = pull_error(image)
    assert (error[0] if error else None) == reason

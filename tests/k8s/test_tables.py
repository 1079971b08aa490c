"""What kubectl would print."""

from scripts.kubernetes.tables import get, text
from tests.k8s.cluster import Namespace


def test_a_kinds_own_columns(namespace: Namespace) -> None:
    namespace.client.create(
        namespace.path("configmaps"), {"metadata": {"name": "some"}, "data": {"a": "", "b": ""}}
    )
    heading, row = get(namespace.client, namespace.path("configmaps"))
    assert heading == ["NAME", "DATA", "AGE"]
    assert row[:2] == ["some", "2"]


def test_columns_stand_below_one_another() -> None:
    assert text([["NAME", "A"], ["x", "yes"], ["longer", ""]]) == "NAME     A\nx        yes\nlonger"

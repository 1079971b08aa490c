"""docs/kubernetes-operations.md: every reason that the code can give is on it."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import elastic.k8s
from elastic.k8s.kernel.health import Cache, Health
from elastic.proto import ending

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes-operations.md").read_text()
NAMED = frozenset(re.findall(r"`(\w+)`", PAGE))


def words() -> Iterator[str]:
    """Of every enumeration of words in k8s/, and of how a launcher ends."""
    yield from (str(one) for one in ending.Ended)
    for module in pkgutil.walk_packages(elastic.k8s.__path__, "elastic.k8s."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, StrEnum):
                yield from (str(one) for one in value)


def test_every_reason_is_on_the_page() -> None:
    found = set(words())
    assert {"UserError", "ReplacePodAvoidNode"} <= found
    assert found <= NAMED, f"say what they mean and what to do: {sorted(found - NAMED)}"


def test_every_metric_is_on_the_page() -> None:
    health = Health("x")
    health.watch_cache("pods", Cache(synced=lambda: True, heard=lambda: 0.0))
    metrics = re.findall(r"# TYPE x_(\w+)", health.metrics(0.0))
    assert len(metrics) > 3
    assert {name for name in metrics if f"`{name}" not in PAGE} == set()

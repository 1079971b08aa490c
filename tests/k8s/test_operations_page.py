"""docs/kubernetes-operations.md: every reason that the code can give is on it."""

import asyncio
import importlib
import pkgutil
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import elastic.k8s
from elastic.k8s.kernel.health import Health
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.operator import Operator
from elastic.proto import ending
from tests.k8s.fake.server import serve

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


async def metrics() -> str:
    """Of an operator that has begun nothing yet."""
    health = Health("x")
    async with serve() as server, server.api() as api:
        Operator(api, ["space"], Lease(api, "space", "lease", "one"), health)
        return health.metrics(0.0)


def test_the_page_has_each_metric_of_the_operator_and_no_other() -> None:
    _, _, table = PAGE.partition("| metric | meaning |")
    listed = re.findall(r"^\| `(\w+)", table.partition("\n\n")[0], re.MULTILINE)
    assert "workqueue_depth" in listed, "as client-go names it"
    assert sorted(listed) == sorted(re.findall(r"# TYPE x_(\w+)", asyncio.run(metrics())))

"""Nodes that are tainted for a fault of their hardware: tables, any history, and a real API server under the chart's role."""

import asyncio
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s import tainting
from elastic.k8s.jobs import Job
from elastic.k8s.kernel.api import Api
from elastic.k8s.pods import Owner
from elastic.k8s.tainter import Tainter
from elastic.k8s.tainting import KEY, UNTIL, Change, Node, decide
from elastic.proto.elasticjob import AvoidedNode, JobState
from scripts.kubernetes.accounts import RBAC
from scripts.kubernetes.client import CORE
from scripts.kubernetes.server import account_kubeconfig
from tests.k8s.cluster import Namespace
from tests.k8s.test_chart import rendered
from tests.waiting import wait_for

NOW = 1000.0
OTHER = {"key": "dedicated", "value": "team", "effect": "NoSchedule"}
OURS = {"key": KEY, "value": "HardwareFault", "effect": "NoSchedule"}
TEN = tuple(Node(name=f"n{number}", version="1") for number in range(10))


def avoided(
    node: str = "n1", cause: str = "HardwareFault", until: float = NOW + 100
) -> AvoidedNode:
    return AvoidedNode(node=node, cause=cause, reason="an Xid", since=NOW - 10, until=until)


def nodes(**first: Any) -> tuple[Node, ...]:
    """Ten, of which n1 is like that."""
    return tuple(replace(one, **first) if one.name == "n1" else one for one in TEN)


@pytest.mark.parametrize(
    ("found", "seen", "taints", "until"),
    [
        ([avoided()], nodes(taints=(OTHER,)), (OTHER, OURS), NOW + 100),
        ([avoided(), avoided(until=NOW + 200)], nodes(), (OURS,), NOW + 200),
        ([avoided(until=NOW + 10**6)], nodes(), (OURS,), NOW - 10 + tainting.LONGEST),
        ([avoided(until=NOW + 200)], nodes(taints=(OURS,), until=NOW + 100), (OURS,), NOW + 200),
        ([avoided()], nodes(until=NOW - 1), (OURS,), NOW + 100),
        ([avoided()], nodes(until=NOW + 50), (OURS,), NOW + 100),
        ([], nodes(taints=(OURS, OTHER), until=NOW), (OTHER,), None),
        ([avoided(until=NOW)], nodes(taints=(OURS,), until=NOW), (), None),
    ],
    ids=["new", "the longest", "not for ever", "longer", "again", "a later fault", "over", "its end"],
)  # fmt: skip
def test_a_change(
    found: list[AvoidedNode], seen: tuple[Node, ...], taints: tuple[Any, ...], until: float | None
) -> None:
    (change,) = decide(found, seen, NOW)
    assert (change.node.name, change.taints, change.until) == ("n1", taints, until)


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        ([avoided(cause="NodeLost")], nodes()),
        ([avoided(node="gone")], nodes()),
        ([avoided()], nodes(taints=(OURS,), until=NOW + 100)),
        ([avoided()], nodes(until=NOW + 100)),
        ([avoided()], nodes(taints=(OURS,))),
        ([], nodes(taints=(OURS,))),
        ([], nodes(taints=(OURS,), until=NOW + 1)),
        ([avoided()], ()),
    ],
    ids=[
        "no hardware", "no such node", "done", "somebody took it away", "somebody else's",
        "somebody else's for ever", "the job is gone", "no nodes",
    ],
)  # fmt: skip
def test_no_change(found: list[AvoidedNode], seen: tuple[Node, ...]) -> None:
    assert decide(found, seen, NOW) == ()


def tainted(change: Change) -> Node:
    """As it is read once the change is written."""
    found = tainting.patch(change)
    return tainting.node({**found, "metadata": {**found["metadata"], "name": change.node.name}})


@pytest.mark.parametrize("more", [100.3, 100.7])
def test_a_taint_is_written_once_and_not_again_once_somebody_took_it_away(more: float) -> None:
    found = [avoided(until=NOW + more)]
    (change,) = decide(found, nodes(), NOW)
    read, others = tainted(change), [one for one in nodes() if one.name != change.node.name]
    assert decide(found, (read, *others), NOW) == ()
    assert decide(found, (replace(read, taints=()), *others), NOW) == ()


@pytest.mark.parametrize("said", ["nan", "inf", "-inf", "soon"])
def test_a_time_that_is_none_is_over(said: str) -> None:
    raw = {"metadata": {"name": "n1", "annotations": {tainting.UNTIL: said}}}
    assert tainting.node(raw).until == 0.0


@settings(max_examples=80, deadline=None)
@given(
    told=st.lists(st.tuples(st.integers(0, 11), st.floats(-50, 500)), max_size=12),
    ours=st.dictionaries(st.integers(0, 9), st.floats(-50, 500), max_size=4),
    theirs=st.sets(st.integers(0, 9), max_size=3),
)
def test_never_too_many_never_anothers_and_once_is_enough(
    told: list[tuple[int, float]], ours: dict[int, float], theirs: set[int]
) -> None:
    found = [avoided(f"n{number}", until=NOW + more) for number, more in told]
    seen = {
        one.name: replace(
            one,
            taints=(OURS,) if number in ours or number in theirs else (),
            until=NOW + ours[number] if number in ours else None,
        )
        for number, one in enumerate(TEN)
    }
    before = {name for name, one in seen.items() if (one.until or 0.0) > NOW}
    for change in decide(found, tuple(seen.values()), NOW):
        name = change.node.name
        assert name not in {f"n{number}" for number in theirs - ours.keys()}
        seen[name] = tainted(change)
    after = {name for name, one in seen.items() if (one.until or 0.0) > NOW}
    assert len(after) <= max(1, len(before))
    assert decide(found, tuple(seen.values()), NOW) == ()


def test_under_the_role_that_the_chart_adds(
    namespace: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One write of a taint, and one of its end."""
    client, name = namespace.client, f"node-{uuid.uuid4().hex[:8]}"
    namespace.allow("elastic-operator")
    for made in rendered(namespace=namespace.name, aggregateRoles=False, nodes={"taint": True}):
        if made["kind"].startswith("ClusterRole"):
            client.create(f"{RBAC}/{made['kind'].lower()}s", made)
    taints = [OTHER]
    client.create(f"{CORE}/nodes", {"metadata": {"name": name}, "spec": {"taints": taints}})
    config = tmp_path / "config"
    account_kubeconfig(namespace.kubeconfig, namespace.name, "elastic-operator", config)

    def job(until: float) -> Job:
        fault = AvoidedNode(
            node=name, cause="HardwareFault", reason="an Xid", since=time.time(), until=until
        )
        state = JobState(generation=1, attempt=1, state="Running", avoided_nodes=(fault,))
        owner = Owner(namespace=namespace.name, name="job", uid="u")
        return Job(owner=owner, version="1", generation=1, spec={}, state=state)

    def now() -> tuple[list[Any], bool]:
        raw = client.get(f"{CORE}/nodes/{name}")
        mine = [one for one in raw["spec"].get("taints", []) if not one["key"].startswith("node.")]
        return mine, UNTIL in raw["metadata"].get("annotations", {})

    async def until(what: str, wanted: tuple[list[Any], bool]) -> None:
        await asyncio.to_thread(wait_for, what, lambda: now() == wanted)

    async def body() -> None:
        async with await Api.connect(kubeconfig=str(config)) as api:
            working = asyncio.create_task(
                Tainter(api, [[job(time.time() + 3), None]], lambda: True).run()
            )
            try:
                await until("it is tainted", ([OTHER, OURS], True))
                await until("its time is over", ([OTHER], False))
            finally:
                working.cancel()
                await asyncio.wait([working])

    try:
        asyncio.run(body())
        writes = [one.getMessage() for one in caplog.records if one.name == "elastic.k8s.tainter"]
        assert [text.split(": ")[:2] for text in writes] == [
            [f"node {name}", "tainted"], [f"node {name}", "its time is over"],
        ]  # fmt: skip
    finally:
        client.delete(f"{CORE}/nodes/{name}")

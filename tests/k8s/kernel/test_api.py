"""Calls: errors in the server's words, credentials, and the way to a cluster."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.k8s.kernel import connection, errors
from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.errors import NoCluster, Unauthorized, Unreachable, from_answer
from elastic.k8s.kernel.pacing import Pace
from elastic.k8s.kernel.resources import LEASES, NODES, PODS
from elastic.proto.errors import UsageError
from tests.k8s import virtual
from tests.k8s.fake.server import serve


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.Invalid), (401, errors.Unauthorized), (403, errors.Forbidden),
        (404, errors.Absent), (409, errors.Conflict), (410, errors.Gone), (422, errors.Invalid),
        (429, errors.Busy), (500, errors.Broken), (503, errors.Broken), (418, errors.ApiError),
    ],
)  # fmt: skip
def test_an_error_has_its_type_and_the_servers_words(
    status: int, kind: type[errors.ApiError]
) -> None:
    body = b'{"kind": "Status", "reason": "Why", "message": "no pods today", "code": 1}'
    error = from_answer(status, body, {"Retry-After": "7"})
    assert type(error) is kind
    assert (str(error), error.status, error.retry_after) == ("no pods today", status, 7.0)


@pytest.mark.parametrize("body", [b"", b"<html>bad gateway</html>", b"[1]", b"\xff"])
def test_an_answer_that_is_no_status_is_told_too(body: bytes) -> None:
    error = from_answer(502, body, {})
    assert type(error) is errors.Broken
    assert str(error)
    assert error.retry_after is None


def test_paths_are_the_apis() -> None:
    assert PODS.path("a", "b", "status") == "/api/v1/namespaces/a/pods/b/status"
    assert PODS.path() == "/api/v1/pods"
    assert NODES.path("a", "b") == "/api/v1/nodes/b"
    assert LEASES.path("a") == "/apis/coordination.k8s.io/v1/namespaces/a/leases"
    assert PODS.path("a", "../x") == "/api/v1/namespaces/a/pods/..%2Fx"


@pytest.mark.parametrize("name", [".", ".."])
def test_a_step_in_a_path_is_no_name(name: str) -> None:
    """A client resolves it: a DELETE of `pods/.` is one of all pods."""
    with pytest.raises(UsageError, match="is no name"):
        PODS.path("a", name)
    with pytest.raises(UsageError, match="is no name"):
        PODS.path(name)


def test_a_list_that_changed_between_its_pages_is_gone_and_a_whole_one_is_whole() -> None:
    async def main() -> None:
        async with serve(page=1) as server, server.api() as api:
            for name in ("a", "b", "c"):
                await server.store.create(("v1/pods", "space", name), {"metadata": {}})
            assert len(await api.all(PODS, "space")) == 3
            page = await api.page(PODS)
            await server.store.delete(("v1/pods", "space", "a"), "")
            server.store.compact()
            with pytest.raises(errors.Gone):
                await api.page(PODS, token=page["metadata"]["continue"])

    asyncio.run(main())


def test_no_answer_is_an_error_within_the_time_out() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            server.faults.delay(100)
            with pytest.raises(Unreachable, match="no answer in time"):
                await api.call("GET", PODS.path(), timeout=0.05)
            server.faults.refuse(0, times=3)
            with pytest.raises(Unreachable, match="did not answer"):
                await api.page(PODS)

    asyncio.run(main())


def test_the_pace_lets_a_burst_through_and_then_so_many_a_second() -> None:
    async def main() -> list[float]:
        pace, loop, came = Pace(20, 40), asyncio.get_running_loop(), []

        async def call() -> None:
            await pace.turn()
            came.append(loop.time())

        await asyncio.sleep(10)
        await asyncio.gather(*(call() for _ in range(100)))
        return came

    came = virtual.run(main())
    assert sum(when < 10.001 for when in came) == 40
    assert came[-1] == pytest.approx(13.0, abs=0.01)


# --- the way to a cluster ------------------------------------------------------------------------


def kubeconfig(folder: Path, port: int, *, space: object = "team", **user: Any) -> str:
    where = {"cluster": "c", "user": "u", "namespace": space}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "contexts": [
            {"name": "one", "context": where},
            {"name": "two", "context": {"cluster": "c", "user": "u"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize(("context", "namespace"), [(None, "team"), ("two", "default")])
def test_a_kubeconfig_says_where_and_in_which_namespace(
    tmp_path: Path, context: str | None, namespace: str
) -> None:
    path = kubeconfig(tmp_path, 1234, token="t")
    found = asyncio.run(connection.find(path, context))
    assert (found.namespace, found.source) == (namespace, path)
    assert found.configuration.host == "http://127.0.0.1:1234"


def test_a_context_that_is_given_needs_no_current_one(tmp_path: Path) -> None:
    path = Path(kubeconfig(tmp_path, 1234, token="t"))
    path.write_text(path.read_text().replace("current-context: one\n", ""))
    assert asyncio.run(connection.find(str(path), "one")).namespace == "team"
    with pytest.raises(NoCluster, match="current-context"):
        asyncio.run(connection.find(str(path)))


def test_a_namespace_that_is_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoCluster, match="namespace 5 is no text"):
        asyncio.run(connection.find(kubeconfig(tmp_path, 1, space=5)))


def test_a_token_that_was_renewed_on_disk_is_read_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serve() as server:
            token = tmp_path / "token"
            token.write_text("old")
            path = kubeconfig(tmp_path, server.port, tokenFile=str(token))
            async with await Api.connect(kubeconfig=path) as api:
                assert (await api.page(PODS))["items"] == []
                token.write_text("new")
                server.faults.refuse(401)
                await api.page(PODS)
                assert server.tokens == ["Bearer old", "Bearer old", "Bearer new"]
                server.faults.refuse(401, times=2)
                with pytest.raises(Unauthorized):
                    await api.page(PODS)

    asyncio.run(main())


@pytest.mark.parametrize("content", ["", "[]", "{", "a: b", "contexts: 3\ncurrent-context: x"])
def test_a_kubeconfig_that_is_none_is_told_in_a_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(NoCluster, match="cannot be used"):
        asyncio.run(connection.find(str(path)))


def test_a_context_or_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, 1, token="t")
    with pytest.raises(NoCluster, match="nowhere"):
        asyncio.run(connection.find(path, "nowhere"))
    with pytest.raises(NoCluster, match="there is no kubeconfig /no/where"):
        asyncio.run(connection.find("/no/where"))

"""What the kernel takes for granted of an API server, on a real one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.errors import (
    Absent,
    AlreadyExists,
    Conflict,
    Invalid,
    Unauthorized,
)
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import LEASES, PODS, SERVICE_ACCOUNTS
from elastic.k8s.kernel.writes import Writer, together
from tests.k8s.cluster import Namespace
from tests.k8s.fake.store import Json

pytestmark = pytest.mark.xdist_group("kubernetes")


def pod(space: Namespace, name: str) -> Json:
    return {
        "metadata": {"name": name, "namespace": space.name, "labels": {"job": space.name}},
        "spec": {
            "containers": [{"name": "main", "image": "none"}],
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
        },
    }


@contextlib.asynccontextmanager
async def connected(space: Namespace) -> AsyncIterator[Api]:
    async with await Api.connect(kubeconfig=str(space.kubeconfig)) as api:
        yield api


def test_a_cache_has_what_was_written_and_forgets_what_was_deleted(namespace: Namespace) -> None:
    async def main() -> None:
        stir = asyncio.Event()
        async with connected(namespace) as api:
            writer = Writer(api, manager="test")

            def changed(old: Json | None, new: Json | None) -> None:
                stir.set()

            cache: Reflector[Json] = Reflector(
                api,
                PODS,
                project=lambda item: item["metadata"],
                changed=changed,
                namespace=namespace.name,
                selector=f"job={namespace.name}",
            )
            keeping = asyncio.create_task(cache.run())
            await asyncio.wait_for(cache.synced.wait(), 60)
            names = [f"p{n}" for n in range(7)]
            done = await together(
                names, lambda name: writer.create("job", PODS, pod(namespace, name))
            )
            assert done == (7, None)
            async with asyncio.timeout(60):
                while len(cache) < 7:
                    stir.clear()
                    await stir.wait()
                first = cache.get(namespace.name, "p0")
                assert first is not None
                await writer.delete("job", PODS, namespace.name, "p0", first["uid"], grace=0)
                while len(cache) > 6:
                    stir.clear()
                    await stir.wait()
            page = await api.page(PODS, namespace.name, limit=4)
            assert len(page["items"]) == 4
            assert page["metadata"]["continue"]
            assert len(await api.all(PODS, namespace.name)) == 6
            assert cache.lists == 1
            keeping.cancel()

    asyncio.run(main())


def test_names_uids_and_versions_fence_writes(namespace: Namespace) -> None:
    async def main() -> None:
        space = namespace.name
        async with connected(namespace) as api:
            writer = Writer(api, manager="test", patience=0.5)
            made = await writer.create("job", PODS, pod(namespace, "a"))
            with pytest.raises(AlreadyExists):
                await api.create(PODS, space, pod(namespace, "a"))
            with pytest.raises(Conflict):
                await api.delete(PODS, space, "a", uid="another")
            status = {"phase": "Running"}
            uid = made["metadata"]["uid"]
            with pytest.raises(Conflict):
                await writer.apply_status(PODS, space, "a", "another", status)
            await writer.apply_status(PODS, space, "a", uid, status)
            found = await api.get(PODS, space, "a")
            assert found["status"]["phase"] == "Running"
            old = {"resourceVersion": made["metadata"]["resourceVersion"], "labels": {"a": "b"}}
            with pytest.raises(Conflict):
                await api.merge(PODS, space, "a", {"metadata": old})
            await writer.delete("job", PODS, space, "a", uid, grace=0)
            await writer.delete("job", PODS, space, "a", uid, grace=0)
            with pytest.raises(Absent, match='pods "a" not found'):
                await api.get(PODS, space, "a")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("größe 日本語", ""), ("\U0001f389 beyond 16 bits", ""), (r"\ud83c\U0001f389 as they stand", ""),
        ("\x00\x1b\x7f\x85\xa0", ""), ("a\u2028b\u2029c", ""), ("\ufeff\ufffe\uffff", ""),
        ("half \ud83c", "half \ufffd"),
    ],
)  # fmt: skip
def test_what_is_applied_may_have_any_character(namespace: Namespace, text: str, kept: str) -> None:
    """A server reads it as YAML, which is not all of JSON."""

    async def main() -> None:
        async with connected(namespace) as api:
            body = {"metadata": {"annotations": {"said": text}}}
            await api.apply(SERVICE_ACCOUNTS, namespace.name, "any", body, manager="test")
            found = await api.get(SERVICE_ACCOUNTS, namespace.name, "any")
            assert found["metadata"]["annotations"]["said"] == (kept or text)

    asyncio.run(main())


def test_a_dry_run_says_what_is_wrong_and_writes_nothing(namespace: Namespace) -> None:
    async def main() -> None:
        async with connected(namespace) as api:
            bad = pod(namespace, "a")
            bad["spec"]["containers"][0]["image"] = ""
            with pytest.raises(Invalid, match=r"spec.containers\[0\].image: Required value"):
                await api.create(PODS, namespace.name, bad, dry_run=True)
            await api.create(PODS, namespace.name, pod(namespace, "a"), dry_run=True)
            assert await api.all(PODS, namespace.name) == []

    asyncio.run(main())


def test_a_lease_is_taken_renewed_released_and_refused_to_others(namespace: Namespace) -> None:
    async def main() -> None:
        async with connected(namespace) as api:
            now = 100.0
            a, b = (Lease(api, namespace.name, "operator", name, now=lambda: now) for name in "ab")
            assert await a.attempt()
            assert not await b.attempt()
            assert await a.attempt()
            leading = asyncio.Event()

            async def lead() -> None:
                leading.set()
                await asyncio.Event().wait()

            running = asyncio.create_task(a.run(lead))
            await asyncio.wait_for(leading.wait(), 60)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            found = await api.get(LEASES, namespace.name, "operator")
            assert not found["spec"].get("holderIdentity")
            assert await b.attempt()
            assert not await a.attempt()

    asyncio.run(main())


def test_a_token_that_is_none_is_told(namespace: Namespace) -> None:
    async def main() -> None:
        async with connected(namespace) as api:
            api._client.configuration.api_key = {"BearerToken": "Bearer nonsense"}
            api._again = None
            with pytest.raises(Unauthorized):
                await api.page(PODS, namespace.name)

    asyncio.run(main())

"""The cache against a server that ends, breaks off, forgets and lies still: in the end it holds what
the server has, and whoever listened to its changes knows the same.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s.kernel import reflector as module
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import PODS
from tests.k8s.fake.server import Server, serve
from tests.k8s.fake.store import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    uid: str
    job: str
    phase: str


def project(item: Json) -> Pod:
    metadata = item["metadata"]
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        job=(metadata.get("labels") or {}).get("job", ""),
        phase=item.get("status", {}).get("phase", ""),
    )


def pod(name: str, job: str = "one", phase: str = "Pending") -> Json:
    return {"metadata": {"name": name, "labels": {"job": job}}, "status": {"phase": phase}}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(module, "LONG_PAUSE", 0.05)


class Kept:
    """A running cache, and what was heard of its changes."""

    def __init__(self, server: Server, **settings: Any) -> None:
        self.server, self.heard, self.stir = server, dict[str, Pod](), asyncio.Event()
        self.api = server.api()
        self.cache: Reflector[Pod] = Reflector(
            self.api,
            PODS,
            project=project,
            changed=self._change,
            indexers={"job": lambda one: (one.job,)},
            **settings,
        )

    def _change(self, old: Pod | None, new: Pod | None) -> None:
        if old is not None:
            assert self.heard.pop(old.name) == old
        if new is not None:
            assert new.name not in self.heard
            self.heard[new.name] = new
        self.stir.set()

    async def settled(self) -> None:
        """Wait until the cache is what the server has."""
        async with asyncio.timeout(60):
            while {one.name: one for one in self.cache} != self.there():
                self.stir.clear()
                await self.stir.wait()
        assert self.heard == self.there()
        for job in ("one", "two"):
            wanted = [one for _, one in sorted(self.there().items()) if one.job == job]
            assert list(self.cache.by("job", job)) == wanted

    def there(self) -> dict[str, Pod]:
        return {
            item["metadata"]["name"]: project(item) for item in self.server.store.items.values()
        }


@contextlib.asynccontextmanager
async def kept(server: Server, **settings: Any) -> AsyncIterator[Kept]:
    made = Kept(server, **settings)
    async with made.api:
        running = asyncio.create_task(made.cache.run())
        try:
            yield made
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def create(server: Server, name: str, **settings: str) -> None:
    await server.store.create(("v1/pods", "space", name), pod(name, **settings))


def test_pages_are_put_together_and_changes_follow() -> None:
    async def main() -> None:
        async with serve(page=3) as server:
            for number in range(10):
                await create(server, f"p{number}", job="one" if number % 2 else "two")
            async with kept(server) as made:
                await made.cache.synced.wait()
                assert len(made.cache) == 10
                assert made.cache.get("space", "p3") == made.there()["p3"]
                await create(server, "later")
                await server.store.patch(
                    ("v1/pods", "space", "p1"), {"status": {"phase": "Running"}}
                )
                await server.store.delete(("v1/pods", "space", "p2"), "")
                await made.settled()
                assert made.cache.lists == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "lists"),
    [("drop", 1), ("end", 1), ("torn", 1), ("silence", 1), ("gone", 2), ("error", 2)],
)
def test_a_watch_that_ends_goes_on_where_it_was_and_lists_only_if_it_must(
    kind: str, lists: int
) -> None:
    async def main() -> None:
        async with serve(bookmark=60) as server:
            server.faults.end_watch(kind, after=1)
            async with kept(server, silence=0.3) as made:
                await made.cache.synced.wait()
                await create(server, "a")
                await made.settled()
                await create(server, "b")
                await server.store.delete(("v1/pods", "space", "a"), "")
                await made.settled()
                assert made.cache.lists == lists

    asyncio.run(main())


def test_a_version_that_the_server_forgot_means_a_list() -> None:
    async def main() -> None:
        async with serve(bookmark=60) as server:
            server.faults.end_watch("drop", after=1)
            async with kept(server) as made:
                await made.cache.synced.wait()
                await create(server, "a")
                await create(server, "b")
                await server.store.delete(("v1/pods", "space", "a"), "")
                server.store.compact()
                await made.settled()

    asyncio.run(main())


def test_bookmarks_move_a_quiet_watch_past_what_is_forgotten() -> None:
    async def main() -> None:
        async with serve(bookmark=0.02) as server, kept(server, selector="job=one") as made:
            await made.cache.synced.wait()
            for number in range(5):
                await create(server, f"other{number}", job="two")
            heard = made.cache.heard
            async with asyncio.timeout(60):
                while made.cache.heard == heard:
                    await asyncio.sleep(0.01)
            server.break_watches()
            server.store.compact()
            await create(server, "mine")
            async with asyncio.timeout(60):
                while made.cache.get("space", "mine") is None:
                    await asyncio.sleep(0.01)
            assert made.cache.lists == 1

    asyncio.run(main())


def test_an_object_under_the_name_of_another_is_two_changes() -> None:
    async def main() -> None:
        async with serve(bookmark=60) as server:
            await create(server, "a")
            server.faults.end_watch("gone")
            async with kept(server) as made:
                await made.cache.synced.wait()
                await server.store.delete(("v1/pods", "space", "a"), "")
                await create(server, "a", job="two")
                await made.settled()  # `_change` would see an unknown predecessor

    asyncio.run(main())


def test_a_server_that_fails_is_asked_until_it_answers() -> None:
    async def main() -> None:
        async with serve() as server:
            server.faults.refuse(500, "GET", times=3)
            async with kept(server) as made, asyncio.timeout(60):
                await made.cache.synced.wait()
                assert len([asked for asked in server.asked if "watch" not in asked]) == 4

    asyncio.run(main())


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["create", "change", "delete"]), st.integers(0, 5)),
    st.tuples(
        st.sampled_from(["drop", "end", "torn", "gone", "error", "silence"]), st.integers(0, 3)
    ),
    st.tuples(st.sampled_from(["refuse"]), st.sampled_from([0, 429, 500, 503])),
    st.tuples(st.sampled_from(["compact", "wait"]), st.just(0)),
)


@settings(max_examples=25)
@given(actions=st.lists(ACTIONS, max_size=25), page=st.integers(1, 3))
def test_whatever_happens_the_cache_is_the_servers_in_the_end(
    actions: list[tuple[str, int]], page: int
) -> None:
    async def main() -> None:
        async with serve(page=page) as server, kept(server, silence=0.2) as made:
            for action, number in actions:
                await act(server, action, number)
            server.faults.calls.clear()
            await made.settled()

    asyncio.run(main())


async def act(server: Server, action: str, number: int) -> None:
    place = ("v1/pods", "space", f"p{number}")
    there = place in server.store.items
    if action == "create" and not there:
        await create(server, place[2], job=("one", "two")[number % 2])
    elif action == "change" and there:
        await server.store.patch(place, {"status": {"phase": f"at {server.store.version}"}})
    elif action == "delete" and there:
        await server.store.delete(place, "")
    elif action == "refuse":
        server.faults.refuse(number, "GET")
    elif action == "compact":
        server.store.compact()
    elif action == "wait":
        await asyncio.sleep(0.01)
    elif action in ("drop", "end", "torn", "gone", "error", "silence"):
        server.faults.end_watch(action, after=number)

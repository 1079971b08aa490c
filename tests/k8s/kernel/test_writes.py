"""Writes against a server that refuses, fails and forgets to answer: done once, or known not to be."""

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s.kernel import writes
from elastic.k8s.kernel.errors import (
    Absent,
    AlreadyExists,
    ApiError,
    Broken,
    Busy,
    Conflict,
    Fenced,
    Forbidden,
)
from elastic.k8s.kernel.queue import Queue
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import PODS
from elastic.k8s.kernel.writes import EXPECTED, Expectations, Writer, together
from tests.k8s import virtual
from tests.k8s.fake.server import Server, serve
from tests.k8s.fake.soon import soon
from tests.k8s.fake.store import Json


def pod(name: str, owner: str = "job-uid") -> Json:
    controller = {"uid": owner, "controller": True, "kind": "ElasticJob", "name": "job"}
    return {"metadata": {"name": name, "namespace": "space", "ownerReferences": [controller]}}


def place(name: str) -> tuple[str, str, str]:
    return "v1/pods", "space", name


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    soon(monkeypatch)


@pytest.mark.parametrize("status", [0, 429, 500, 503])
@pytest.mark.parametrize("after", [False, True])
def test_a_create_that_fails_or_is_not_answered_makes_one_object(status: int, after: bool) -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            server.faults.refuse(status, "POST", times=2, after=after)
            writer = Writer(api, manager="test")
            made = await writer.create("job-uid", PODS, pod("a"))
            assert [(place("a"), made["metadata"]["uid"])] == server.store.created

    asyncio.run(main())


def test_what_the_cache_has_shown_is_not_made_again_where_it_is_gone() -> None:
    """It was made, though the server said that it was busy."""

    async def main() -> None:
        async with serve() as server, server.api() as api:
            server.faults.refuse(503, "POST", after=True)

            def held() -> bool:
                if server.store.created:  # between two tries
                    writer.expectations.see("space", "a", "", leaving=False)
                    server.store.items.pop(place("a"), None)
                return True

            writer = Writer(api, manager="test", held=held)
            with pytest.raises(Absent):
                await writer.create("job-uid", PODS, pod("a"))
            assert [one for one, _ in server.store.created] == [place("a")]
            assert writer.expectations.pending("job-uid", 0) == 0

    asyncio.run(main())


def test_anothers_object_under_the_name_is_left_alone() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            await server.store.create(place("a"), pod("a", owner="another"))
            writer = Writer(api, manager="test")
            with pytest.raises(AlreadyExists, match='"a" already exists'):
                await writer.create("job-uid", PODS, pod("a"))
            assert writer.expectations.pending("job-uid", 0) == 0

    asyncio.run(main())


def test_what_is_there_is_found_where_it_is_ours() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            writer = Writer(api, manager="test")
            ours = await server.store.create(place("a"), pod("a"))
            await server.store.create(place("b"), pod("b", owner="another"))
            assert await writer.find(PODS, pod("a")) == ours
            assert await writer.find(PODS, pod("b")) is None
            with pytest.raises(Absent):
                await writer.find(PODS, pod("c"))

    asyncio.run(main())


def test_a_quota_is_told_in_the_servers_words_and_leaves_nothing_expected() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            server.faults.refuse(403, "POST")
            writer = Writer(api, manager="test")
            with pytest.raises(Forbidden, match="injected"):
                await writer.create("job-uid", PODS, pod("a"))
            assert writer.expectations.pending("job-uid", 0) == 0
            assert len(server.asked) == 1

    asyncio.run(main())


def test_a_server_that_stays_broken_is_given_up_and_what_may_be_there_is_expected() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            server.faults.refuse(500, "POST", times=1000)
            writer = Writer(api, manager="test", patience=0.05)
            with pytest.raises(Broken, match="injected"):
                await writer.create("job-uid", PODS, pod("a"))
            now = asyncio.get_running_loop().time()
            assert writer.expectations.pending("job-uid", now) == 1

    asyncio.run(main())


def test_retry_after_is_respected() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            server.faults.refuse(429, "PATCH", retry_after=3)
            writer = Writer(api, manager="test", patience=2.0)
            with pytest.raises(Busy):  # three seconds are more than it has
                await writer.apply(PODS, "space", "a", pod("a"))
            server.faults.refuse(429, "PATCH", retry_after=1)
            await writer.apply(PODS, "space", "a", pod("a"))

    asyncio.run(main())


def test_a_conflict_of_versions_is_tried_again_and_one_of_uids_is_an_end() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            writer = Writer(api, manager="test", patience=0.2)
            made = await server.store.create(place("a"), pod("a"))
            server.faults.refuse(409, "PATCH")
            status = {"phase": "Running"}
            await writer.apply_status(PODS, "space", "a", made["metadata"]["uid"], status)
            assert server.store.get(place("a"))["status"] == status
            with pytest.raises(Conflict):
                await writer.apply_status(PODS, "space", "a", "another", status)

    asyncio.run(main())


@pytest.mark.parametrize("after", [False, True])
def test_a_delete_takes_that_object_alone_and_may_be_repeated(after: bool) -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            writer = Writer(api, manager="test")
            made = await server.store.create(place("a"), pod("a"))
            server.faults.refuse(500, "DELETE", after=after)
            await writer.delete("job-uid", PODS, "space", "a", "another")
            assert place("a") in server.store.items or after
            await writer.delete("job-uid", PODS, "space", "a", made["metadata"]["uid"])
            assert place("a") not in server.store.items

    asyncio.run(main())


def test_who_does_not_hold_the_lease_writes_nothing_and_stops_between_two_tries() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            tries = iter([True, True, False])
            writer = Writer(api, manager="test", held=lambda: next(tries))
            server.faults.refuse(500, "POST", times=9)
            with pytest.raises(Fenced):
                await writer.create("job-uid", PODS, pod("a"))
            assert len(server.asked) == 2
            assert not server.store.items

    asyncio.run(main())


def test_expectations_end_with_what_the_cache_shows_or_with_time() -> None:
    expected = Expectations()
    expected.creating("one", "space", "a", 0)
    expected.creating("two", "space", "b", 0)
    expected.deleting("one", "uid-c", 0)
    assert (expected.pending("one", 1), expected.pending("two", 1)) == (2, 1)
    expected.see("space", "a", "uid-a", leaving=False)
    expected.see("space", "c", "uid-c", leaving=False)
    assert (expected.pending("one", 1), expected.pending("two", 1)) == (1, 1)
    expected.see("space", "c", "uid-c", leaving=True)
    assert (expected.pending("one", 1), expected.pending("two", EXPECTED)) == (0, 0)


def test_a_batch_grows_and_ends_with_its_first_failure() -> None:
    async def main() -> None:
        asked: list[int] = []
        busy = most = 0

        async def call(number: int) -> None:
            nonlocal busy, most
            asked.append(number)
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(1)
            busy -= 1
            if number == 5:
                raise Forbidden("exceeded quota")

        done, error = await together(range(100), call)
        assert (done, str(error), len(asked)) == (6, "exceeded quota", 7)
        asked.clear()
        assert await together([n for n in range(101) if n != 5], call) == (100, None)
        assert most == writes.TOGETHER

    virtual.run(main())


# --- a controller in small -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    name: str
    uid: str


class Controller:
    """Wants pods p0..pn of one owner, with a new name for each that was deleted: what the master's
    launcher does, without its decisions."""

    def __init__(self, server: Server, wanted: int, silence: float) -> None:
        self.server, self.wanted = server, wanted
        self.api, self.queue = server.api(), Queue[str](first=0.001, most=0.02)
        self.writer = Writer(self.api, manager="test", patience=0.1)
        self.cache: Reflector[Seen] = Reflector(
            self.api,
            PODS,
            project=lambda item: Seen(name=item["metadata"]["name"], uid=item["metadata"]["uid"]),
            changed=self._change,
            silence=silence,
        )

    def _change(self, old: Seen | None, new: Seen | None) -> None:
        one = new or old
        assert one is not None
        self.writer.expectations.see("space", one.name, one.uid, leaving=new is None)
        self.queue.add("job")

    async def look(self, key: str) -> float | None:
        if self.writer.expectations.pending(key, asyncio.get_running_loop().time()):
            return 0.05
        names = sorted(one.name for one in self.cache)
        missing = range(self.wanted - len(names))
        last = max((item[2] for item, _ in self.server.store.created), default="p000")
        fresh = [pod(f"p{int(last[1:]) + 1 + n:03}", owner=key) for n in missing]
        _, error = await together(fresh, lambda one: self.writer.create(key, PODS, one))
        if error is not None:
            raise error
        for name in names[self.wanted :]:
            found = self.cache.get("space", name)
            assert found is not None
            await self.writer.delete(key, PODS, "space", name, found.uid)
        return None


ACTIONS = st.one_of(
    st.tuples(st.just("delete"), st.integers(0, 5)),
    st.tuples(st.just("want"), st.integers(0, 8)),
    st.tuples(st.sampled_from(["drop", "torn", "gone", "error", "silence"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["refuse", "lose"]), st.sampled_from([0, 429, 500, 503])),
    st.tuples(st.sampled_from(["compact", "wait", "late"]), st.just(0)),
)


@settings(max_examples=25)
@given(actions=st.lists(ACTIONS, max_size=20))
def test_whatever_happens_there_are_as_many_as_wanted_and_none_twice(
    actions: list[tuple[str, int]],
) -> None:
    async def main() -> None:
        async with serve() as server:
            controller = Controller(server, 3, silence=0.2)
            async with controller.api:
                running = [asyncio.create_task(controller.cache.run())]
                await controller.cache.synced.wait()
                running.append(asyncio.create_task(controller.queue.run(controller.look)))
                controller.queue.add("job")
                deleted = 0
                for action, number in actions:
                    deleted += await act(controller, action, number)
                await whole(controller)
                for task in running:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
            names = [item for item, _ in server.store.created]
            # A creation whose answer was lost is repeated, also where somebody has deleted what it made: then
            # alone a name comes twice, one after the other.
            lost = sum(action == "lose" for action, _ in actions)
            assert len(names) - len(set(names)) <= min(lost, deleted)
            most = max([3, *(n for action, n in actions if action == "want")])
            wants = sum(action == "want" for action, _ in actions)
            assert len(names) <= most * (wants + 1) + deleted

    asyncio.run(main())


async def whole(controller: Controller) -> None:
    """Wait until the server has what is wanted, and nothing is on the way."""
    server = controller.server
    async with asyncio.timeout(90):
        while True:
            now = asyncio.get_running_loop().time()
            settled = (
                len(server.store.items) == controller.wanted == len(controller.cache)
                and not controller.writer.expectations.pending("job", now)
                and not len(controller.queue)
            )
            if settled:
                return
            await asyncio.sleep(0.005)


async def act(controller: Controller, action: str, number: int) -> int:
    server = controller.server
    if action == "delete":
        there = sorted(server.store.items)
        if number < len(there):
            await server.store.delete(there[number], "")
            return 1
    elif action == "want":
        controller.wanted = number
        controller.queue.add("job")
    elif action in ("refuse", "lose"):
        server.faults.refuse(number, after=action == "lose")
    elif action == "compact":
        server.store.compact()
    elif action == "wait":
        await asyncio.sleep(0.01)
    elif action == "late":
        server.faults.delay(0.02)
    else:
        server.faults.end_watch(action, after=number)
    return 0


def test_an_error_that_is_no_answer_is_not_swallowed() -> None:
    async def call(number: int) -> None:
        raise ZeroDivisionError

    async def main() -> tuple[int, ApiError | None]:
        return await together([1], call)

    with pytest.raises(ZeroDivisionError):
        virtual.run(main())

"""Contenders for one lease: never two at a time, by their own clocks, whatever the server does."""

import asyncio
import contextlib

import pytest

from elastic.k8s.kernel.errors import LeaseLost
from elastic.k8s.kernel.lease import Lease
from tests.k8s.fake.server import Server, serve

PLACE = "coordination.k8s.io/v1/leases", "space", "operator"


class Clock:
    """One for both contenders, but for what a test adds to one."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def contender(api: object, identity: str, clock: Clock) -> Lease:
    return Lease(api, "space", "operator", identity, now=clock)  # type: ignore[arg-type]


def holder(server: Server) -> str:
    return str(server.store.get(PLACE)["spec"]["holderIdentity"])


def test_the_first_has_it_and_the_second_takes_it_once_it_has_not_moved_for_15_s() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            clock = Clock()
            a, b = contender(api, "a", clock), contender(api, "b", clock)
            assert await a.attempt()
            assert not await b.attempt()
            clock.now += 9.9
            assert a.held()
            clock.now += 0.2
            assert not a.held()  # nobody told it: its own clock did
            assert not await b.attempt()
            clock.now += 4.8
            assert not await b.attempt()
            clock.now += 0.2
            assert await b.attempt()
            assert (b.held(), holder(server)) == (True, "b")
            assert not await a.attempt()
            assert a.holder == "b"
            spec = server.store.get(PLACE)["spec"]
            assert spec["leaseTransitions"] == 1

    asyncio.run(main())


def test_a_renewal_counts_from_when_it_was_sent_and_starts_the_others_wait_anew() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            clock = Clock()
            a, b = contender(api, "a", clock), contender(api, "b", clock)
            assert await a.attempt()
            for _ in range(5):
                clock.now += 9.0
                assert not await b.attempt()
                assert await a.attempt()
            clock.now += 14.0
            assert not await b.attempt()  # sees the last renewal only now
            clock.now += 14.0
            assert not await b.attempt()
            clock.now += 2.0
            assert await b.attempt()

    asyncio.run(main())


@pytest.mark.parametrize("status", [0, 409, 429, 500])
@pytest.mark.parametrize("after", [False, True])
def test_a_renewal_that_fails_does_not_extend_it(status: int, after: bool) -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            clock = Clock()
            a = contender(api, "a", clock)
            assert await a.attempt()
            clock.now += 5
            # aiohttp itself asks once more where a connection that it used again breaks off at once
            times = 2 if (status, after) == (0, False) else 1
            server.faults.refuse(status, "PUT", after=after, times=times)
            assert not await a.attempt()
            assert a.held()
            clock.now += 5.1
            assert not a.held()
            assert await a.attempt()  # nobody else had it
            assert a.held()

    asyncio.run(main())


def test_two_that_try_at_once_are_told_apart_by_the_server() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            clock = Clock()
            several = [contender(api, name, clock) for name in "abcdefgh"]
            for _ in range(3):
                won = await asyncio.gather(*(one.attempt() for one in several))
                assert sum(won) == sum(one.held() for one in several) == 1
                clock.now += 15.1
                await asyncio.gather(*(one.attempt() for one in several))
                clock.now += 15.1

    asyncio.run(main())


def test_it_leads_while_it_holds_and_lets_go_at_once_at_the_end() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            clock = Clock()
            a, b = contender(api, "a", clock), contender(api, "b", clock)
            leading, ended = asyncio.Event(), []

            async def lead() -> None:
                leading.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(holder(server))

            running = asyncio.create_task(a.run(lead))
            await asyncio.wait_for(leading.wait(), 60)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            assert ended == ["a"]  # released after the last write, not before
            assert not a.held()
            assert holder(server) == ""
            assert await b.attempt()

    asyncio.run(main())


def test_what_it_leads_is_ended_when_another_has_it() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            a = Lease(api, "space", "operator", "a", duration=3, renew=2, retry=0.01)
            leading, ended = asyncio.Event(), asyncio.Event()

            async def lead() -> None:
                leading.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            running = asyncio.create_task(a.run(lead))
            await asyncio.wait_for(leading.wait(), 60)
            await server.store.patch(PLACE, {"spec": {"holderIdentity": "b"}})
            with pytest.raises(LeaseLost, match="b has it"):
                await asyncio.wait_for(running, 60)
            assert ended.is_set()
            assert holder(server) == "b"

    asyncio.run(main())


def test_a_holder_that_the_server_does_not_answer_ends_by_itself() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            a = Lease(api, "space", "operator", "a", duration=0.6, renew=0.4, retry=0.02)
            leading = asyncio.Event()

            async def lead() -> None:
                leading.set()
                server.faults.refuse(500, times=100_000)
                await asyncio.Event().wait()

            with pytest.raises(LeaseLost, match="could not be renewed"):
                await asyncio.wait_for(a.run(lead), 60)
            assert leading.is_set()

    asyncio.run(main())


def test_what_it_leads_may_end_or_fail() -> None:
    async def main() -> None:
        async with serve() as server, server.api() as api:
            a = contender(api, "a", Clock())

            async def fail() -> None:
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await a.run(fail)
            assert holder(server) == ""

    asyncio.run(main())

"""Keys: once each, one worker a key, none lost; with growing pauses. In virtual time."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s.kernel.errors import Forbidden
from elastic.k8s.kernel.queue import MOST, Queue
from tests.k8s import virtual


def test_a_key_added_often_is_looked_at_once() -> None:
    async def main() -> list[str]:
        queue: Queue[str] = Queue()
        for key in ("a", "b", "a", "a"):
            queue.add(key)
        assert len(queue) == 2
        return [await queue.get(), await queue.get()]

    assert virtual.run(main()) == ["a", "b"]


def test_a_key_added_while_worked_on_comes_again_afterwards() -> None:
    async def main() -> None:
        queue: Queue[str] = Queue()
        queue.add("a")
        key = await queue.get()
        queue.add("a")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 1000)  # not beside the one that works on it
        queue.done(key)
        assert await asyncio.wait_for(queue.get(), 1) == "a"

    virtual.run(main())


def test_pauses_grow_to_five_minutes_and_are_forgotten_on_success() -> None:
    async def main() -> tuple[list[float], float]:
        queue: Queue[str] = Queue()
        queue.add("a")
        pauses = []
        loop = asyncio.get_running_loop()
        for _ in range(20):
            key = await queue.get()
            begun, pause = loop.time(), queue.failed(key)
            pauses.append(pause)
            assert await queue.get() == "a"
            assert loop.time() - begun == pytest.approx(pause, abs=1e-3)
            queue.add("a")
            queue._finish(key)
        key = await queue.get()
        queue.done(key)
        queue.add("a")
        return pauses, queue.failed(await queue.get())

    pauses, afterwards = virtual.run(main())
    assert pauses[:3] == [0.005, 0.01, 0.02]
    assert pauses[-1] == MOST == 300.0
    assert afterwards == 0.005


def test_the_soonest_of_two_times_counts_and_a_look_forgets_both() -> None:
    async def main() -> None:
        queue: Queue[str] = Queue()
        loop = asyncio.get_running_loop()
        queue.add_after("a", 100)
        queue.add_after("a", 10)
        queue.add_after("a", 50)
        assert await queue.get() == "a"
        assert loop.time() == pytest.approx(10, abs=1e-3)
        queue.done("a")
        queue.add_after("a", 100)
        queue.add("a")
        queue.done(await queue.get())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 1000)

    virtual.run(main())


@settings(max_examples=40)
@given(
    adds=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 3)), min_size=1, max_size=30),
    takes=st.floats(0.01, 2),
    failing=st.sets(st.integers(0, 40)),
    workers=st.integers(1, 4),
)
def test_every_key_is_looked_at_after_its_last_add_and_never_twice_at_once(
    adds: list[tuple[int, float]], takes: float, failing: set[int], workers: int
) -> None:
    async def main() -> None:
        queue: Queue[int] = Queue()
        busy: set[int] = set()
        looked: dict[int, float] = {}
        added: dict[int, float] = {}
        loop, looks, most = asyncio.get_running_loop(), 0, 0

        async def look(key: int) -> float | None:
            nonlocal looks, most
            looks += 1
            this = looks
            assert key not in busy
            busy.add(key)
            most = max(most, len(busy))
            begun = loop.time()
            await asyncio.sleep(takes)
            busy.remove(key)
            if this in failing:
                raise Forbidden("no")
            looked[key] = begun
            return None

        running = asyncio.create_task(queue.run(look, workers=workers))
        for key, pause in adds:
            queue.add(key)
            added[key] = loop.time()
            await asyncio.sleep(pause)
        await asyncio.sleep(3600)
        running.cancel()
        assert most <= workers
        assert all(looked[key] >= when for key, when in added.items())

    virtual.run(main())

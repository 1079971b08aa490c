"""Which probes an agent makes, as the master asks for them."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.agent.probing import Probing
from elastic.proto import master_pb2 as pb
from tests.agent.probes.healthy import environ
from tests.master.serving import within


class Probes:
    """Of a node, each ended by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[int] = []
        self.running: list[int] = []
        self.done = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

        async def alone(_: Probing, order: pb.Probe, __: object) -> pb.FromAgent:
            self.running.append(order.number)
            try:
                await self.done.wait()
            finally:
                self.running.remove(order.number)
            return pb.FromAgent(probed=pb.Probed(number=order.number))

        monkeypatch.setattr(Probing, "_alone", alone)
        settings: Any = type("Settings", (), {"workload": type("Workload", (), {"environ": {}})})
        self.of = Probing(settings, self._send, self._spawn, self._cleared, lambda _: None)

    def _send(self, message: pb.FromAgent) -> None:
        self.said.append(message.probed.number)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def _cleared(self) -> None:
        pass

    async def ask(self, number: int) -> None:
        self.of.obey(pb.Probe(number=number, level="quick"))
        for _ in range(5):
            await asyncio.sleep(0)


@within(60)
async def test_an_answer_is_said_until_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = Probes(monkeypatch)
    await probes.ask(1)
    await probes.ask(1)
    assert probes.running == [1]
    probes.done.set()
    await probes.ask(1)
    await probes.ask(1)
    await probes.ask(0)
    await probes.ask(1)
    assert set(probes.said) == {1}
    assert len(probes.said) > 2
    assert probes.running == []


@within(60)
async def test_what_nobody_wants_to_know_any_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may need its devices."""
    probes = Probes(monkeypatch)
    await probes.ask(1)
    await probes.ask(0)
    assert probes.running == []
    await probes.ask(1)
    assert probes.running == [1], "it is asked anew"
    await probes.ask(2)
    assert probes.running == [2]
    probes.done.set()
    await probes.ask(0)
    assert probes.said == [], "it was not over"


@within(120)
async def test_torch_is_imported_while_the_ranks_before_end(tmp_path: Path) -> None:
    """So that a node under suspicion is known that much sooner."""
    workload = SimpleNamespace(environ=environ(tmp_path), python=sys.executable)
    settings: Any = SimpleNamespace(workload=workload, logs=SimpleNamespace(run_dir=tmp_path))
    said: asyncio.Queue[pb.FromAgent] = asyncio.Queue()

    async def cleared() -> None:
        while not probing.pids:
            await asyncio.sleep(0.01)

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    probing = Probing(settings, said.put_nowait, spawn, cleared, lambda _: None)
    probing.obey(pb.Probe(number=1, level="quick"))
    assert (await said.get()).probed.state == "ok"
    assert not probing.pids

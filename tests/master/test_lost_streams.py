"""Streams that break, and the master's own troubles: who is lost, and what goes on."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from elastic.master.events import Incarnation, KnockAnswer
from elastic.master.knock import knock
from elastic.master.policy import Policy
from elastic.proto import knock as knock_wire
from elastic.proto import master_pb2 as pb
from elastic.proto.calls import MasterClient
from tests.master.serving import (
    NO_SECURITY,
    REFUSES,
    Agent,
    MasterProcess,
    master,
    may_unshare,
    node_states,
    noted,
    ready,
    reserved,
    within,
)

RUN, EXIT, RUNNING = pb.Directive.RUN, pb.Directive.EXIT, pb.NodeReport.RUNNING

# --- a stream that breaks ----------------------------------------------------------------------


class Door(asyncio.Protocol):
    """Answers a knock with `line`; None: accepts and says nothing."""

    def __init__(self, line: bytes | None, knocked: asyncio.Event) -> None:
        self._line, self._knocked = line, knocked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._knocked.set()
        if self._line is not None:
            transport.write(self._line)
            transport.close()


@contextlib.asynccontextmanager
async def listener(line: bytes | None) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """host:port of a guardian, and an event that says when it was knocked at."""
    knocked = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Door(line, knocked), "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", knocked


@contextlib.contextmanager
def unanswering() -> Iterator[str]:
    """host:port that lets a connection wait, as a lost host does: a listener with a full backlog."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


@within(120)
async def test_the_four_outcomes_of_a_knock() -> None:
    life = Incarnation(5)
    assert await knock(REFUSES, life) is KnockAnswer.GONE
    for said, outcome in (
        (knock_wire.answer(5), KnockAnswer.ALIVE),
        (knock_wire.answer(6), KnockAnswer.RESTARTING),
        (None, KnockAnswer.SILENT),
        (b"SSH-2.0-OpenSSH\r\n", KnockAnswer.SILENT),
    ):
        async with listener(said) as (address, _):
            assert await knock(address, life) is outcome, said
    with unanswering() as address:
        assert await knock(address, life) is KnockAnswer.SILENT
    assert await knock("no address", life) is KnockAnswer.SILENT


@within(120)
async def test_a_refused_knock_is_a_lost_node(tmp_path: Path) -> None:
    policy = Policy(min_nodes=1, max_nodes=1)
    async with master(tmp_path, policy=policy) as address, Agent(address, "node-a") as a:
        await a.ordered(RUN)
        async with Agent(address, "node-b", spare_store="127.0.0.1:2") as spare:
            await a.close()
            order = await spare.ordered(RUN)
            assert (order.round, order.restart_count, order.store) == (2, 1, "127.0.0.1:2")
            assert await node_states(address) == {"node-b": "training"}


@within(120)
async def test_a_living_agent_keeps_its_place(tmp_path: Path) -> None:
    async with (
        master(tmp_path) as address,
        listener(knock_wire.answer(1)) as (door, knocked),
    ):
        async with Agent(address, knock_address=door) as agent:
            await agent.ordered(RUN)
            await agent.close()
        await knocked.wait()
        assert await node_states(address) == {"node-a": "unreachable"}
        running = pb.NodeReport(round=1, phase=RUNNING)
        async with Agent(address, knock_address=door, report=running) as again:
            assert (await again.ordered(RUN)).round == 1
            assert await node_states(address) == {"node-a": "training"}


@within(120)
async def test_a_new_agent_behind_the_knock_gets_time_to_attach(tmp_path: Path) -> None:
    async with (
        master(tmp_path, policy=Policy(agent_restart=60.0)) as address,
        listener(knock_wire.answer(2)) as (door, _),
    ):
        async with Agent(address, knock_address=door) as agent:
            await agent.ordered(RUN)
            await agent.close()
        await noted(address, "the agent on node-a died")
        assert await node_states(address) == {"node-a": "restarting"}
        async with Agent(address, incarnation=2, knock_address=door) as again:
            assert (await again.ordered(RUN)).round == 2


@within(120)
async def test_a_guardian_that_says_nothing_leaves_it_to_the_lease(tmp_path: Path) -> None:
    async with (
        master(tmp_path, policy=Policy(lease=60.0)) as address,
        listener(None) as (door, knocked),
    ):
        async with Agent(address, knock_address=door) as agent:
            await agent.ordered(RUN)
            await agent.close()
        await knocked.wait()
        assert await node_states(address) == {"node-a": "unreachable"}
        async with Agent(address, incarnation=2, knock_address=door) as again:
            assert (await again.ordered(RUN)).round == 2
            await again.say(leaving=pb.Leaving(reason="done"))
            await noted(address, "node-a left")


@within(120)
async def test_a_host_that_does_not_answer_has_until_its_lease_ends(tmp_path: Path) -> None:
    with unanswering() as nowhere:
        async with master(tmp_path, policy=Policy(lease=2.0)) as address:
            async with Agent(address, knock_address=nowhere) as agent:
                await agent.ordered(RUN)
                await agent.close()
            await noted(address, "node-a is unreachable")
            assert await node_states(address) == {"node-a": "unreachable"}
            assert "nothing heard for 2 s" in await noted(address, "is lost")
            assert await node_states(address) == {}


@within(120)
async def test_silence_ends_a_stream(tmp_path: Path) -> None:
    async with master(tmp_path) as address, Agent(address) as silent:
        await silent.ordered(RUN)
        with pytest.raises(grpc.aio.AioRpcError, match="closed this stream"):
            await silent.hear()  # 2.5 heartbeats
        await noted(address, "node-a is gone")


@within(120)
async def test_a_node_that_is_heard_of_again_is_knocked_at_without_delay(tmp_path: Path) -> None:
    """It answered a moment ago; now nobody does."""
    async with master(tmp_path, policy=Policy(lease=60.0)) as address:
        async with listener(knock_wire.answer(1)) as (door, knocked):
            async with Agent(address, knock_address=door) as agent:
                await agent.ordered(RUN)
                await agent.close()
            await knocked.wait()
            again = Agent(address, incarnation=2, knock_address=door)
            await again.__aenter__()
            await again.ordered(RUN)
        await again.close()
        await noted(address, "node-a is gone")


@within(120)
async def test_a_node_that_did_not_hear_of_the_end_may_come_back_for_it(tmp_path: Path) -> None:
    pair = Policy(min_nodes=2, max_nodes=2)
    async with master(tmp_path, policy=pair) as address:
        async with Agent(address) as agent, Agent(address, "node-b") as cut_off:
            for each in (agent, cut_off):
                await each.ordered(RUN)
                await each.report(pb.NodeReport.FINISHED, 1)
            await cut_off.close()
            assert (await agent.ordered(EXIT)).exit_code == 0
        async with Agent(address, "node-b") as back:
            assert (await back.ordered(EXIT)).exit_code == 0


@within(120)
async def test_a_unit_is_taken_from_ranks_of_the_round_only(tmp_path: Path) -> None:
    async with master(tmp_path) as address, Agent(address) as agent:
        await agent.ordered(RUN)
        async with Agent(address, "bystander") as bystander:
            await noted(address, "bystander attached")
            await bystander.say(unit=pb.UnitDeclared(round=1, unit=1000003))
            await bystander.say(
                leaving=pb.Leaving(reason="what was said before is taken in by now")
            )
            await noted(address, "taken in by now")
        async with MasterClient(address, NO_SECURITY) as client:
            status = await client.status()
        assert (status.phase, status.round) == ("running", 1)


# --- the master's own troubles -----------------------------------------------------------------


@within(120)
async def test_a_killed_master_goes_on_where_it_was(tmp_path: Path) -> None:
    running = pb.NodeReport(round=1, phase=RUNNING)
    with reserved() as address:
        with MasterProcess(tmp_path, address) as first:
            assert (await ready(address)).epoch == 1
            async with Agent(address) as agent:
                order, uid = await agent.ordered(RUN), agent.welcome.job_uid
                await agent.report(RUNNING, 1)
                first.process.kill()
                with pytest.raises(grpc.aio.AioRpcError):
                    await agent.hear()
        with MasterProcess(tmp_path, address):
            assert (await ready(address)).phase == "running"
            async with Agent(address, job_uid=uid, epoch=1, report=running) as again:
                assert (again.welcome.epoch, again.welcome.job_uid) == (2, uid)
                same = await again.ordered(RUN)
                assert (same.round, same.restart_count) == (order.round, 0)


@within(120)
async def test_a_job_that_ends_just_after_a_masters_death_is_told_to_every_node(
    tmp_path: Path,
) -> None:
    running = pb.NodeReport(round=1, phase=RUNNING)
    with reserved() as address, unanswering() as far:
        with MasterProcess(tmp_path, address) as first:
            await ready(address)
            async with Agent(address) as agent, Agent(address, "node-b", knock_address=far) as late:
                await agent.ordered(RUN)
                await noted(address, "node-b attached")
                first.process.kill()
                for each in (agent, late):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await each.hear()
        with MasterProcess(tmp_path, address) as second:
            await ready(address)
            async with Agent(address, report=running) as agent:
                async with MasterClient(address, NO_SECURITY) as client:
                    await client.drain("", "maintenance")
                await agent.ordered(EXIT)
            async with Agent(address, "node-b", knock_address=far) as late:
                assert (await late.ordered(EXIT)).exit_code == 213
            assert await asyncio.to_thread(second.process.wait) == 0


@within(120)
async def test_a_full_disk_stops_decisions_and_loses_nothing(tmp_path: Path) -> None:
    if not may_unshare("--mount"):
        pytest.skip("may not mount a small disk")
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    wrapper = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    with reserved() as address, MasterProcess(tmp_path, address, *wrapper) as process:
        await ready(address)
        inside = Path(f"/proc/{process.process.pid}/root{tmp_path}")
        filler = inside / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        async with Agent(address) as agent:
            assert agent.welcome.epoch == 1
            assert "no space left" in await process.said("nothing is decided")
            assert await node_states(address) == {}
            filler.unlink()
            assert (await agent.ordered(RUN)).round == 1


@within(120)
async def test_a_launcher_that_died_is_told_from_one_that_was_told_to_end(tmp_path: Path) -> None:
    with reserved() as address, MasterProcess(tmp_path / "told", address) as process:
        await ready(address)
        process.process.terminate()
        assert await process.said("the launcher on the master's node was told to end")
    guardian = ("sh", "-c", 'setpriv --pdeathsig TERM "$@" & wait', "sh")
    with reserved() as address, MasterProcess(tmp_path / "died", address, *guardian) as process:
        await ready(address)
        process.process.kill()
        assert await process.said("the launcher on the master's node died")

"""What agents say of their snapshots, and what the master has them do, over a real stream."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic.master.launcher import Master, Saved
from elastic.master.policy import Policy
from elastic.proto import master_pb2 as pb
from elastic.proto.calls import MasterClient
from elastic.proto.errors import NotFound
from tests.master.serving import NO_SECURITY, Agent, master, noted, within

TWO = Policy(min_nodes=2, max_nodes=2)
RUN = pb.Directive.RUN
AT = pb.Moment(round=1, step=5)


def snapshots(rank: int, *, asks: int = 0, persist: bool = True, **more: Any) -> pb.Snapshots:
    holding = pb.Holding(moment=AT, world_size=2, ranks=[rank], units=[rank], persist=persist)
    return pb.Snapshots(
        checkpoint="/data/run", holdings=[holding], asks=asks, load=1 if asks else 0, **more
    )


async def leave(agent: Agent) -> pb.Leave:
    """The next order to leave."""
    while not (message := await agent.hear()).HasField("leave"):
        pass
    return message.leave


async def order(agent: Agent) -> pb.SnapshotOrders:
    """The next one."""
    while not (message := await agent.hear()).HasField("snapshots"):
        pass
    return message.snapshots


@within(120)
async def test_whole_is_told_to_all_and_each_writes_its_own(tmp_path: Path) -> None:
    async with (
        master(tmp_path, policy=TWO) as address,
        Agent(address, "node-a") as a,
        Agent(address, "node-b") as b,
    ):
        await a.ordered(RUN)
        await b.ordered(RUN)
        await a.say(snapshots=snapshots(0))
        first = await order(a)
        assert not first.HasField("whole")
        assert not first.pending
        await b.say(snapshots=snapshots(1))
        for rank, agent in enumerate((a, b)):
            told = await order(agent)
            assert (told.whole, told.all_units, told.pending) == (AT, 2, True)
            assert [(flush.moment, list(flush.ranks)) for flush in told.flush] == [(AT, [rank])]


class Onlooker:
    """A launcher that gives nothing, and looks."""

    master: Master

    async def run(self, master: Master) -> None:
        self.master = master
        await asyncio.Event().wait()


@within(120)
async def test_a_launcher_sees_what_is_saved_and_what_the_script_says(tmp_path: Path) -> None:
    seen, line = Onlooker(), '{"kind": "step", "iteration": 7}'
    async with (
        master(tmp_path, policy=TWO, launcher=seen) as address,
        Agent(address, "node-a") as a,
        Agent(address, "node-b") as b,
    ):
        await a.ordered(RUN)
        await b.ordered(RUN)
        assert (seen.master.saved, seen.master.metrics) == (Saved(), "")
        nothing = pb.Moment()
        await a.say(snapshots=snapshots(0, committed=nothing))
        await b.say(snapshots=snapshots(1, committed=nothing))
        while not (await order(a)).HasField("whole"):
            pass
        assert seen.master.saved == Saved(memory=AT.step)
        await a.say(heartbeat=pb.Heartbeat(round=1, metrics=line))
        await a.say(snapshots=snapshots(0, committed=AT))
        while not (await order(b)).HasField("committed"):
            pass
        assert seen.master.saved == Saved(memory=AT.step, storage=AT.step)
        assert seen.master.metrics == line
        assert seen.master.now() > 0


@within(120)
async def test_the_end_of_a_job_does_not_wait_for_what_a_lost_node_was_to_write(
    tmp_path: Path,
) -> None:
    async with master(tmp_path, policy=TWO) as address, Agent(address, "node-a") as a:
        async with Agent(address, "node-b") as b:
            await a.ordered(RUN)
            await b.ordered(RUN)
            await a.say(snapshots=snapshots(0, persist=False))
            await b.say(snapshots=snapshots(1, persist=False))
            while (await order(a)).whole != AT:
                pass
            failure = pb.RankFailure(rank=0, exit_code=3, error_type="ValueError")
            failed = pb.NodeReport(round=1, phase=pb.NodeReport.FAILED, failures=[failure])
            await a.say(report=failed)
            while not (await order(a)).pending:
                pass
        while (await order(a)).pending:
            pass


@within(120)
async def test_who_comes_to_another_master_says_again_what_it_holds(tmp_path: Path) -> None:
    said = [snapshots(0, persist=False)]
    async with (
        master(tmp_path, policy=TWO) as address,
        Agent(address, "node-a", snapshots=said) as a,
        Agent(address, "node-b", snapshots=[snapshots(1, persist=False)]) as b,
    ):
        for agent in (a, b):
            while (await order(agent)).whole != AT:
                pass
        round_ = (await a.ordered(RUN)).round
        await b.ordered(RUN)
        nothing = pb.Moment()  # is on storage
        await a.say(snapshots=snapshots(0, asks=round_, persist=False, committed=nothing))
        await b.say(snapshots=snapshots(1, asks=round_, persist=False))
        for agent in (a, b):
            while not (told := await order(agent)).HasField("restore"):
                pass
            assert (told.restore.moment, told.restore.from_memory) == (AT, True)


@within(60)
async def test_what_is_damaged_is_not_taken_again(tmp_path: Path) -> None:
    """In memory, and then on storage, where rank 0 is told what to pass over."""
    async with (
        master(tmp_path, policy=TWO) as address,
        Agent(address, "node-a") as a,
        Agent(address, "node-b") as b,
    ):
        for number, from_memory in ((1, True), (2, False)):
            for agent in (a, b):
                await agent.say(spare_store=pb.SpareStore(address=f"{agent.node}:{number}"))
            for agent in (a, b):
                assert (await agent.ordered(RUN)).round == number
            look = pb.StorageLook(round=number, load=1, known=AT)
            looked = None if from_memory else pb.Looked(look=look, stored=AT)
            await a.say(
                snapshots=snapshots(0, asks=number, persist=False, committed=AT, looked=looked)
            )
            await b.say(snapshots=snapshots(1, asks=number, persist=False))
            while (told := await order(a)).restore.round != number:
                pass
            assert (told.restore.moment, told.restore.from_memory) == (AT, from_memory)
            damage = pb.Damage(round=number, moment=AT, from_memory=from_memory, what="w is bad")
            await b.say(snapshots=snapshots(1, asks=number, persist=False, damaged=[damage]))
        for agent in (a, b):
            await agent.say(spare_store=pb.SpareStore(address=f"{agent.node}:3"))
        for agent in (a, b):
            assert (await agent.ordered(RUN)).round == 3
        await a.say(snapshots=snapshots(0, asks=3, persist=False, committed=AT))
        await b.say(snapshots=snapshots(1, asks=3, persist=False))
        while (told := await order(a)).look.round != 3:
            pass
        assert told.look == pb.StorageLook(
            round=3, load=1, known=pb.Moment(), damaged=[pb.Damage(moment=AT, what="w is bad")]
        )


@within(60)
async def test_what_is_doubted_is_not_taken_again(tmp_path: Path) -> None:
    """Nor is what comes after it, wherever it is."""
    async with master(tmp_path) as address, Agent(address, "node-a") as a:
        await a.say(spare_store=pb.SpareStore(address="node-a:1"))
        assert (await a.ordered(RUN)).round == 1
        doubt = pb.Doubt(round=1, after=AT.step - 1, ranks=[0], what="rank 0 differs")
        held = snapshots(0, persist=False, committed=AT)
        held.holdings[0].world_size = 1
        held.doubts.append(doubt)
        await a.say(snapshots=held)
        held.asks = held.load = 1
        await a.say(snapshots=held)
        while (told := await order(a)).look.round != 1:
            pass
        (one,) = told.look.damaged
        assert (one.moment, one.later, one.what) == (AT, True, "rank 0 differs")
        assert not told.HasField("restore")


@within(60)
async def test_ranks_leave_one_step_on_where_theirs_is_never_whole_and_at_once_where_it_is_lost(
    tmp_path: Path,
) -> None:
    """A planned end does not wait for what will never be."""
    async with (
        master(tmp_path) as address,
        Agent(address) as a,
        MasterClient(address, NO_SECURITY) as client,
    ):
        await a.ordered(RUN)
        lost = pb.Lost(moment=pb.Moment(round=1, step=9), reason="they differ")
        await a.say(snapshots=snapshots(0, asks=1, lost=[lost]))
        await client.restart("by hand")
        order = await leave(a)
        stand = pb.Stand(checkpoint="/data/run", round=1, next=6, order=order.order, waits=9)
        await a.say(stand=stand)
        again = await leave(a)
        assert again.step == 10
        stand.MergeFrom(pb.Stand(order=again.order, waits=10, lost="no space"))
        await a.say(stand=stand)
        assert "save of step 10, in vain: no space" in await noted(address, "in vain")


@within(60)
async def test_what_is_only_loaded_from_is_gone_back_in_and_waited_in_by_nobody(
    tmp_path: Path,
) -> None:
    """Nor is it what the job has saved."""
    seen = Onlooker()
    async with (
        master(tmp_path, launcher=seen) as address,
        Agent(address) as a,
        MasterClient(address, NO_SECURITY) as client,
    ):
        await a.ordered(RUN)
        other = pb.Snapshots(
            checkpoint="/other", asks=1, load=1, committed=pb.Moment(step=1000), read_only=True
        )
        await a.say(snapshots=other)
        with pytest.raises(NotFound, match="no ranks save to a checkpoint now"):
            await client.restart("back", from_step=4)
        await a.say(snapshots=pb.Snapshots(checkpoint="/data/run", asks=1, load=1))
        while not (await order(a)).HasField("look"):
            pass
        assert seen.master.saved == Saved()
        back = asyncio.create_task(client.restart("back", from_step=4))
        while not (message := await a.hear()).HasField("look"):
            pass
        assert message.look.checkpoint == "/data/run"
        await a.say(found=pb.Found(request=message.look.request, error="it has no step 4"))
        with pytest.raises(NotFound, match="it has no step 4"):
            await back
        await client.restart("by hand")
        assert (await leave(a)).checkpoint == "/data/run"

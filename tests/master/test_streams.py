"""What comes on many streams in one moment, folded in the right order."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from elastic.master import events as ev
from elastic.master import streams as served
from elastic.master.events import NodeId
from elastic.master.nodes import SILENT_KNOCKS, NodeState
from elastic.master.policy import Policy
from elastic.master.shell import Shell
from elastic.master.state import DRAINED
from elastic.master.streams import Streams
from elastic.proto import master_pb2 as pb
from tests.master.serving import REFUSES, within
from tests.master.streaming import EXIT, RUN, RUNS, Stream, serving

SILENT = "no address:1"
"""A knock there says nothing."""


@within(120)
async def test_no_script_is_blamed_while_a_peers_end_waits_to_be_folded(tmp_path: Path) -> None:
    policy = Policy(min_nodes=1, max_nodes=2)
    async with serving(tmp_path, policy) as (shell, streams):
        a, b = Stream(streams, "a"), Stream(streams, "b")
        for each in (a, b):
            assert (await each.ordered(RUN)).world_size == 2
        await b.end()
        failure = pb.RankFailure(exit_code=1, error_type="ValueError", message="b is silent")
        a.say(report=pb.NodeReport(round=1, phase=pb.NodeReport.FAILED, failures=[failure]))
        a.say(spare_store=pb.SpareStore(address="a:2"))
        assert (await a.ordered(RUN)).world_size == 1
        assert dict(shell.job.ledger.restarts) == {"node lost": 1}
        await a.end()


@within(120)
async def test_a_node_whose_stream_broke_just_before_the_end_is_waited_for(tmp_path: Path) -> None:
    policy = Policy(min_nodes=2, max_nodes=2, lease=60.0)
    async with serving(tmp_path, policy) as (shell, streams):
        a, b = Stream(streams, "a"), Stream(streams, "b")
        for each in (a, b):
            await each.ordered(RUN)
        await b.end()
        shell.fold(ev.DrainAsked(None, "maintenance"))
        assert (await a.ordered(EXIT)).exit_code == DRAINED
        a.say(leaving=pb.Leaving(reason="told to exit"))
        await a.end()
        farewell = asyncio.create_task(streams.farewell(15.0))
        back = Stream(streams, "b", RUNS)
        assert (await back.ordered(EXIT)).exit_code == DRAINED
        assert not farewell.done()
        await back.end()
        farewell.cancel()


@within(120)
async def test_who_is_back_takes_no_turn_of_those_that_are_knocked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master starts again, all of its nodes come back, and then one is gone: that is seen at once."""
    monkeypatch.setattr(served, "KNOCKS_A_SECOND", 1.0)
    monkeypatch.setattr(served, "BURST", 1)
    doors = {f"n{number}": SILENT for number in range(40)} | {"n39": REFUSES}
    policy = Policy(min_nodes=1, max_nodes=len(doors), settle=0.1)
    async with serving(tmp_path, policy) as (_, streams):
        for stream in [Stream(streams, name, knock_address=at) for name, at in doors.items()]:
            await stream.ordered(RUN)
    async with serving(tmp_path, policy) as (shell, streams):
        while not all(node.asked for node in shell.job.nodes.values()):
            await asyncio.sleep(0.01)
        back = {name: Stream(streams, name, RUNS, knock_address=at) for name, at in doors.items()}
        for stream in back.values():
            await stream.ordered(RUN)
        await back["n39"].end()
        while NodeId("n39") in shell.job.nodes:
            await asyncio.sleep(0.01)
        assert dict(shell.job.ledger.restarts) == {"node lost": 1}


async def one_of_two(shell: Shell, streams: Streams) -> Stream:
    """Two train, then b's stream ends, and knocks at it go unanswered; returns a's."""
    a, b = Stream(streams, "a"), Stream(streams, "b", knock_address=SILENT)
    for each in (a, b):
        await each.ordered(RUN)
    await b.end()
    while shell.job.nodes[NodeId("b")].unanswered < SILENT_KNOCKS:
        await asyncio.sleep(0.01)
    return a


@within(120)
async def test_who_came_back_while_the_disk_was_full_is_not_lost(small_disk: Path) -> None:
    """Its lease ran out meanwhile, and nothing could be written."""
    policy = Policy(min_nodes=1, max_nodes=2, lease=8.0)
    async with serving(small_disk, policy) as (shell, streams):
        a = await one_of_two(shell, streams)
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        while not shell.stuck:
            await asyncio.sleep(0.01)
        back = Stream(streams, "b", RUNS)
        await back.heard.get()
        for _ in range(100):  # agents say such things with every heartbeat
            a.say(unit=pb.UnitDeclared(round=1, unit=3))
            a.say(leaving=pb.Leaving(reason="taken away", drain=True))
        while not a.said.empty():
            await asyncio.sleep(0.01)
        ballast.unlink()
        while shell.stuck:
            await asyncio.sleep(0.01)
        assert shell.job.nodes[NodeId("b")].state is NodeState.ATTACHED
        assert not shell.job.ledger.restarts
        assert shell.job.last_round == 1
        assert shell.job.unit == 1, "what is said again was kept"


@within(120)
async def test_who_is_back_is_heard_by_a_master_that_stood_still(tmp_path: Path) -> None:
    """Another node's word comes first, and time that nobody could be heard in takes nothing."""
    policy = Policy(min_nodes=1, max_nodes=2, lease=5.0)
    async with serving(tmp_path, policy) as (shell, streams):
        a = await one_of_two(shell, streams)
        a.say(unit=pb.UnitDeclared(round=1, unit=2))
        back = Stream(streams, "b", RUNS, knock_address=SILENT)
        time.sleep(policy.lease + 1)  # noqa: ASYNC251 - as when the machine is suspended
        await back.heard.get()
        while shell.job.nodes[NodeId("b")].state is not NodeState.ATTACHED:
            await asyncio.sleep(0.01)
        assert not shell.job.ledger.restarts


@within(120)
async def test_who_syncs_hears_what_its_last_words_make_of_it_first(tmp_path: Path) -> None:
    """And is answered where it has said nothing, or nothing new."""
    policy = Policy(min_nodes=1, max_nodes=1)
    async with serving(tmp_path, policy) as (_, streams):
        a = Stream(streams, "a")
        await a.ordered(RUN)
        a.say(sync=pb.Sync())
        assert (await a.heard.get()).HasField("synced")
        a.say(leaving=pb.Leaving(reason="its launcher got SIGTERM"))
        at = pb.Moment(round=1, step=5)
        holding = pb.Holding(moment=at, world_size=1, ranks=[0], units=[0])
        a.say(snapshots=pb.Snapshots(checkpoint="/data/run", holdings=[holding]))
        a.say(sync=pb.Sync())
        heard = []
        while not (message := await a.heard.get()).HasField("synced"):
            heard.append(message)
        orders = [each.snapshots for each in heard if each.HasField("snapshots")]
        assert [(one.moment, [*one.ranks]) for one in orders[-1].flush] == [(at, [0])]
        assert orders[-1].pending
        await a.end()

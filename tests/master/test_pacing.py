"""What ranks tell of their times in heartbeats, and what is made of it."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from elastic.master.events import NodeId
from elastic.master.pacing import Pacing
from elastic.master.policy import Policy
from elastic.master.shell import Shell
from elastic.master.streams import Streams
from elastic.proto import master_pb2 as pb
from tests.master.serving import within
from tests.master.streaming import RUN, Stream, serving

POLICY = Policy(min_nodes=4, max_nodes=4)
NAMES = "abcd"
STEP = 0.05
INTERVALS = 20


def beat(rank: int, end: int, compute: float, *, stage: int = 0) -> pb.Heartbeat:
    pace = pb.Pace(end=end, compute=compute, waiting=0.01, least=0.004, stage=stage)
    return pb.Heartbeat(
        round=1, ranks=[pb.RankProgress(rank=rank, ticks=end, interval=STEP, pace=pace)]
    )


async def length(stream: Stream) -> int:
    """Steps of an interval, as the master says."""
    while True:
        message = await stream.heard.get()
        if message.HasField("measure"):
            assert message.measure.round == 1
            return message.measure.steps


class Round:
    """Four nodes with a rank each, which train."""

    def __init__(self, shell: Shell, streams: Streams) -> None:
        self.shell = shell
        self.nodes = [Stream(streams, name) for name in NAMES]
        self.length = 0
        self.ends = 0

    async def begin(self) -> None:
        self.place = [(await node.ordered(RUN)).node_rank for node in self.nodes]
        for node, rank in zip(self.nodes, self.place, strict=True):
            ranks = [pb.RankProgress(rank=rank, ticks=1, interval=STEP)]
            node.say(heartbeat=pb.Heartbeat(round=1, ranks=ranks))
        lengths = [await length(node) for node in self.nodes]
        assert len({*lengths}) == 1
        self.length = lengths[0]

    async def run(
        self,
        count: int,
        computes: Iterable[float],
        *,
        silent: int = -1,
        stages: bool = False,
        devices: Iterable[float] = (),
    ) -> None:
        """So many intervals, in which ranks compute for so many seconds a step. devices: theirs; 0: it is not told."""
        computes, devices = [*computes], [*devices] or [0.0] * len(self.nodes)
        for _ in range(count):
            self.ends += self.length
            for node, rank in zip(self.nodes, self.place, strict=True):
                if rank != silent:
                    noise = 1 + 0.002 * ((self.ends // self.length + rank) % 3)
                    stage = 1 + rank // 2 if stages else 0
                    told = beat(rank, self.ends, noise * computes[rank], stage=stage)
                    if device := noise * devices[rank]:
                        took = pb.PaceOnDevice(
                            compute=device,
                            backward=0.6 * device,
                            waiting=0.05 - device,
                            least=0.001,
                        )
                        told.ranks[0].pace.device.CopyFrom(took)
                    node.say(heartbeat=told)
            for node in self.nodes:
                while not node.said.empty():
                    await asyncio.sleep(0)
            await asyncio.sleep(0)

    @property
    def slow(self) -> list[tuple[int, ...]]:
        current = self.shell.job.round
        assert current is not None
        return [one.ranks for one in current.stragglers]

    async def end(self) -> None:
        for node in self.nodes:
            await node.end()


@within(120)
async def test_a_slow_rank_is_told_of_until_it_is_slow_no_more(tmp_path: Path) -> None:
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        assert train.length == round(POLICY.straggler_interval / STEP)
        await train.run(INTERVALS, [0.04] * 4)
        assert train.slow == []
        await train.run(INTERVALS, [0.04, 0.04, 0.048, 0.04])
        assert train.slow == [(2,)]
        current = shell.job.round
        assert current is not None
        (told,) = current.stragglers
        assert told.nodes == (NodeId(NAMES[train.place.index(2)]),)
        assert "computes 20% longer" in shell.reason
        await train.run(INTERVALS, [0.04] * 4)
        assert train.slow == []
        assert shell.reason.startswith("no longer: rank 2 on ")
        await train.end()


@within(120)
async def test_of_ranks_on_gpus_their_devices_are_compared(tmp_path: Path) -> None:
    """All hosts take as long; who tells nothing of its device in an interval is not compared by its host's."""
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        await train.run(INTERVALS, [0.05] * 4, devices=[0.04, 0.04, 0.048, 0.04])
        assert train.slow == [(2,)]
        assert "on the device" in shell.reason
        await train.run(INTERVALS, [0.05, 0.05, 0.05, 0.09], devices=[0.04, 0.04, 0.048, 0.0])
        assert train.slow == [(2,)]
        await train.run(INTERVALS, [0.05] * 4, devices=[0.04] * 4)
        assert train.slow == []
        await train.end()


@within(120)
async def test_who_tells_nothing_holds_up_no_verdict_about_others(tmp_path: Path) -> None:
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        await train.run(1, [0.04] * 4)
        await train.run(INTERVALS, [0.04, 0.04, 0.048, 0.04], silent=0)
        assert train.slow == [(2,)]
        await train.end()


@within(120)
async def test_a_rank_without_an_optimizer_is_not_compared_and_others_are(tmp_path: Path) -> None:
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        await train.run(INTERVALS, [0.04] * 4, silent=3)
        await train.run(INTERVALS, [0.04, 0.048, 0.04, 0.04], silent=3)
        assert train.slow == [(1,)]
        await train.end()


@within(120)
async def test_stages_of_a_pipeline_are_compared_with_themselves(tmp_path: Path) -> None:
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        await train.run(INTERVALS, [0.02, 0.02, 0.04, 0.04], stages=True)
        assert train.slow == []
        await train.run(INTERVALS, [0.02, 0.024, 0.04, 0.04], stages=True)
        assert train.slow == [(1,)]
        await train.end()


@within(120)
async def test_intervals_follow_the_steps_that_are_measured(tmp_path: Path) -> None:
    """What a heartbeat says of a round's first steps is not what they take."""
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        await train.run(1, [0.24] * 4)
        assert {await length(node) for node in train.nodes} == {20}
        await train.end()


@within(120)
async def test_nodes_that_tell_of_unlike_intervals_get_longer_ones(tmp_path: Path) -> None:
    """A long first step makes intervals end more often than a node gives a sign of life: of each it tells the newest."""
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        for number in range(1, 13):
            node, rank = train.nodes[number % 4], train.place[number % 4]
            node.say(heartbeat=beat(rank, number * train.length, STEP / 4 - 0.01))
            while not node.said.empty():
                await asyncio.sleep(0)
        assert {await length(node) for node in train.nodes} == {4 * train.length}
        await train.end()


@within(120)
async def test_numbers_that_are_none_are_passed_over(tmp_path: Path) -> None:
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        for number in (float("nan"), float("inf"), -1.0):
            await train.run(INTERVALS, [0.04, 0.04, number, 0.04])
        assert train.slow == []
        await train.end()


@within(120)
async def test_another_master_takes_back_nothing_before_it_knows(tmp_path: Path) -> None:
    async with serving(tmp_path, POLICY) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        await train.run(INTERVALS, [0.04, 0.04, 0.048, 0.04])
        streams._pacing = Pacing(shell, streams.sessions)
        for node in train.nodes:
            streams.sessions[NodeId(node.node)].measures = (0, 0)
        await train.run(9, [0.04, 0.04, 0.048, 0.04])
        assert train.slow == [(2,)]
        await train.run(INTERVALS, [0.04] * 4)
        assert train.slow == []
        await train.end()


@within(120)
async def test_what_a_larger_round_has_told_is_nothing_to_a_smaller_one(tmp_path: Path) -> None:
    """Three of its four ranks have told of an interval when the fourth is lost: all of three, but others."""
    policy = Policy(min_nodes=3, max_nodes=4)
    async with serving(tmp_path, policy) as (shell, streams):
        train = Round(shell, streams)
        await train.begin()
        await train.run(1, [0.04] * 4, silent=0)
        lost = train.nodes[train.place.index(0)]
        await lost.end()
        left = [node for node in train.nodes if node is not lost]
        failure = pb.RankFailure(exit_code=1, message="a peer is silent")
        for node in left:
            node.say(report=pb.NodeReport(round=1, phase=pb.NodeReport.FAILED, failures=[failure]))
            node.say(spare_store=pb.SpareStore(address=f"{node.node}:2"))
        for node in left:
            rank = (await node.ordered(RUN)).node_rank
            node.say(heartbeat=pb.Heartbeat(round=2, ranks=[pb.RankProgress(rank=rank)]))
        for node in left:
            await node.end()  # which raises what a heartbeat did

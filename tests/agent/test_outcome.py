"""A node's word on how its round ended."""

import asyncio

from elastic.agent.outcome import Outcome
from elastic.proto import master_pb2 as pb


def test_hundreds_of_failures_are_told_whole_and_not_each_with_all_before_it() -> None:
    async def test() -> list[pb.NodeReport]:
        told: asyncio.Queue[pb.FromAgent] = asyncio.Queue()
        outcome = Outcome(told.put_nowait)
        outcome.running(3)
        reports: list[pb.NodeReport] = []
        for rank in range(400):
            outcome.failed(pb.RankFailure(rank=rank, exit_code=1, log_tail="x" * 4096))
            await asyncio.sleep(0)  # deaths are seen one by one
        while not reports or len(reports[-1].failures) < 400:
            reports.append((await told.get()).report)
        return reports

    reports = asyncio.run(asyncio.wait_for(test(), 60.0))
    assert len(reports[0].failures) < 10, "the first one waited"
    assert all(report.round == 3 for report in reports)
    assert len(reports) < 100, "nearly as many reports as failures"


def test_the_end_of_a_round_is_told_at_once() -> None:
    async def test() -> pb.NodeReport:
        told: asyncio.Queue[pb.FromAgent] = asyncio.Queue()
        outcome = Outcome(told.put_nowait)
        outcome.running(2)
        assert told.empty(), "that it runs is no news"
        outcome.finished()
        return (await told.get()).report

    assert asyncio.run(asyncio.wait_for(test(), 60.0)).phase == pb.NodeReport.FINISHED


def test_who_ended_well_is_told_of_where_others_do_not() -> None:
    """At the end of a job it would be a message a rank for nothing."""

    async def test() -> list[pb.NodeReport]:
        told: asyncio.Queue[pb.FromAgent] = asyncio.Queue()
        outcome = Outcome(told.put_nowait)
        outcome.running(2)
        outcome.ended([1])
        assert told.empty()
        reports = [(await told.get()).report]
        outcome.failed(pb.RankFailure(rank=0, exit_code=1))
        reports.append((await told.get()).report)
        outcome.ended([1, 2])
        reports.append((await told.get()).report)
        outcome.running(3)
        outcome.ended([1])
        outcome.finished()
        return [*reports, (await told.get()).report]

    *reports, done = asyncio.run(asyncio.wait_for(test(), 60.0))
    assert [[*report.ended] for report in reports] == [[1], [1], [1, 2]]
    assert (done.phase, [*done.ended]) == (pb.NodeReport.FINISHED, [])

"""What a job says of itself."""

import asyncio
import json
from pathlib import Path

import pytest

from elastic.master import events as ev
from elastic.master.report import report
from elastic.proto import job_folder
from elastic.proto import master_pb2 as pb
from tests.master.builders import BUG, KILLED, failed, running
from tests.master.serving import Agent, master


def test_a_running_job() -> None:
    core = running("a", "b", max_restarts=1)
    core.feed(ev.Progressed(1, 3), 20.0)
    core.feed(failed("b", 1, KILLED), 21.0)
    found = report(core.job, 30.0)
    assert json.loads(json.dumps(found)) == found
    assert found["result"] is None
    assert found["seconds"] == 30.0
    assert found["restarts_by_cause"] == {"killed": 1}
    assert found["restarts"] == core.job.restart_count
    assert found["seconds_lost_by_cause"] == {"start": 20.0, "killed": 10.0}
    (interruption,) = found["interruptions"]
    assert interruption["downtime_seconds"] is None
    assert report(core.job, 40.0)["seconds"] == 40.0


def test_a_failed_job() -> None:
    core = running("a")
    core.feed(failed("a", 1, BUG), 21.0)
    found = report(core.job, 99.0)
    assert found["seconds"] == 21.0, "time stands still once it is over"
    assert found["result"] == {
        "outcome": "failed", "exit_code": 1, "reason": core.reason(), "class": "UserError", "rank": 0,
        "exception": "ValueError: bad value 17",
        "fingerprint": "script error|1|ValueError|train.py:3 in step|bad value #",
    }  # fmt: skip
    (seen,) = found["failures"]
    assert (seen["node"], seen["error_type"]) == ("a", "ValueError")


def life(folder: Path, number: int, *, finished: bool) -> tuple[str, str]:
    """Serve the job in `folder` until it is over: its uid and how it ended, as reported."""

    async def run() -> None:
        async with master(folder) as address, Agent(address, incarnation=number) as agent:
            order = await agent.ordered(pb.Directive.RUN)
            assert job_folder.read_report(folder) is None, "it runs"
            if finished:
                await agent.report(pb.NodeReport.FINISHED, order.round)
                await agent.ordered(pb.Directive.EXIT)

    asyncio.run(run())
    return told(folder / job_folder.REPORT)


def told(path: Path) -> tuple[str, str]:
    found = json.loads(path.read_text())
    return found["job"], found["result"]["outcome"]


def test_every_life_of_a_job_leaves_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = (True, False, True)
    lives = [life(tmp_path, number, finished=end) for number, end in enumerate(ends)]
    assert [outcome for _, outcome in lives] == ["succeeded", "drained", "succeeded"]
    assert lives[0][0] != lives[1][0] == lives[2][0]
    assert [told(tmp_path / f"report_{epoch}.json") for epoch in (1, 2)] == lives[:2]
    monkeypatch.setattr(job_folder, "KEEP_REPORTS", 2)
    lives.append(life(tmp_path, 3, finished=True))
    assert sorted(path.name for path in tmp_path.glob("report*")) == [
        "report.json", "report_2.json", "report_3.json",
    ]  # fmt: skip
    assert told(tmp_path / "report_3.json") == lives[2]

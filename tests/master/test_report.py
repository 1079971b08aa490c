"""What a job says of itself."""

import json

from elastic.master import events as ev
from elastic.master.report import report
from tests.master.builders import BUG, KILLED, failed, running


def test_a_running_job() -> None:
    core = running("a", "b", max_restarts=1)
    core.feed(ev.Progressed(1, 3), 20.0)
    core.feed(failed("b", 1, KILLED), 21.0)
    found = report(core.job, 30.0)
    assert json.loads(json.dumps(found)) == found
    assert found["result"] is None
    assert found["seconds"] == 30.0
    assert found["restarts_by_cause"] == {"killed": 1}
    assert found["seconds_lost_by_cause"] == {"start": 20.0, "killed": 10.0}
    (interruption,) = found["interruptions"]
    assert interruption["downtime_seconds"] is None
    assert report(core.job, 40.0)["seconds"] == 40.0


def test_a_failed_job() -> None:
    core = running("a")
    core.feed(failed("a", 1, BUG), 21.0)
    found = report(core.job, 99.0)
    assert found["seconds"] == 21.0, "time stands still once it is over"
    assert found["result"] == {"outcome": "failed", "exit_code": 1, "reason": core.reason()}
    (seen,) = found["failures"]
    assert (seen["node"], seen["error_type"]) == ("a", "ValueError")

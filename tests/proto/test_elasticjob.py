"""What operator and master read of each other."""

import pytest

from elastic.proto import elasticjob
from elastic.proto.elasticjob import Accepted, JobState, PodFailure
from elastic.proto.errors import ProtocolMismatch
from elastic.proto.schema import dump


def test_each_reads_what_the_other_wrote() -> None:
    told = Accepted(generation=3, spec={"worker": {"replicas": 2}}, wanted="Suspend", attempt=2)
    failure = PodFailure(time=1.5, pod="p", cause="OOMKilled", action="ReplacePod", reason="why")
    state = JobState(generation=3, attempt=2, state="Running", round=4, last_failures=(failure,))
    status = {"accepted": dump(told), "job": dump(state)}
    assert elasticjob.accepted(status) == told
    assert elasticjob.job_state(status) == state
    assert elasticjob.accepted({}) is None
    assert elasticjob.job_state({}) is None


def test_a_neighbours_new_field_is_left_out_and_another_format_refused() -> None:
    told = {"generation": 1, "attempt": 1, "state": "Running", "news": {"a": 1}}
    assert elasticjob.job_state({"job": told}) == JobState(generation=1, attempt=1, state="Running")
    with pytest.raises(ProtocolMismatch, match=r"status\.job has format 2, this release reads 1"):
        elasticjob.job_state({"job": {**told, "format": 2}})

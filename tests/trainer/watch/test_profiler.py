"""Steps under a profiler."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.watching import WatchFlags
from elastic.trainer.watch.profiler import StepProfiler


@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [
        (0, 6, {"step 3", "step 4"}),
        (0, 4, {"step 3", "step 4"}),
        (0, 3, {"step 3"}),
        (2, 6, {"step 3", "step 4"}),  # a life that goes on from there
        (3, 6, {"step 4"}),
        (4, 6, set()),
        (0, 1, set()),
    ],
)
def test_it_records_the_steps_that_were_asked_for(
    tmp_path: Path, begin: int, end: int, found: set[str]
) -> None:
    trace = tmp_path / "folder" / "trace.json.gz"
    profiler = StepProfiler(2, 4, trace)
    for finished in range(begin, end):
        profiler.step(finished)
        with record_function(f"step {finished + 1}"):
            torch.ones(3).sum()
    profiler.close()
    assert trace.exists() == bool(found)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if found else []
    assert {one["name"] for one in events if one["name"].startswith("step ")} == found


def test_a_trace_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace.json.gz"
    trace.symlink_to("/dev/full")
    profiler = StepProfiler(1, 2, trace)
    for finished in range(3):
        profiler.step(finished)
        torch.ones(3).sum()
    profiler.close()
    assert [one.getMessage() for one in caplog.records] == [
        f"the trace {trace} is lost: No space left on device"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nsys_is_for_gpus() -> None:
    with pytest.raises(UsageError, match="add --use-pytorch-profiler"):
        StepProfiler(10, 12, None)


def test_no_steps_are_no_profile() -> None:
    with pytest.raises(UsageError, match="below --profile-step-end"):
        WatchFlags(profile_step_start=3, profile_step_end=3)

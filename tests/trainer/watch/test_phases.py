import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.watch import phases
from elastic.trainer.watch.phases import HostStamps, NoClock, PhaseClock, Span, Trace
from tests.full_disk import files_of_at_most


class Told(HostStamps):
    """Marks that a test sets, known only when it says so."""

    def __init__(self) -> None:
        self.now, self.known = 0.0, float("inf")

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float, *, wait: bool) -> bool:
        return wait or mark <= self.known


def test_phases_lie_end_to_end() -> None:
    stamps = Told()
    clock = PhaseClock(stamps)
    stamps.now = 5.0
    for step in (1, 2):
        clock.begin(step)
        stamps.now += 1
        with clock.inside("data"):
            stamps.now += 2
        clock.switch("forward")
        stamps.now += 3
        with clock.inside("save"):
            stamps.now += 4
        stamps.now += 5
    clock.switch("log")
    stamps.now += 1
    with clock.paused(), clock.inside("data"):
        stamps.now += 7
    stamps.now += 5
    assert clock.take() == {"data": 2, "forward": 8, "save": 4, "log": 3, "other": 1}
    stamps.now += 100
    clock.begin(3)
    assert clock.take() == {"log": 100}


@given(steps=st.lists(st.lists(st.tuples(st.sampled_from(phases.PHASES), st.integers(0, 9)))))
def test_they_add_up_to_the_steps(steps: list[list[tuple[str, int]]]) -> None:
    stamps = Told()
    clock = PhaseClock(stamps)
    for number, cuts in enumerate(steps, 1):
        clock.begin(number)
        for phase, ticks in cuts:
            clock.switch(phase)
            stamps.now += ticks
    clock.switch("other")
    mean = stamps.now / max(len(steps), 1)
    assert sum(clock.take().values()) == pytest.approx(mean)


def test_a_trace_is_read_after_a_kill_and_waits_for_nobody(tmp_path: Path) -> None:
    stamps = Told()
    stamps.known = 2.0
    with contextlib.closing(PhaseClock(stamps, Trace(tmp_path, 3))) as clock:
        for step in (1, 2, 3):
            clock.begin(step)
            clock.switch("forward")
            stamps.now += 1.5
            clock.switch("backward")
            stamps.now += 0.5
        (path,) = tmp_path.glob("rank-00003.*.json")
        assert told(json.loads(path.read_text() + "{}]")) == PARTS[:2], "of marks up to 2 s"
    found = json.loads(path.read_text())
    assert told(found) == PARTS
    starts = [one["ts"] for one in found[:-1]]
    assert starts == sorted(starts)
    assert {one["pid"] for one in found[:-1]} == {3}


PARTS = [(step, *part) for step in (1, 2, 3) for part in (("forward", 1.5), ("backward", 0.5))]


def told(events: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
    return [
        (event["args"]["iteration"], event["name"], event["dur"] / 1e6)
        for event in events
        if event.get("dur")
    ]


def test_a_disk_that_is_full_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace(tmp_path, 0)
    (path,) = tmp_path.iterdir()
    with files_of_at_most(path.stat().st_size):
        for step in range(3):
            trace.add(Span(step, "forward", 0.0, 1.0))
        trace.close()
    assert [one.getMessage() for one in caplog.records] == [f"{path} ends here: File too large"]


def test_the_clock_that_the_flag_asks_for(tmp_path: Path) -> None:
    assert isinstance(phases.clock(None, 0, cuda=False), NoClock)
    with contextlib.closing(phases.clock(tmp_path / "traces", 0, cuda=False)) as clock:
        clock.begin(1)
        with clock.inside("forward"):
            torch.ones(3).sum()
    assert len(list((tmp_path / "traces").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--trace-phases"):
        phases.clock(tmp_path / "file", 0, cuda=False)


def test_no_clock_does_nothing() -> None:
    clock = NoClock()
    clock.begin(1)
    with clock.inside("data"):
        clock.switch("forward")
    clock.close()
    assert clock.take() == {}


def test_one_line() -> None:
    line = phases.phase_line({"data": 0.001, "forward": 0.003})
    assert line == " phases of a step (ms): data 1.0 (25.0%) | forward 3.0 (75.0%) | sum 4.0"

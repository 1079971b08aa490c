import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from elastic.proto.errors import UsageError
from elastic.trainer.watch.timers import Timers, summary


def test_a_timer_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    timers = Timers(log_level=1)
    timers("forward", log_level=1).start(barrier=True)
    timers("forward").stop()
    first = timers("forward").elapsed(reset=False)
    timers("forward").start()
    timers("forward").stop()
    both = timers("forward").elapsed()
    assert both > first > 0
    assert timers("forward").elapsed() == 0
    assert timers("forward").active_time() == both
    timers("forward").set_elapsed(0.5)
    timers.log(["forward", "unknown"], normalizer=2)
    assert capsys.readouterr().out == (
        "(min, max) time across ranks (ms):\n"
        "    forward ........................................: (250.00, 250.00)\n"
    )
    timers.log(["forward"])
    assert capsys.readouterr().out == "", "what was told is forgotten"


def test_a_timer_that_runs_goes_on_when_it_is_read() -> None:
    timer = Timers(log_level=2)("step")
    timer.start()
    first = timer.elapsed()
    timer.stop()
    assert timer.elapsed() > 0
    assert first > 0


def test_timers_above_the_level_do_nothing() -> None:
    timers = Timers(log_level=0)
    timers("forward", log_level=1).start()
    timers("forward").start()
    timers("forward").stop()
    assert timers.get_all_timers_string() is None
    with pytest.raises(UsageError, match="raise --timing-log-level"):
        timers("forward").elapsed()


def test_mistakes_are_sentences() -> None:
    timers = Timers(log_level=2)
    with pytest.raises(UsageError, match="timer a is stopped and was not started"):
        timers("a").stop()
    timers("a").start()
    with pytest.raises(UsageError, match="timer a was started and not stopped"):
        timers("a").start()
    with pytest.raises(UsageError, match="timer a has level 2, not 1"):
        timers("a", log_level=1)
    with pytest.raises(UsageError, match="levels go up to 2, not 3"):
        timers("b", log_level=3)


def test_what_is_told_of_ranks() -> None:
    times = [[0.1, 0.0], [0.3, 0.0], [0.0, 0.0]]
    dots = "    forward ........................................: "
    assert summary(["forward", "b"], times, "max") == f"max time across ranks (ms):\n{dots}300.00"
    assert summary(["forward", "b"], times, "minmax", 10) == (
        f"(min, max) time across ranks (ms):\n{dots}(10.00, 30.00)"
    )
    assert summary(["forward", "b"], times, "all") == (
        "times across ranks (ms):\n  forward:\n     rank  0: 100.00\n     rank  1: 300.00"
    )
    assert summary(["b"], [[0.0], [0.0]], "max") is None


def test_times_go_through_the_process_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        timers = Timers(log_level=0, log_option="all")
        timers("step", log_level=0).start(barrier=True)
        timers("step").stop(barrier=True)
        timers("step").set_elapsed(0.125)
        timers.log(["step", "other"], barrier=True)
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().out == ("times across ranks (ms):\n  step:\n     rank  0: 125.00\n")


class Points(list[tuple[str, float, int]]):
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.append((tag, value, step))


def test_points_are_of_the_slowest_rank() -> None:
    timers, points = Timers(log_level=0), Points()
    timers("step", log_level=0).set_elapsed(3.0)
    timers.write(["step", "other"], points, 7, normalizer=2)
    assert points == [("step-time", 1.5, 7)]

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.trainer.arguments.guard import GuardFlags
from elastic.trainer.arguments.logging import LoggingFlags
from elastic.trainer.arguments.watching import WatchFlags
from elastic.trainer.watch import guard, jsonl, reporter
from elastic.trainer.watch.flops import Flops
from elastic.trainer.watch.phases import HostStamps, PhaseClock
from elastic.trainer.watch.report import Step
from elastic.trainer.watch.reporter import Reporter
from tests.trainer.watch.boards import points

STEP = Step(
    iteration=0, consumed=0, batch_size=4, learning_rate=0.1, losses={"lm loss": 2.0}, grad_norm=1.0
)


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def made(folder: Path, now: Hand, *, iteration: int = 0, **more: Any) -> Reporter:
    flags = LoggingFlags(
        log_interval=2, log_throughput=True, tensorboard_dir=folder / "tb",
        log_world_size_to_tensorboard=True, log_loss_scale_to_tensorboard=False,
        log_timers_to_tensorboard=True,
    )  # fmt: skip
    watching = WatchFlags(metrics_file=folder / "metrics.jsonl", device_peak_tflops=1e-6)
    return Reporter(
        flags, iterations=8, seq_length=100, devices=2, mfu=True, now=now,
        flops=Flops(palm=1000.0, matmul=500.0, megatron=250.0),
        peak=reporter.peak(watching, torch.device("cpu")),
        sinks=reporter.sinks(flags, iteration=iteration, consumed=iteration * 4, save=None, arguments={}),
        metrics=reporter.metrics(watching), **more,
    )  # fmt: skip


def train(reporter: Reporter, now: Hand, first: int, last: int) -> None:
    """A line every two steps, each of which takes 0.25 s; other things come in between."""
    reporter.begin()
    for number in range(first, last + 1, 2):
        steps = [
            replace(STEP, iteration=one, consumed=one * 4, losses={"lm loss": float(one)})
            for one in (number, number + 1)
        ]
        now.time += 0.25
        reporter.pause()
        now.time += 99
        reporter.begin()
        now.time += 0.25
        for step in steps:
            reporter.step(step)
        reporter.line()


def test_everybody_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = Hand()
    told = made(tmp_path, now)
    train(told, now, 1, 4)
    told.evaluation({"lm loss": 1.5}, 4, 16, suffix="-wiki")
    told.probes({"paris": {"probability": 0.25}}, 4, 16)
    _, verdict = guard.judge(
        guard.State(),
        guard.Seen(iteration=4, places=(12, 16), loss=float("nan")),
        GuardFlags(guard="warn"),
    )
    assert verdict
    told.verdict(verdict)
    told.close()
    lines = capsys.readouterr().out.splitlines()
    timeless = [re.sub(r"^ \[[\d: -]+\]", "", line) for line in lines]
    assert timeless[0] == (
        " iteration        2/       8 | consumed samples:            8 | elapsed time per iteration "
        "(ms): 250.0 | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: 1.000000E-01 | global "
        "batch size:     4 | lm loss: 1.500000E+00 | loss scale: 1.0 | grad norm: 1.000 | number of "
        "skipped iterations:   0 | number of nan iterations:   0 | tokens per second: 1600 | "
        "MFU (6N+12LHQT): 80.0% | MFU (matmul): 40.0% | MFU (causal): 20.0% |"
    )
    assert timeless[1].startswith(" iteration        4/")
    assert timeless[3].startswith(
        " validation-wiki loss at iteration 4 on validation set | lm loss"
    )
    assert timeless[5:] == [
        " probe paris at iteration 4 | probability: 2.500000E-01",
        " guard: iteration 4: lm loss nan is not finite",
    ]
    found = list(jsonl.read(tmp_path / "metrics.jsonl"))
    assert [line["kind"] for line in found] == ["step", "step", "evaluation", "probe", "verdict"]
    assert found[0]["iterations"] == 8
    assert found[1]["losses"] == {"lm loss": 3.5}
    assert (found[2]["set"], found[2]["losses"]) == ("validation-wiki", {"lm loss": 1.5})
    shares = {"mfu": 0.8, "mfu_matmul": 0.4, "mfu_causal": 0.2}
    assert {name: found[0][name] for name in shares} == pytest.approx(shares)
    tags = points(tmp_path / "tb")
    for name, share in shares.items():
        assert [step for step, _ in tags[name]] == [2, 4]
        assert tags[name][0][1] == pytest.approx(share)
    assert tags["lm loss"] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert tags["iteration-time"] == [(2, 0.25), (4, 0.25)]
    assert tags["lm loss validation-wiki"] == [(4, 1.5)]
    assert tags["probe paris probability"] == [(4, 0.25)]
    assert set(tags) >= {"world-size", "learning-rate", "batch-size", "grad-norm", "throughput"}
    assert "loss-scale" not in tags
    assert "lm loss vs samples" in points(tmp_path / "tb" / "samples")


def test_a_restart_doubles_nothing(tmp_path: Path) -> None:
    for begin in (0, 2):
        now = Hand()
        told = made(tmp_path, now, iteration=begin)
        train(told, now, begin + 1, begin + 4)
        told.close()
    assert [step for step, _ in points(tmp_path / "tb")["lm loss"]] == [1, 2, 3, 4, 5, 6]
    assert list(jsonl.steps(tmp_path / "metrics.jsonl")) == [2, 4, 6]


def test_what_is_taken_back_counts_for_no_line(tmp_path: Path) -> None:
    """Nor does its time, also where an evaluation lay in it."""
    now = Hand()
    told = made(tmp_path, now)
    told.begin()
    for number in (1, 2, 3, 4):
        now.time += number
        told.step(replace(STEP, iteration=number, consumed=number * 4))
        told.pause()
        now.time += 99
        told.begin()
    told.back(2, 8)
    now.time += 99
    told.begin()
    now.time += 3
    told.step(replace(STEP, iteration=3, consumed=12, losses={"lm loss": 5.0}))
    told.line()
    told.line()  # of nothing more
    told.back(2, 8)
    now.time += 99
    told.begin()
    now.time += 4
    told.step(replace(STEP, iteration=3, consumed=12, losses={"lm loss": 6.0}))
    told.line()
    told.close()
    first, second = jsonl.read(tmp_path / "metrics.jsonl")
    assert (first["steps"], first["seconds"], first["losses"]) == (3, 2.0, {"lm loss": 3.0})
    assert (second["steps"], second["seconds"], second["losses"]) == (1, 4.0, {"lm loss": 6.0})
    assert points(tmp_path / "tb")["lm loss"] == [(1, 2), (2, 2), (3, 6)]


def test_phases_are_told_with_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, clock = Hand(), PhaseClock(HostStamps())
    told = made(tmp_path, now, clock=clock)
    clock.begin(1)
    with clock.inside("forward"):
        now.time += 1
    told.step(replace(STEP, iteration=1))
    told.line()
    told.close()
    assert " phases of a step (ms): forward" in capsys.readouterr().out
    assert "forward" in list(jsonl.read(tmp_path / "metrics.jsonl"))[-1]["phases"]


def test_nothing_is_written_that_no_flag_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_MARK", raising=False)
    assert reporter.sinks(LoggingFlags(), iteration=0, consumed=0, save=None, arguments={}) == ()
    assert reporter.metrics(WatchFlags()) is None
    assert reporter.peak(WatchFlags(), torch.device("cpu")) is None

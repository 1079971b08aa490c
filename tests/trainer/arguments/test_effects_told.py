"""What a run says follows its arguments: console, TensorBoard and metrics, of the reporter that they make."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from elastic.trainer.arguments.settings import Settings
from elastic.trainer.watch import reporter
from elastic.trainer.watch.flops import Flops
from elastic.trainer.watch.report import Step
from elastic.trainer.watch.reporter import Reporter
from elastic.trainer.watch.tensorboard import Board
from tests.trainer.arguments.test_effects import TOLD, run
from tests.trainer.watch.boards import points

CALLS: list[object] = []
"""Of `wandb`, which there is a stand-in for."""


@pytest.fixture(autouse=True)
def wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> SimpleNamespace:
        CALLS.append(settings)
        return SimpleNamespace(
            log=lambda *values, step: CALLS.append((values, step)), finish=lambda: None
        )

    stand_in = ModuleType("wandb")
    stand_in.__dict__["init"] = init
    monkeypatch.setitem(sys.modules, "wandb", stand_in)


class Ticks:
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


def made(settings: Settings) -> Reporter:
    """The reporter of a run of eight steps on two CPUs."""
    flags, watching = settings.logging, settings.watching
    return Reporter(
        flags, iterations=8, seq_length=100, devices=2, mfu=watching.log_mfu, now=Ticks(),
        flops=Flops(palm=1000.0, matmul=500.0, megatron=2e9),
        peak=reporter.peak(watching, torch.device("cpu")) or 1e6,
        sinks=reporter.sinks(flags, iteration=0, consumed=0, save=None),
        metrics=reporter.metrics(watching),
    )  # fmt: skip


def told(said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """All that a run of four steps and an evaluation says, times of day left out."""
    folder.mkdir()
    CALLS.clear()
    settings = run(said.format(folder))
    speaker = made(settings)
    writers = [one.writer for one in speaker._sinks if isinstance(one, Board)]
    queue = [writer.max_queue for writer in writers if writer is not None]
    for number in range(1, 5):
        step = Step(
            iteration=number, consumed=4 * number, batch_size=4, learning_rate=0.1,
            losses={"lm loss": 1.0 * number}, grad_norm=1.0,
        )  # fmt: skip
        speaker.step(step)
        if number % settings.logging.log_interval == 0:
            speaker.line()
    speaker.evaluation({"lm loss": 1.5}, 4, 16)
    speaker.close()
    lines = re.sub(r"\[\d{4}-[^]]*\]", "", capsys.readouterr().out)
    metrics = [re.sub(r'"time": [^,}]*', "", file.read_text()) for file in folder.glob("*.jsonl")]
    board = points(folder / "t") if (folder / "t").exists() else None
    return f"{lines} {metrics} {board} {queue} {[str(call) for call in CALLS]}"


@pytest.mark.parametrize("name", TOLD)
def test_an_argument_changes_what_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside, changed = TOLD[name]
    before = told(beside, tmp_path / "before", capsys)
    assert told(beside, tmp_path / "again", capsys) == before
    assert told(f"{beside} {changed}", tmp_path / "after", capsys) != before

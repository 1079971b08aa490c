import math
from pathlib import Path

import pytest

from elastic.trainer.optimizer import Schedule
from elastic.trainer.settings import parse

NEEDED = ["--data-dir=d", "--save=s"]


def test_flags_have_megatrons_names() -> None:
    settings = parse([*NEEDED, "--train-iters=7", "--hidden-size=64", "--lr=0.5", "--min-lr=0.1"])
    assert (settings.data_dir, settings.save) == (Path("d"), Path("s"))
    assert (settings.steps, settings.hidden_size, settings.lr) == (7, 64, 0.5)
    assert settings.schedule.decay_steps == 7


@pytest.mark.parametrize(
    "flag", ["--steps=0", "--seed=-1", "--num-attention-heads=3", "--min-lr=1", "--save-interval=0"]
)
def test_a_mistake_is_one_line_and_status_2(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse([*NEEDED, flag])
    assert exit_info.value.code == 2
    assert flag[2:].split("=")[0].replace("-", "_") in capsys.readouterr().err


def test_the_learning_rate_rises_then_falls_by_a_cosine() -> None:
    schedule = Schedule(lr=1.0, min_lr=0.2, warmup_steps=4, decay_steps=12)
    assert [schedule.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.at(6) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert schedule.at(8) == pytest.approx(0.6)
    assert schedule.at(12) == schedule.at(1000) == 0.2


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    schedule = Schedule(lr=1.0, min_lr=0.0, warmup_steps=10, decay_steps=5)
    assert [schedule.at(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]

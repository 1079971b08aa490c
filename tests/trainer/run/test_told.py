"""What is made of steps' numbers, which are there at once on a CPU."""

import errno
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.run.plan import Plan
from elastic.trainer.run.step import Sums
from elastic.trainer.run.told import MOST_STUCK, Coming, Numbers, Taken
from elastic.trainer.transfers import ToHost
from elastic.trainer.watch import guard
from elastic.trainer.watch.flops import Flops
from elastic.trainer.watch.report import Step
from elastic.trainer.watch.reporter import Reporter
from elastic.trainer.watch.tensorboard import Board
from elastic.trainer.watch.timers import Timers
from tests.trainer.arguments.test_effects import run


def taken(
    iteration: int,
    norm: float = 1.0,
    unnamed: float = 0.0,
    *,
    loss: float = 2.0,
    skipped: bool = False,
    stuck: int = 0,
) -> Taken:
    totals = {
        "lm loss": torch.tensor([loss, 3.0]).double(),
        "lm loss wiki": torch.tensor([2.0, 3.0]).double(),
        "lm loss code": torch.tensor([0.0, 0.0]).double(),
    }
    sums = Sums(totals, torch.tensor(3.0).double(), torch.tensor(unnamed).double())
    step = Step(
        iteration=iteration, consumed=8 * iteration, batch_size=8, learning_rate=0.1, losses={},
        loss_scale=1.0, skipped=skipped,
    )  # fmt: skip
    return Taken(
        step,
        Coming(sums, torch.tensor(norm), torch.tensor(4.0).double()),
        ToHost(torch.tensor(5.0)),
        stuck,
    )


def numbers(settings: Settings, *, saves: bool) -> Numbers:
    plan = Plan(sizes=settings.schedules.batch_sizes(), steps=100, leaf_size=2)
    return Numbers(settings, plan, None, Timers(), saves=saves)


def test_a_step_has_all_that_the_device_has_said() -> None:
    whole = taken(1, norm=1 / 3).whole()
    third = float(torch.tensor(2 / 3))
    assert whole.losses == {"lm loss": third}
    assert whole.sources == {"wiki": third}, "the other has no tokens in it"
    assert whole.grad_norm == float(torch.tensor(1 / 3))
    assert (whole.num_zeros, whole.params_norm) == (4, 5.0)


def test_what_is_of_nothing_is_left_out_unless_all_is() -> None:
    none, some = torch.zeros(2).double(), torch.tensor([3.0, 2.0]).double()
    zero = torch.tensor(0.0).double()

    def means(tokens: float, **totals: torch.Tensor) -> dict[str, float]:
        sums = Sums(totals, torch.tensor(tokens).double(), zero)
        return Coming(sums, torch.tensor(1.0), None).means()

    assert means(2.0, loss=some, aux=none) == {"loss": 1.5}
    assert math.isnan(means(0.0, loss=none)["loss"])
    assert math.isinf(means(2.0, loss=torch.tensor([1.0, 0.0]).double())["loss"])


def test_reports_that_came_later_are_known_behind_a_line_and_not_of_what_was_taken_back() -> None:
    told = numbers(run("--log-interval 4"), saves=False)
    for iteration in (1, 2):
        told.take(taken(iteration, unnamed=1.0))
        told.tell()
    told.back(1, 8)
    assert not told.unnamed()
    told.take(taken(2, unnamed=2.0))
    told.take(taken(3))
    told.line(3)
    assert told.unnamed()
    assert not told.unnamed(), "they are agreed on"


@pytest.mark.parametrize(("saves", "ends"), [(True, 3), (False, 4)])
def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_saved_or_with_the_line(
    saves: bool, ends: int
) -> None:
    told = numbers(run("--log-interval 4"), saves=saves)

    def step(iteration: int) -> None:
        told.take(taken(iteration, math.nan if iteration == 3 else 1.0))
        told.judged(guard.State())
        if told.due(iteration):
            told.line(iteration)
        else:
            told.tell()

    for iteration in range(1, ends):
        step(iteration)
    said = r"iteration 3: the gradient is not finite \(lm loss 0.666667\)"
    with pytest.raises(UsageError, match=said):
        step(ends)


@pytest.mark.parametrize(
    ("loss", "stuck", "said"),
    [
        (2.0, MOST_STUCK - 1, ""),
        (math.nan, 0, r"iteration 1: the loss is not finite \(lm loss nan\), whatever it is scaled"),
        (2.0, MOST_STUCK, "overflowed in 10 steps in a row .* with the loss scale 1, which cannot fall"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("guard_flag", ["", "--guard warn", "--guard rollback"])
def test_a_skipped_step_ends_the_run_where_no_loss_scale_can_help(
    loss: float, stuck: int, said: str, *, saves: bool, guard_flag: str
) -> None:
    told = numbers(run(f"--log-interval 1 --fp16 {guard_flag}"), saves=saves)

    def step() -> guard.Verdict | None:
        told.take(taken(1, math.inf, loss=loss, skipped=True, stuck=stuck))
        _, verdict = told.judged(guard.State())
        if verdict is None or verdict.action != "rollback":
            told.line(1)
        return verdict

    if not said:
        assert step() is None
    elif guard_flag == "--guard rollback":
        verdict = step()
        assert verdict is not None
        assert verdict.what == "not finite"
    else:
        with pytest.raises(UsageError, match=said):
            step()


def test_the_end_of_a_run_is_a_line() -> None:
    told = numbers(run("--log-interval 4"), saves=False)
    told.take(taken(1, math.inf))
    told.tell()
    with pytest.raises(UsageError, match="iteration 1: the gradient is not finite"):
        told.end(1)


def test_timers_end_no_run_whose_board_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run(f"--log-timers-to-tensorboard --timing-log-level 1 --tensorboard-dir {tmp_path}")
    board = Board(tmp_path, iteration=0, consumed=0, arguments={})

    def fails(tag: str, *_: object) -> None:
        if tag == "optimizer-time":
            raise OSError(errno.ENOSPC, "No space left on device")

    assert board.writer is not None
    monkeypatch.setattr(board.writer, "add_scalar", fails)
    reporter = Reporter(
        settings.logging, iterations=9, seq_length=8, flops=Flops(palm=1.0, matmul=1.0, megatron=1.0),
        devices=1, peak=None, mfu=False, sinks=(board,), metrics=None,
    )  # fmt: skip
    timers = Timers(log_level=1)
    timers("optimizer", log_level=1).set_elapsed(0.5)
    plan = Plan(sizes=settings.schedules.batch_sizes(), steps=100, leaf_size=2)
    told = Numbers(settings, plan, reporter, timers, saves=False)
    told.take(taken(1))
    told.line(1)
    assert board.writer is None
    assert "optimizer" in capsys.readouterr().out
    reporter.close()


def test_a_step_without_the_loss_that_is_judged_is_not_judged() -> None:
    """As of a script whose steps are of text, or of images."""
    flags = "--guard warn --guard-window 16 --guard-warmup 16"
    told, state = numbers(run(flags), saves=False), guard.State()

    def step(iteration: int, text: float | None, image: float | None) -> guard.Verdict | None:
        nonlocal state
        totals = {
            name: torch.tensor([0.0, 0.0] if mean is None else [mean, 1.0]).double()
            for name, mean in (("text", text), ("image", image))
        }
        sums = Sums(totals, torch.tensor(3.0).double(), torch.tensor(0.0).double())
        coming = Coming(sums, torch.tensor(1.0), None)
        told.take(replace(taken(iteration), coming=coming))
        state, verdict = told.judged(state)
        return verdict

    for iteration in range(1, 81):
        odd = iteration % 2
        assert (
            step(iteration, 2.0 + 0.01 * (iteration % 7) if odd else None, None if odd else 900.0)
            is None
        )
    assert step(81, 900.0, None) is not None

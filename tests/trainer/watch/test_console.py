import math
from dataclasses import replace
from datetime import datetime
from functools import reduce

import pytest

from elastic.trainer.watch import console
from elastic.trainer.watch.flops import Flops
from elastic.trainer.watch.report import Speed, Step, Tally, metrics, scalars, speed

NOW = datetime(2026, 11, 23, 7, 5, 9)
STEP = Step(
    iteration=100, consumed=25600, batch_size=256, learning_rate=1.5e-4,
    losses={"lm loss": 3.25}, grad_norm=0.8166, loss_scale=65536.0, world_size=4,
)  # fmt: skip
SPEED = Speed(
    seconds=0.2134,
    tokens=494_321.4,
    throughput=412.34,
    mfu=0.488,
    mfu_matmul=0.4803,
    mfu_causal=0.45,
)


def test_the_line_is_megatrons() -> None:
    tally = Tally().add(replace(STEP, losses={"lm loss": 3.75})).add(STEP)
    line = console.log_line(STEP, tally, SPEED, NOW, iterations=500000, throughput=True)
    assert line == (
        " [2026-11-23 07:05:09] iteration      100/  500000 | consumed samples:        25600 |"
        " elapsed time per iteration (ms): 213.4 | throughput per GPU (TFLOP/s/GPU): 412.3 |"
        " learning rate: 1.500000E-04 | global batch size:   256 | lm loss: 3.500000E+00 |"
        " loss scale: 65536.0 | grad norm: 0.817 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )


def test_fields_that_are_there_only_now_and_then() -> None:
    step = replace(STEP, skipped_samples=512, num_zeros=7, params_norm=99.5, grad_norm=None)
    line = console.log_line(step, Tally(), SPEED, NOW, iterations=100, mfu=True)
    assert " | skipped samples:          512 | elapsed" in line
    assert " loss scale: 65536.0 | num zeros: 7 | params norm: 99.500 | number of skipped" in line
    assert line.endswith(
        " tokens per second: 494321 | MFU (6N+12LHQT): 48.8% | MFU (matmul): 48.0% | "
        "MFU (causal): 45.0% |"
    )
    assert "throughput" not in line
    assert "lm loss" not in line, "of no step there is no mean"
    unknown = replace(SPEED, mfu=None, mfu_matmul=None, mfu_causal=None)
    assert "MFU" not in console.log_line(step, Tally(), unknown, NOW, iterations=100, mfu=True)


def test_what_is_skipped_is_not_averaged() -> None:
    overflow = replace(STEP, losses={"lm loss": math.inf}, skipped=True)
    tally = Tally().add(STEP).add(overflow).add(replace(STEP, losses={"lm loss": 1.25}))
    assert (tally.advanced, tally.skipped, tally.nan, tally.steps) == (2, 1, 1, 3)
    assert tally.means() == {"lm loss": 2.25}
    lost = Tally().add(replace(STEP, losses={"lm loss": math.nan}))
    assert (lost.skipped, lost.nan) == (0, 1)
    assert "lm loss: NAN |" in console.log_line(STEP, lost, SPEED, NOW, iterations=1)


def test_losses_are_means_over_the_steps_that_have_them() -> None:
    """Those of data sources, too, which need not have tokens in the newest step."""
    steps = [
        replace(STEP, losses={"lm loss": 3.0}, sources={"wiki": 2.0, "code": 4.0}),
        replace(STEP, losses={"lm loss": 2.0, "aux": 0.5}, sources={"wiki": 1.0}),
        replace(STEP, losses={"lm loss": math.inf}, sources={"wiki": math.inf}, skipped=True),
        replace(STEP, losses={"lm loss": 1.0}, sources={"wiki": 0.0}),
    ]
    told = metrics(steps[-1], reduce(Tally.add, steps, Tally()), SPEED)
    assert told["losses"] == {"lm loss": 2.0, "aux": 0.5}
    assert told["sources"] == {"wiki": 1.0, "code": 4.0}


@pytest.mark.parametrize(("loss", "ppl"), [(math.log(8), "8.000000E+00"), (31.0, "4.851652E+08")])
def test_the_block_of_an_evaluation(loss: float, ppl: str) -> None:
    block = console.evaluation_lines("iteration 100 on test set", {"lm loss": loss}, "-wiki")
    assert block[1] == (
        f" validation-wiki loss at iteration 100 on test set | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {ppl} | "
    )
    assert block[0] == block[2] == "-" * (len(block[1]) + 1)


def test_tags_are_megatrons() -> None:
    step = replace(STEP, sources={"code": 2.5}, params_norm=3.0)
    assert scalars(step) == {
        "learning-rate": 1.5e-4, "batch-size": 256, "lm loss": 3.25, "lm loss code": 2.5,
        "loss-scale": 65536.0, "world-size": 4, "grad-norm": 0.8166, "params-norm": 3.0,
    }  # fmt: skip
    assert scalars(replace(step, skipped_samples=64))["skipped-train-samples"] == 64


def test_speed_is_of_a_step_and_of_a_device() -> None:
    flops = Flops(palm=3e9, matmul=2e9, megatron=1e9)
    found = speed(4.0, 2, 8000, flops=flops, devices=2, peak=30e12)
    assert found == Speed(
        seconds=2.0, tokens=2000.0, throughput=1.0, mfu=0.1, mfu_matmul=2 / 30, mfu_causal=1 / 30
    )
    assert speed(4.0, 2, 8000, flops=flops, devices=2, peak=None).mfu is None

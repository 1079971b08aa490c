"""Megatron's log lines, field by field, so that what reads its logs reads ours. Pure.

Rank 0 prints them, where Megatron has the last rank do it, the one that knows the loss: here all ranks
know it, and which rank is the last changes with every resize, while rank 0's log file stays where it is.

The time is written in whole seconds, as up to Megatron-core 0.15. A loss that is no number is
shown as NAN, which Megatron leaves out.
"""

import math
from collections.abc import Mapping
from datetime import datetime

from elastic.trainer.watch.report import Speed, Step, Tally

MFU = {"mfu": "MFU (6N+12LHQT)", "mfu_matmul": "MFU (matmul)", "mfu_causal": "MFU (causal)"}
"""What the log calls them."""


def log_line(
    step: Step,
    tally: Tally,
    speed: Speed,
    now: datetime,
    *,
    iterations: int,
    throughput: bool = False,
    mfu: bool = False,
) -> str:
    """The line after `step`; iterations: of the whole run.

    throughput: with `--log-throughput`; mfu: then fields follow that are not Megatron's.
    """
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}/{iterations:8d}",
        f"consumed samples: {step.consumed:12d}",
    ]
    if step.skipped_samples:
        fields.append(f"skipped samples: {step.skipped_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {speed.seconds * 1e3:.1f}")
    if throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {speed.throughput:.1f}")
    fields.append(f"learning rate: {step.learning_rate:.6E}")
    fields.append(f"global batch size: {step.batch_size:5d}")
    fields += [f"{name}: {loss:.6E}" for name, loss in tally.means().items()]
    fields.append(f"loss scale: {step.loss_scale:.1f}")
    if step.grad_norm is not None:
        fields.append(f"grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        fields.append(f"num zeros: {step.num_zeros}")
    if step.params_norm is not None:
        fields.append(f"params norm: {step.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {tally.skipped:3d}")
    fields.append(f"number of nan iterations: {tally.nan:3d}")
    if mfu:
        fields += _speed(speed)
    return " | ".join(fields) + " |"


def _speed(speed: Speed) -> list[str]:
    shares = [f"{MFU[name]}: {share:.1%}" for name, share in speed.shares.items()]
    return [f"tokens per second: {speed.tokens:.0f}", *shares]


def perplexity(loss: float) -> float:
    """e^loss, at most e^20."""
    return math.exp(min(20.0, loss))


def evaluation_lines(prefix: str, losses: Mapping[str, float], suffix: str = "") -> list[str]:
    """The block of three lines after an evaluation.

    prefix: such as `iteration 100 on validation set`; suffix: which of several sets, such as `-wiki`.
    """
    text = f" validation{suffix} loss at {prefix} | "
    for name, loss in losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]

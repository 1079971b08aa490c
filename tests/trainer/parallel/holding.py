"""`python -m tests.trainer.parallel.holding FOLDER`: how many received activations and gradients a rank holds at the
most in a step of so many leaves, in an evaluation, and afterwards."""

from dataclasses import replace
from typing import Any

import torch

from elastic.data import Leaves
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import lay_out
from elastic.trainer.parallel.pipeline import Pipeline
from elastic.trainer.parallel.stage import LeanStage
from elastic.trainer.run.step import Stepper
from tests.trainer.forks import main
from tests.trainer.model.shapes import GPT2
from tests.trainer.parallel.layouts import PLAIN
from tests.trainer.program import forward_step
from tests.trainer.run.worlds import share

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"virtual": 2},
    "zero-bubble": {"virtual": 2},
    "gpipe": {},
}
SIZES = dict.fromkeys(SCHEDULES, 2)
COUNTS = (4, 16)
"""Leaves of a step, and of the next one."""


def held(stages: list[LeanStage]) -> int:
    infos = [
        info
        for stage in stages
        for one in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in one
    ]
    buffers = [getattr(info, "buffer", None) for info in infos]
    kept = sum(len(stage.fwd_cache) for stage in stages if not stage.has_backward)
    return kept + sum(one is not None and not one.is_meta for one in buffers)


def find(name: str) -> dict[str, Any]:
    config = replace(GPT2, num_layers=4)
    layout = replace(PLAIN, pp=2, **{"schedule": name, **SCHEDULES[name]})
    laid = lay_out(
        config, layout, make=lambda part: GPT(config, part.tp, part.layers), forward_step=forward_step,
        leaf_size=2, leaves=max(COUNTS), seed=1, device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, config, 1, 0.05)
    stepper, most = Stepper(laid, leaf_tokens=2 * config.seq_length), 0
    assert isinstance(laid.runner, Pipeline)
    every: list[LeanStage] = []

    def look(program: Any, *_: object) -> None:
        nonlocal every, most
        every = [stage for _, stages in laid.runner._made.values() for stage in stages]  # type: ignore[union-attr]
        most = max(most, held(every))

    for program in laid.programs:
        program.register_forward_hook(look)
    found = {}
    for count in COUNTS:
        leaves = Leaves(batch_size=2 * count, leaf_size=2)
        mine = share(leaves.of(0, 0, 1))
        for what, act in (("training", stepper.accumulate), ("evaluation", stepper.evaluate)):
            most = 0
            act(mine, leaves)
            laid.runner.zero_grad()
            found[f"{what} of {count}"] = most
    return found | {"afterwards": held(every)}


if __name__ == "__main__":
    main(SIZES, find)

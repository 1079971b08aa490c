"""`python -m tests.trainer.arguments.dry FILE:WORLD ...`: each configuration at its true sizes, on a rank of the
first, a middle and the last stage of a world of its own whose other ranks are fake: tensors have shapes, and no
memory. A leaf is run forward and backward; in the middle of a pipeline a step is, in its schedule's order.

What it has of parameters is held against a closed form and the footprint that is said at start, and the passes
against those that the footprint follows. A rank is a fork: torch keeps some of a group for longer than the group
lives.
"""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.parallel import layout as layouts
from elastic.trainer.parallel.footprint import footprint
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.layout import Laid, lay_out
from elastic.trainer.parallel.order import order
from elastic.trainer.parallel.pipeline import Pipeline
from elastic.trainer.parallel.program import Batch
from elastic.trainer.parallel.stage import LeanStage
from elastic.trainer.run import begin
from tests.trainer.program import forward_step

DATA = ("--data-path", "p", "--vocab-size", "50256")
WORDS = 50304
"""Of these, padded."""


def be(settings: Settings, grid: Grid, stage: int) -> None:
    """A rank of that stage. What is eager is what would be compiled."""
    layout = replace(settings.parallel(), compile=False)
    config = settings.config(vocab_size=WORDS)
    plan = begin.plan_of(settings, layout)
    place = Place(grid.dp - 1, stage, grid.tp - 1)
    mine = len(plan.cut(plan.sizes.largest).of(0, place.dp, grid.dp))
    dist.init_process_group("fake", rank=grid.rank(place), world_size=grid.size, store=FakeStore())
    with FakeTensorMode(allow_non_fake_inputs=True):
        laid = lay_out(
            config, layout, make=lambda part: GPT(config, part.tp, part.layers),
            forward_step=forward_step, leaf_size=plan.leaf_size, leaves=plan.sizes.largest // plan.leaf_size,
            seed=1, device=torch.device("cpu"),
        )  # fmt: skip
        assert laid.place == place
        own = check_parameters(laid, config)
        told = footprint(config, layout, grid, place, leaf_size=plan.leaf_size, leaves=mine)
        assert told.optimizer == 2 * 4 * own, (told, own)
        tokens = torch.zeros(plan.leaf_size, config.seq_length, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(tokens.shape)}
        if isinstance(laid.runner, Pipeline) and 0 < stage < layout.pp - 1:
            leaves = min(mine, layout.pp)
            wanted = order(
                layout.schedule, rank=stage, pp=layout.pp, virtual=layout.virtual, leaves=leaves
            )
            assert passes(laid, batch, leaves) == [
                (one.kind, one.stage * layout.pp + stage, one.leaf) for one in wanted
            ]
        else:
            run_leaf(laid, config, batch, sequence=layout.sequence)
        assert all(one.grad is not None for one in laid.model.parameters())


def check_parameters(laid: Laid, config: GPTConfig) -> int:
    """Those of its stages, as 12 L H^2 + 13 L H + 2 H + (V + S) H has them; returns how many this rank keeps."""
    hidden, count = config.hidden_size, 0
    for program in laid.programs:
        part: Any = program.model
        count += len(part.layers) * (12 * hidden**2 + 13 * hidden)
        count += (WORDS + config.seq_length) * hidden if part.embedding else 0
        count += 2 * hidden if part.head else 0
        count += WORDS * hidden if part.head and not part.embedding else 0  # a copy of what is tied
    parameters: list[Any] = list(laid.model.parameters())
    assert sum(one.numel() for one in parameters) == count
    return sum(one.to_local().numel() for one in parameters)


def run_leaf(laid: Laid, config: GPTConfig, batch: Batch, *, sequence: bool) -> None:
    """Forward and backward through each of the rank's stages."""
    samples, length = batch["tokens"].shape
    positions = length // (laid.grid.tp if sequence else 1)
    for program in laid.programs:
        hidden = torch.zeros(samples, positions, config.hidden_size, dtype=torch.bfloat16)
        program.begin(torch.ones(1), samples * length)
        torch.autograd.backward(program(hidden.requires_grad_(), **batch).sum())


def passes(laid: Laid, batch: Batch, leaves: int) -> list[tuple[str, int, int]]:
    """A step's: which, of which stage, of which leaf."""
    found = []
    for kind in ("forward", "backward"):
        inner = getattr(LeanStage, f"{kind}_one_chunk")

        def noted(
            stage: LeanStage,
            leaf: int,
            *given: Any,
            kind: str = kind,
            inner: Any = inner,
            **named: Any,
        ) -> Any:
            found.append((kind, stage.stage_index, leaf))
            return inner(stage, leaf, *given, **named)

        setattr(LeanStage, f"{kind}_one_chunk", noted)
    laid.runner.run(
        {name: one.repeat(leaves, 1) for name, one in batch.items()}, torch.ones(leaves)
    )
    return found


def make_meshes_real() -> None:
    """And have no stage asked whether it knows its shapes."""

    def real(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def called(*given: Any, **named: Any) -> Any:
            with unset_fake_temporarily():
                return inner(*given, **named)

        return called

    def known(_: Any, stages: Any, *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    for name in ("__init__", "__getitem__", "get_local_rank", "get_coordinate"):
        setattr(DeviceMesh, name, real(getattr(DeviceMesh, name)))
    layouts.__dict__["init_device_mesh"] = real(init_device_mesh)
    setattr(_PipelineSchedule, "_warmup_p2p", known)  # noqa: B010 - the type of what it replaces differs


def main() -> None:
    """Status 1 where one fails."""
    make_meshes_real()
    for told in sys.argv[1:]:
        file, _, world = told.rpartition(":")
        settings = parse(["--yaml-cfg", file, *DATA])
        layout = settings.parallel()
        grid = Grid.of(int(world), tp=layout.tp, pp=layout.pp)
        for stage in sorted({0, layout.pp // 2, layout.pp - 1}):
            if os.fork() == 0:
                try:
                    be(settings, grid, stage)
                    os._exit(0)
                except BaseException:  # noqa: BLE001 - nothing may go on in a fork
                    sys.stderr.write(f"{file}, stage {stage}:\n{traceback.format_exc()}")
                    sys.stderr.flush()
                    os._exit(1)
            if os.wait()[1]:
                raise SystemExit(1)


if __name__ == "__main__":
    main()

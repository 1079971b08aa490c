"""Pipeline parallelism: which stage has which blocks, and a step's leaves through all of them.

The schedules are torch's (`torch.distributed.pipelining`); a leaf is a micro-batch. A schedule is made
for a number of micro-batches, so one is kept for each that comes.

Shapes: n leaves of b samples each, S positions (s of them on this rank under sequence parallelism), H
hidden size.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from elastic.proto.errors import UsageError
from elastic.trainer.parallel.program import Batch, Program, Told
from elastic.trainer.parallel.sharding import reshard
from elastic.trainer.parallel.stage import LeanStage
from elastic.trainer.parallel.zero_bubble import Stage

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

_SINGLE: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, Callable[..., Any]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


def cut(layers: int, stages: int) -> list[range]:
    """Which blocks each stage has, in order. Where they do not divide, the first and the last have fewer:
    embedding and head are work, too. Raises `UsageError` for more stages than blocks."""
    if stages > layers:
        raise UsageError(
            f"{layers} layers are too few for {stages} pipeline stages: take fewer stages"
        )
    counts = [layers // stages] * stages
    inner = list(range(1, stages - 1)) or list(range(stages))
    for number in range(layers % stages):
        counts[inner[number % len(inner)]] += 1
    ends = [sum(counts[: number + 1]) for number in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def legal(schedule: Schedule, pp: int) -> tuple[int, int]:
    """What `elastic.data.Leaves` takes: a rank's leaves are a multiple of the first, at least the second."""
    return (pp, pp) if schedule in _MULTI else (1, pp)


class Pipeline:
    """This rank's stages of one model."""

    def __init__(
        self,
        programs: Sequence[Program],
        mesh: DeviceMesh,
        *,
        schedule: Schedule,
        hidden: Sequence[int],
        dtype: torch.dtype,
        tokens: int,
    ) -> None:
        """programs: this rank's, sharded; number k is stage k x pp + rank. mesh: of one dimension, `pp`.

        hidden: [b, s, H], what goes from stage to stage, in `dtype`; tokens: of a leaf, b x S.
        """
        self._mesh, self._schedule = mesh, schedule
        self._hidden, self._dtype, self._tokens = tuple(hidden), dtype, tokens
        self._programs = programs
        self._made: dict[tuple[int, bool], tuple[Any, Sequence[LeanStage]]] = {}
        # Of an error, which is raised anyway, torch's write down the whole schedule.
        logging.getLogger(ScheduleInterleaved1F1B.__module__).setLevel(logging.CRITICAL)

    def run(self, batch: Batch, weights: Tensor, keys: Tensor | None = None) -> list[Told]:
        """All leaves forward and backward; gradients are reduced.

        batch: [n b, ...] each; weights: of the leaves' mean losses, fp32 [n]; keys: of their
        dropout, [n, ...]. Returns what came of each leaf on the last stage, and nothing elsewhere.
        """
        return self._step(batch, weights, keys, backward=True)

    @torch.no_grad()
    def evaluate(self, batch: Batch, leaves: int) -> list[Told]:
        """All leaves forward: the same without gradients."""
        weights = torch.ones(leaves, device=next(iter(batch.values())).device)
        told = self._step(batch, weights, None, backward=False)
        for program in self._programs:
            reshard(program)
        return told

    def zero_grad(self) -> None:
        for program in self._programs:
            program.zero_grad()

    def _step(
        self, batch: Batch, weights: Tensor, keys: Tensor | None, *, backward: bool
    ) -> list[Told]:
        key = (len(weights), backward)
        if key not in self._made:
            self._made[key] = self._make(weights, backward=backward)
        for program in self._programs:
            program.begin(weights, self._tokens, keys)
        first = self._mesh.get_local_rank() == 0
        last = self._programs[-1].last
        # Schedules cut something for the first stage's input and for the loss; neither looks at it.
        made, stages = self._made[key]
        made.step(
            *([weights] if first else []),
            **batch,
            target=weights if last and backward else None,
            return_outputs=False,
        )
        for stage in stages:
            stage.rest()
        return self._programs[-1].told

    def _make(self, weights: Tensor, *, backward: bool) -> tuple[Any, Sequence[LeanStage]]:
        rank, pp = self._mesh.get_local_rank(), self._mesh.size()
        count = pp * len(self._programs)
        leaf = weights[:1].to("meta")
        hidden = torch.empty(self._hidden, dtype=self._dtype, device="meta", requires_grad=backward)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=backward)
        kind = Stage if self._schedule == "zero-bubble" else LeanStage
        stages = [
            kind(
                program, index, count, weights.device,
                input_args=(leaf if index == 0 else hidden,),
                output_args=(loss if index == count - 1 else hidden,),
                group=self._mesh.get_group(),
            )
            for number, program in enumerate(self._programs)
            for index in [number * pp + rank]
        ]  # fmt: skip
        loss_fn = (lambda loss, _: loss) if backward else None
        if self._schedule in _MULTI:
            several = _MULTI[self._schedule]
            return several(stages, len(weights), loss_fn=loss_fn, scale_grads=False), stages
        one = _SINGLE[self._schedule]
        return one(stages[0], len(weights), loss_fn=loss_fn, scale_grads=False), stages

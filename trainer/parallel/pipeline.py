"""Pipeline parallelism: which stage has which blocks, and a step's leaves through all of them.

The schedules are torch's (`torch.distributed.pipelining`); a leaf is a micro-batch. A schedule is made
for a number of micro-batches, so one is kept for each that comes.

Shapes: n leaves of b samples each, S positions (s of them on this rank under sequence parallelism), H
hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from elastic.proto.errors import UsageError
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
        parts: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        schedule: Schedule,
        hidden: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """parts: this rank's, sharded; part k is stage k x pp + rank. mesh: of one dimension, `pp`.

        hidden: [b, s, H], what goes from stage to stage, in `dtype`.
        """
        self._mesh, self._schedule = mesh, schedule
        self._hidden, self._dtype = tuple(hidden), dtype
        self._parts = parts
        self._made: dict[int, Any] = {}

    def run(self, inputs: Tensor, targets: Tensor, weights: Tensor, leaves: int) -> list[Tensor]:
        """All leaves forward and backward; gradients are reduced. Each [n b, S]; where they are not
        used, as in the middle, they only have to have the shape. Returns the leaves' losses, [] each, on
        the last stage, and nothing elsewhere."""
        if leaves not in self._made:
            self._made[leaves] = self._make(inputs, leaves)
        schedule, first, last = self._made[leaves]
        losses: list[Tensor] = []
        schedule.step(
            *([inputs] if first else []),
            targets=targets,
            weights=weights,
            target=targets if last else None,
            losses=losses,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()

    def _make(self, inputs: Tensor, leaves: int) -> tuple[Any, bool, bool]:
        rank, pp = self._mesh.get_local_rank(), self._mesh.size()
        count = pp * len(self._parts)
        device = inputs.device
        tokens = torch.empty(self._hidden[0], inputs.shape[1], dtype=torch.int64, device="meta")
        hidden = torch.empty(self._hidden, dtype=self._dtype, device="meta", requires_grad=True)
        outputs = (
            torch.empty((), dtype=torch.float32, device="meta", requires_grad=True),
            torch.empty(self._hidden[0], inputs.shape[1], dtype=torch.float32, device="meta"),
        )
        kind = Stage if self._schedule == "zero-bubble" else PipelineStage
        stages = [
            kind(
                part, index, count, device,
                input_args=(tokens if index == 0 else hidden,),
                output_args=outputs if index == count - 1 else (hidden,),
                group=self._mesh.get_group(),
            )
            for number, part in enumerate(self._parts)
            for index in [number * pp + rank]
        ]  # fmt: skip
        options = {"loss_fn": lambda output, _: output[0], "scale_grads": False}
        if self._schedule in _MULTI:
            made = _MULTI[self._schedule](stages, leaves, **options)
        else:
            made = _SINGLE[self._schedule](stages[0], leaves, **options)
        return made, rank == 0, rank == pp - 1

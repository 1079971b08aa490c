"""A model that no pipeline cuts: its leaves, one after the other."""

from typing import cast

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from elastic.trainer.model.gpt import GPT
from elastic.trainer.parallel.sharding import begin_leaf


class Whole:
    """All of the model, sharded."""

    def __init__(self, model: GPT, *, stage: int) -> None:
        """stage: ZeRO's."""
        self._model, self._stage = model, stage

    def run(self, inputs: Tensor, targets: Tensor, weights: Tensor, leaves: int) -> list[Tensor]:
        losses: list[Tensor] = []
        parts = zip(inputs.chunk(leaves), targets.chunk(leaves), weights.chunk(leaves), strict=True)
        for number, part in enumerate(parts, 1):
            begin_leaf(cast(FSDPModule, self._model), stage=self._stage, last=number == leaves)
            loss = cast(tuple[Tensor, Tensor], self._model(*part))[0]
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def zero_grad(self) -> None:
        self._model.zero_grad()

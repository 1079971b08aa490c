"""A model that no pipeline cuts: its leaves, one after the other."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from elastic.trainer.parallel.accumulators import Forwards
from elastic.trainer.parallel.program import Batch, Program, Told
from elastic.trainer.parallel.sharding import begin_leaf, reshard


class Whole:
    """All of the model, sharded. The methods are those of `Pipeline`."""

    def __init__(self, program: Program, *, stage: int, tokens: int) -> None:
        """stage: ZeRO's; tokens: of a leaf."""
        self._program, self._stage, self._tokens = program, stage, tokens
        self._forwards = Forwards(program)

    def run(self, batch: Batch, weights: Tensor, keys: Tensor | None = None) -> list[Told]:
        self._program.begin(weights, self._tokens, keys)
        for number, leaf in enumerate(_cut(batch, len(weights)), 1):
            last = number == len(weights)
            begin_leaf(cast(FSDPModule, self._program), stage=self._stage, last=last)
            with self._forwards.leaf():
                loss = self._program(**leaf)
            loss.backward()
        return self._program.told

    @torch.no_grad()
    def evaluate(self, batch: Batch, leaves: int) -> list[Told]:
        weights = torch.ones(leaves, device=next(iter(batch.values())).device)
        self._program.begin(weights, self._tokens)
        for leaf in _cut(batch, leaves):
            self._program(**leaf)
        reshard(self._program)
        return self._program.told

    def zero_grad(self) -> None:
        self._program.zero_grad()


def _cut(batch: Batch, leaves: int) -> Iterator[Batch]:
    parts = {name: tensor.chunk(leaves) for name, tensor in batch.items()}
    for number in range(leaves):
        yield {name: part[number] for name, part in parts.items()}
